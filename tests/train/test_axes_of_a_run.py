"""`onefold train --tp --ep`: the losses of a run without them, in its checkpoints, its model and its
plan too.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.processes.ranks import Ranks
from onefold.train.checkpoints import Keeper
from onefold.train.config import resolve
from onefold.train.loop import Row, train
from onefold.train.report import Reporter, describe
from onefold.train.worker import export
from onefold.wording import TrainError
from ranks import run_ranks
from started_runs import begun

#: Of ranks.SERVERS.
SERVER = "libraries"

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
STEPS = 4
#: Two blocks of two heads.
LLAMA = "llama:430k"
SHAPE: dict[str, Any] = {"vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "max_position_embeddings": 64,
        "tie_word_embeddings": False}  # fmt: skip


def started(folder: str, output: str, **options: Any) -> dict[str, Any]:
    """One start of a run on all ranks of this process group, as the command makes it."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"), "gloo", dist.group.WORLD)
    given = {
        "model": LLAMA, "tokenizer": "bytes", "data": f"{folder}/text.txt", "seq": 32, "steps": STEPS, "global_batch": 8,
        "micro_batch": 1, "lr": 1e-2, "eval_every": STEPS, "eval_samples": 6, "async_save": False,
        "output": f"{folder}/{output}",
    }  # fmt: skip
    config = resolve({**given, **options})
    run, notes = begun(config, ranks)
    rows: list[Row] = []
    with closing(Keeper(run, Path(config.output or ""), Reporter())) as keeper:
        train(run, lambda: 0, rows.append, keeper=keeper)
    export(run, Path(config.output or "") / "model")
    return {
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "held out": [row["eval_loss"] for row in rows if "eval_loss" in row],
        "tokens": [row["tokens"] for row in rows],
        "notes": notes,
        "plan": describe(run),
        "planned": run.choice.planned,
        "measured": run.measured and (run.measured.rest, run.measured.wire),
        "random": torch.rand(1).item(),
    }


def several(folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Several runs, one after the other in the same processes."""
    return {name: started(folder, name, **options) for name, options in runs.items()}


def same(seen: dict[str, Any], expected: dict[str, Any], last: int = STEPS) -> None:
    for what in ("losses", "norms"):
        assert seen[what] == pytest.approx(expected[what][-last:], rel=2e-5), what
    assert seen["held out"] == pytest.approx(
        expected["held out"][-len(seen["held out"]) :], rel=2e-5
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.slow
def test_tensor_parallel_runs_have_the_losses_of_data_parallel_ones_and_resume_as_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    saving = {"save_every": 2, "keep": 9}
    at = f"{tmp_path}/{{}}/checkpoints/step-00000002"
    runs: dict[str, dict[str, Any]] = {
        "plain": {**saving, "stage": "2"},
        "tp": {
            **saving,
            "stage": "3",
            "tp": 2,
            "activation_checkpointing": "full",
        },
        "tp as plain": {"stage": "1", "resume": at.format("tp")},
        "plain as tp": {"stage": "auto", "tp": 2, "resume": at.format("plain"), "micro_batch": 2},
    }
    every = run_ranks(4, several, str(tmp_path), runs)
    first = every[0]
    for ranks in every:
        same(ranks["tp"], ranks["plain"])
        same(ranks["tp as plain"], ranks["plain"], 2)
        same(ranks["plain as tp"], ranks["plain"], 2)
    assert first["tp"]["tokens"] == first["plain"]["tokens"] == [8 * 32] * STEPS
    (said,) = [note for note in first["plain as tp"]["notes"] if "have changed" in note]
    assert "--tp 1 -> 2" in said
    # Ranks that divide the layers draw the same dropout, others another, also after a resume
    for name in ("tp", "plain as tp"):
        a, b, c, d = (ranks[name]["random"] for ranks in every)
        assert a == b != c == d, name
    assert len({ranks["tp as plain"]["random"] for ranks in every}) == 4
    plain, divided = weights(tmp_path / "plain/model"), weights(tmp_path / "tp/model")
    assert plain.keys() == divided.keys()
    for name, value in plain.items():
        torch.testing.assert_close(divided[name], value, rtol=1e-3, atol=1e-4)
    plan = first["tp"]["plan"]
    assert (plan["axes"], plan["data_ranks"]) == ("dp 2 × tp 2", 2)
    # Two ranks hold each part of what is divided, four each norm
    planned = first["tp"]["planned"]
    holders = planned.holders.values()
    assert (min(holders), max(holders), planned.scheme.stage) == (2, 4, 3)
    # What the plan says of the first rank
    assert first["tp"]["measured"] == tuple(plan["predicted"][at] for at in ("rest", "wire"))


@pytest.mark.slow
def test_runs_with_divided_experts_have_the_losses_of_data_parallel_ones(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    (tmp_path / "text.txt").write_text(TEXT)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    given = {"model": f"{tmp_path}/moe", "precision": "fp32"}
    at = f"{tmp_path}/ep/checkpoints/step-00000002"
    runs: dict[str, dict[str, Any]] = {
        "plain": {**given, "stage": "3"},
        "ep": {**given, "stage": "3", "ep": 2, "save_every": 2, "keep": 9},
        "ep as both": {**given, "stage": "2", "ep": 2, "tp": 2, "resume": at},
    }
    every = run_ranks(4, several, str(tmp_path), runs)
    for ranks in every:
        same(ranks["ep"], ranks["plain"])
        same(ranks["ep as both"], ranks["plain"], 2)
    assert every[0]["ep"]["plan"]["axes"] == "dp 4 × ep 2"
    assert every[0]["ep as both"]["plan"]["axes"] == "dp 2 × tp 2 × ep 2"
    plain, divided = weights(tmp_path / "plain/model"), weights(tmp_path / "ep/model")
    assert plain.keys() == divided.keys()
    for name, value in plain.items():
        torch.testing.assert_close(divided[name], value, rtol=1e-3, atol=1e-4)


REFUSED = {
    "adapters": ({"tp": 2, "lora": 4}, r"--tp 2 beside --lora 4"),
    "compiled": ({"ep": 2, "compile": True}, r"--ep 2 beside --compile"),
    "ranks": ({"tp": 3}, r"--tp 3 does not divide 4 ranks: use one of 1, 2, 4"),
    "data ranks": ({"tp": 2, "ep": 4}, r"--ep 4 does not divide 2 data-parallel ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_axes_that_cannot_be_are_refused_before_a_rank_starts(name: str) -> None:
    options, said = REFUSED[name]
    with pytest.raises(TrainError, match=said):
        resolve({"model": LLAMA, **options}).check(4)
