"""`onefold train --pp`: the losses of a run without stages, in its checkpoints, its model and its plan
too.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.processes.ranks import Ranks
from onefold.train import checkpoints
from onefold.train.config import resolve
from onefold.train.early import check_batch
from onefold.train.keeper import Keeper
from onefold.train.loop import Row, train
from onefold.train.prepare import prepare
from onefold.train.report import Reporter, describe
from onefold.train.results import export
from onefold.wording import TrainError
from ranks import run_ranks

#: Of ranks.SERVERS.
SERVER = "libraries"

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
STEPS = 4
SHAPE: dict[str, Any] = {"vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "max_position_embeddings": 64,
        "tie_word_embeddings": False}  # fmt: skip


def saved_model(folder: Path, kind: str, **options: Any) -> str:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(folder / kind)
    return str(folder / kind)


def started(folder: str, output: str, **options: Any) -> dict[str, Any]:
    """One start of a run on all ranks of this process group, as the command makes it."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"), "gloo", dist.group.WORLD)
    given = {
        "tokenizer": "bytes", "data": f"{folder}/text.txt", "seq": 32, "steps": STEPS, "global_batch": 8, "micro_batch": 1,
        "lr": 1e-2, "eval_every": STEPS, "eval_samples": 6, "precision": "fp32", "output": f"{folder}/{output}",
    }  # fmt: skip
    config = resolve({**given, **options})
    point = ranks.on_first(lambda: checkpoints.find(config, restarted=False))
    run = prepare(config, ranks, lambda line: None, point)
    notes = checkpoints.load(run, point) if point is not None else []
    rows: list[Row] = []
    with closing(Keeper(run, Path(config.output or ""), Reporter(), begun=0.0)) as keeper:
        train(run, lambda: 0, rows.append, keeper=keeper)
    export(run, Path(config.output or "") / "model")
    return {
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "held out": [row["eval_loss"] for row in rows if "eval_loss" in row],
        "tokens": [row["tokens"] for row in rows],
        "scales": [row.get("scale") for row in rows],
        "notes": notes,
        "plan": describe(run),
        "random": torch.rand(1).item(),
        "names": [name for name, _ in run.model.named_parameters()],
    }


def several(folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Several runs, one after the other in the same processes."""
    return {name: started(folder, name, **options) for name, options in runs.items()}


def same(seen: dict[str, Any], expected: dict[str, Any], last: int = STEPS) -> None:
    for what in ("losses", "norms"):
        assert seen[what] == pytest.approx(expected[what][-last:], rel=2e-5), what
    assert seen["held out"] == pytest.approx(expected["held out"], rel=2e-5)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_model(a: Path, b: Path) -> None:
    plain, cut = weights(a), weights(b)
    assert list(plain) == list(cut)
    for name, value in plain.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-3, atol=1e-4)
    assert (a / "config.json").read_text() == (b / "config.json").read_text()


def test_a_pipeline_has_the_losses_of_one_stage_and_resumes_at_any_number_of_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    given = {"model": saved_model(tmp_path, "Llama")}
    saving = {**given, "save_every": 2, "keep": 9}
    at = f"{tmp_path}/{{}}/checkpoints/step-00000002"
    runs: dict[str, dict[str, Any]] = {
        "plain": {**saving, "stage": "2"},
        "pp": {**saving, "stage": "3", "pp": 2},
        "pp as pp": {**given, "stage": "1", "pp": 2, "resume": at.format("pp")},
        "pp as plain": {**given, "stage": "1", "resume": at.format("pp")},
        "plain as pp": {**given, "stage": "auto", "pp": 2, "resume": at.format("plain")},
    }
    every = run_ranks(2, several, str(tmp_path), runs)
    for ranks in every:
        same(ranks["pp"], ranks["plain"])
        for name in ("pp as pp", "pp as plain", "plain as pp"):
            same(ranks[name], ranks["plain"], 2)
        assert ranks["pp as pp"]["losses"] == ranks["pp"]["losses"][2:]
    same_model(tmp_path / "plain/model", tmp_path / "pp/model")


def test_stages_of_divided_layers_have_the_losses_of_whole_ones(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    given = {"model": saved_model(tmp_path, "Llama"), "stage": "3"}
    at = f"{tmp_path}/both/checkpoints/step-00000002"
    runs: dict[str, dict[str, Any]] = {
        "plain": {**given, "stage": "2"},
        "both": {
            **given,
            "pp": 2,
            "tp": 2,
            "save_every": 2,
            "keep": 9,
            "async_save": False,
            "activation_checkpointing": "full",
        },
        "both as tp": {**given, "tp": 2, "resume": at},
        "both as four": {**given, "pp": 4, "resume": at, "micro_batch": 2},
    }
    every = run_ranks(4, several, str(tmp_path), runs)
    for ranks in every:
        same(ranks["both"], ranks["plain"])
        same(ranks["both as tp"], ranks["plain"], 2)
        same(ranks["both as four"], ranks["plain"], 2)
    same_model(tmp_path / "plain/model", tmp_path / "both/model")
    same_model(tmp_path / "plain/model", tmp_path / "both as four/model")
    plan = every[0]["both"]["plan"]
    assert (plan["axes"], plan["data_ranks"]) == ("dp 1 × tp 2 × pp 2", 1)
    assert plan["over_axes"]["micro_batches"] == 8
    assert "the ranks wait 11% of a step for the pipeline" in plan["reason"]


def test_stages_of_mixtures_have_the_losses_of_whole_ones(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    given = {"model": saved_model(tmp_path, "Qwen3Moe", **more), "stage": "3"}
    runs: dict[str, dict[str, Any]] = {
        "plain": given,
        "both": {**given, "pp": 2, "ep": 2, "save_every": 2, "keep": 9},
        "both as plain": {
            **given,
            "resume": f"{tmp_path}/both/checkpoints/step-00000002",
        },
    }
    every = run_ranks(4, several, str(tmp_path), runs)
    for ranks in every:
        same(ranks["both"], ranks["plain"])
        same(ranks["both as plain"], ranks["plain"], 2)
    same_model(tmp_path / "plain/model", tmp_path / "both/model")
    assert every[0]["both"]["plan"]["axes"] == "dp 2 × pp 2 × ep 2"
