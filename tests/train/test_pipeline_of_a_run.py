"""`onefold train --pp`: the losses of a run without stages, in its checkpoints, its model and its plan
too.
"""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from onefold.processes.ranks import Ranks
from onefold.train import checkpoints
from onefold.train.config import resolve
from onefold.train.early import check_batch
from onefold.train.keeper import Keeper
from onefold.train.loop import Row, train
from onefold.train.prepare import Run, prepare
from onefold.train.report import Reporter, describe
from onefold.train.results import export
from onefold.train.worker import Rank
from onefold.wording import TrainError
from ranks import run_ranks

#: Of ranks.SERVERS.
SERVER = "libraries"

TEXT = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ", k=3000))
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


def break_block(run: Run, number: int, what: str, micro_batch: int, step: int = 0) -> None:
    """Let the output of a layer of the last stage, or its gradient, go wrong in one micro-batch of
    step `step`, from 0.
    """
    model: Any = run.model
    chosen = run.order.micro_batches(step, 0, 1, run.choice.micro_batch)[micro_batch]
    labels = run.data.train.batch(chosen)["labels"]
    seen: list[bool] = [False]

    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen[0] = "labels" in kwargs and torch.equal(kwargs["labels"], labels)

    def spoil(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if seen[0] and what == "gradient" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output / 0.0 if seen[0] and what == "output" else None

    model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
    block = model.model.layers[number]
    if hasattr(block, "mlp"):
        block.mlp.register_forward_hook(spoil)


def started(folder: str, output: str, fault: Any = None, **options: Any) -> dict[str, Any]:
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
    if fault is not None:
        break_block(run, *fault)
    rows: list[Row] = []
    with closing(Keeper(run, Path(config.output or ""), Reporter(), begun=0.0)) as keeper:
        train(run, lambda: 0, rows.append, keeper=keeper)
    export(run, Path(config.output or "") / "model")
    left = sorted(path.name for path in Path(config.output or "").glob("checkpoints/.*"))
    return {
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "held out": [row["eval_loss"] for row in rows if "eval_loss" in row],
        "tokens": [row["tokens"] for row in rows],
        "scales": [row.get("scale") for row in rows],
        "notes": notes,
        "plan": describe(run),
        "random": torch.rand(1).item(),
        "place": Rank.place(cast(Rank, SimpleNamespace(run=run, doing="training"))),
        "left": [name for name in left if name != ".lock"],
        "names": [name for name, _ in run.model.named_parameters()],
    }


def untied(**options: Any) -> Any:
    import transformers

    return transformers.models.llama.LlamaConfig(**{**options, "tie_word_embeddings": False})


def several(folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Several runs, one after the other in the same processes."""
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        # A model of a size has tied embeddings, which are refused
        patch.setattr(transformers, "LlamaConfig", untied)
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
        assert ranks["pp"]["left"] == []
    assert [ranks["pp"]["place"].partition(", ")[2] for ranks in every] == [
        "in stage 0 of 2",
        "in stage 1 of 2",
    ]
    same_model(tmp_path / "plain/model", tmp_path / "pp/model")
    names = [ranks["pp"]["names"] for ranks in every]
    assert names[0][0] == "model.embed_tokens.weight" and names[1][-1] == "lm_head.weight"
    assert [*names[0], *names[1]] == every[0]["plain"]["names"]
    # Each stage draws random bits of its own, also where the stages are others than before
    for name in ("pp", "plain as pp"):
        assert every[0][name]["random"] != every[1][name]["random"], name
    (said,) = [note for note in every[0]["pp as plain"]["notes"] if "have changed" in note]
    assert "--pp 2 -> 1" in said
    (said,) = [note for note in every[0]["pp as plain"]["notes"] if "was saved by" in note]
    assert "saved by 2 ranks at stage 3, and goes on with 2 at stage 1" in said
    at_top = tmp_path / "pp/checkpoints/step-00000004"
    assert {path.name for path in at_top.iterdir()} >= {"stage-0", "stage-1", "config.json"}


@pytest.mark.slow
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
        "both as four": {**given, "pp": 4, "resume": at, "micro_batch": 2},
    }
    every = run_ranks(4, several, str(tmp_path), runs)
    for ranks in every:
        same(ranks["both"], ranks["plain"])
        same(ranks["both as four"], ranks["plain"], 2)
    same_model(tmp_path / "plain/model", tmp_path / "both/model")
    same_model(tmp_path / "plain/model", tmp_path / "both as four/model")
    plan = every[0]["both"]["plan"]
    assert (plan["axes"], plan["data_ranks"]) == ("dp 1 × tp 2 × pp 2", 1)
    assert plan["over_axes"]["micro_batches"] == 8
    assert "the ranks wait 11% of a step for the pipeline" in plan["reason"]


@pytest.mark.slow
@pytest.mark.slow
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


def unsaved(folder: str, model: str) -> dict[str, Any]:
    """A run whose last stage cannot save."""
    import torch.distributed as dist

    from onefold.checkpoint.errors import CheckpointError
    from onefold.train import stage_checkpoints

    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointError("no space for the test.")

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(stage_checkpoints, "save", fails)
        try:
            started(folder, "unsaved", model=model, pp=2, save_every=2, async_save=False)
        except CheckpointError as error:
            said = str(error)
    dist.barrier()  # the first rank has removed what was written
    return {"said": said, "left": sorted(p.name for p in Path(folder, "unsaved").rglob("*"))}


@pytest.mark.slow
@pytest.mark.slow
def test_a_stage_that_fails_to_save_or_was_damaged_concerns_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    model = saved_model(tmp_path, "Llama")
    for seen in run_ranks(2, unsaved, str(tmp_path), model):
        assert seen["said"] == "no space for the test. (rank 1)"
        assert not [name for name in seen["left"] if "step" in name], seen["left"]
    given = {"model": model, "pp": 2, "save_every": 2}
    (whole, _) = run_ranks(2, several, str(tmp_path), {"run": given})
    file = tmp_path / "run/checkpoints/step-00000004/stage-1/rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)
    again = {"run": {**given, "resume": "auto"}}
    for ranks in run_ranks(2, several, str(tmp_path), again):
        assert ranks["run"]["losses"] == whole["run"]["losses"][2:]
        assert "Going on from the one before" in ranks["run"]["notes"][0]


TALKS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab" * n}]}
    for n in (3, 9, 5, 1, 12, 7, 2, 10, 4, 6, 8, 11)
]
#: A model whose values the first rank has, and sends to the stages.
DRAWN = "llama:430k"
#: Options of both runs.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "muon": {"optimizer": "muon", "stage": "2"},
    "conversations": {"data": "talks.jsonl"},
    "documents apart": {"pack": "documents"},
    "fewer micro-batches than stages": {"global_batch": 1, "eval_every": 2},
    "values of the first rank": {"model": DRAWN, "stage": "3"},
    "moments on the host": {"offload_optimizer": "cpu", "stage": "3"},
}


@pytest.mark.slow
@pytest.mark.slow
def test_stages_have_the_losses_of_whole_models_with_every_option(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, TALKS)))
    model = saved_model(tmp_path, "Llama")
    runs: dict[str, dict[str, Any]] = {}
    for name, options in VARIANTS.items():
        given = {"model": model, "stage": "1", **options}
        if "data" in given:
            given["data"] = f"{tmp_path}/{given['data']}"
        runs[name] = {**given, "pp": 2}
        # One sample at once is not divided among data-parallel ranks
        runs[f"{name}, whole"] = {**given, "tp": 2 if "global_batch" in given else 1}
    every = run_ranks(2, several, str(tmp_path), runs)
    for ranks in every:
        for name in VARIANTS:
            # Muon orthogonalizes in bf16, which makes more of what rounding differs in
            rel = {"fp16": 2e-3, "muon": 1e-3}.get(name, 2e-5)
            for what in ("losses", "norms", "held out"):
                expected = pytest.approx(ranks[f"{name}, whole"][what], rel=rel)
                assert ranks[name][what] == expected, (name, what)
            assert ranks[name]["scales"] == ranks[f"{name}, whole"]["scales"], name


def faulty(folder: str, model: str, faults: list[tuple[Any, ...]]) -> list[Any]:
    found: list[Any] = []
    for number, (fault, options) in enumerate(faults):
        given = {"model": model, "pp": 2, "stage": "1", **options}
        try:
            found.append(started(folder, f"faulty-{number}", fault, **given)["losses"])
        except TrainError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
@pytest.mark.slow
def test_numbers_that_are_not_finite_are_found_in_their_stage(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    model = saved_model(tmp_path, "Llama")
    back = {"save_every": 1, "on_nonfinite": "rollback"}
    faults = [
        ((2, "output", 2), {}),
        ((3, "gradient", 5), {}),
        ((3, "output", 5, 2), back),
    ]
    for *said, losses in run_ranks(2, faulty, str(tmp_path), model, faults):
        assert "the output of unit 'model.layers.2', on rank 1 in micro-batch 3" in said[0]
        assert "unit 'model.layers.3', on rank 1 in micro-batch 6" in said[1]
        assert len(losses) == STEPS, losses


def uncut(models: dict[str, tuple[str, dict[str, Any], int]]) -> dict[str, str]:
    import transformers

    from onefold.models.stages import refuse_uncut

    found = {}
    for name, (kind, options, stages) in models.items():
        config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **options})
        head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        with torch.device("meta"):
            model = getattr(transformers, f"{kind}{head}")(config)
        before = [id(module) for module in model.modules()]
        try:
            refuse_uncut(model, stages)
            found[name] = ""
        except TrainError as error:
            found[name] = str(error)
        assert before == [id(module) for module in model.modules()], name
    return found


def test_models_that_cannot_be_cut_are_refused() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    models: dict[str, tuple[str, dict[str, Any], int]] = {
        **{kind: (kind, {}, 4) for kind in ("Llama", "Mistral", "Qwen2", "Qwen3", "Olmoe")},
        "Mixtral": ("Mixtral", {"num_local_experts": 4}, 2),
        "Qwen3Moe": ("Qwen3Moe", experts, 2),
        "tied": ("Llama", {"tie_word_embeddings": True}, 2),
        "five": ("Llama", {}, 5),
        "routers": ("Qwen3Moe", {**experts, "output_router_logits": True}, 2),
        "scaled": ("Granite", {"embedding_multiplier": 3.0}, 2),
        "other names": ("GPT2", {}, 2),
    }
    (seen,) = run_ranks(1, uncut, models)
    assert [name for name, said in seen.items() if not said] == list(models)[:7]
    assert "--pp 2: a LlamaForCausalLM cannot be cut into stages: its head shares" in seen["tied"]
    assert "it has 4 layers, and each stage needs one: use at most --pp 4" in seen["five"]
    assert "its router loss (output_router_logits)" in seen["routers"]
    assert "changes hidden states between embedding, layers and norm" in seen["scaled"]
    assert "its layers are not found" in seen["other names"]


REFUSED = {
    "ranks": ({"pp": 3}, r"--pp 3 does not divide 4 ranks: use 1, 2 or 4"),
    "ranks of a stage": ({"pp": 2, "tp": 4}, r"--tp 4 does not divide 2 ranks of each stage"),
    "adapters": ({"pp": 2, "lora": 4}, r"--pp 2 beside --lora 4"),
    "compiled": ({"pp": 2, "compile": True}, r"--pp 2 beside --compile"),
    "in backward": (
        {"pp": 2, "offload_optimizer": "cpu", "step_in_backward": True, "clip": 0},
        r"--pp 2 beside --step-in-backward",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pipelines_that_cannot_be_are_refused_before_a_rank_starts(name: str) -> None:
    options, said = REFUSED[name]
    with pytest.raises(TrainError, match=said):
        check_batch(resolve({"model": "llama:430k", **options}), 4)
