"""DeepSpeed's checkpoints, made by DeepSpeed 0.19.8 itself (`data/make_deepspeed.py`): read,
continued, refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.source import Item
from onefold.integrations.deepspeed.checkpoint_reader import DeepSpeedSource, is_deepspeed
from ranks import run_ranks

DATA = Path(__file__).parents[1] / "checkpoint" / "data"
sys.path.insert(0, str(DATA))
from make_deepspeed import BEFORE, CASES, SAMPLES, TAG, Case, Tiny, digest

#: How far losses may be from DeepSpeed's: the rounding of the dtype computed in, over a few steps.
CLOSE = {"fp32": 2e-6, "bf16": 1e-2, "fp16": 2e-3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints that came with the project, a folder each."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for name in CASES:
        unpack(DATA / "saved_by_deepspeed" / f"{name}.zip", folder / name)
    return folder


def unpack(archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    return folder


def facts(folder: Path) -> dict[str, Any]:
    """What DeepSpeed said of the checkpoint in `folder`, and its losses in the steps after it."""
    found: dict[str, Any] = json.loads((folder / "case.json").read_text())
    return found


def whole(source: DeepSpeedSource, item: Item) -> torch.Tensor:
    stored = source.items()[item]
    out = torch.empty(stored.shape, dtype=stored.dtype)
    source.read(item, 0, out.numel(), out.view(-1))
    return out


# -- reading ---------------------------------------------------------------------------------------


def check_contents(folder: Path, case: Case) -> None:
    """Every tensor, group, scalar and count is what DeepSpeed says it is."""
    said, source = facts(folder), DeepSpeedSource(folder / "saved")
    assert (source.stage, source.ranks, source.counts.ranks) == (case.stage, case.ranks, case.ranks)
    for name, expected in said["parameters"].items():
        assert digest(whole(source, Item("parameter", name))) == expected, name
        for state in ("exp_avg", "exp_avg_sq"):
            assert digest(whole(source, Item("state", name, state))) == said[state][name], (
                name,
                state,
            )
        assert dict(source.scalars(name)) == {
            "step": torch.tensor(float(BEFORE - said["counts"][1]))
        }
    assert digest(whole(source, Item("buffer", "gains"))) == said["gains"]
    shapes = {name: tuple(p.shape) for name, p in Tiny().named_parameters()}
    assert {
        i.name: s.shape for i, s in source.items().items() if i.kind == "parameter"
    } == shapes, "frozen ones too"
    assert source.aliases() == {"head.weight": "words.weight"}
    assert len(source.items()) == 3 * len(said["parameters"]) + 2, "nothing else"

    ((decayed, plain),) = source.groups() or []
    assert sorted(decayed["params"]) == sorted(n for n in said["parameters"] if len(shapes[n]) > 1)
    assert sorted(plain["params"]) == sorted(n for n in said["parameters"] if len(shapes[n]) == 1)
    assert (decayed["weight_decay"], plain["weight_decay"], [decayed["lr"], plain["lr"]]) == (
        0.1,
        0.0,
        said["rates"],
    )
    assert tuple(decayed["betas"]) == (0.8, 0.9)
    assert [source.counts.steps, source.counts.skipped] == said[
        "counts"
    ] and source.counts.samples == BEFORE * SAMPLES
    assert source.scheduler == {"last_batch_iteration": BEFORE - said["counts"][1] - 1}
    assert {**source.extra, "seen": source.extra["seen"].tolist()} == {
        "note": "by hand",
        "epoch": 2,
        "seen": [0, 1, 2],
    }
    assert source.version == said["deepspeed"] and not source.unread
    if case.precision == "fp16":
        assert (
            source.scaler and source.scaler["cur_scale"] == said["scale"] and said["counts"][1] > 0
        )
    source.close()


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_and_number_is_what_deepspeed_says_it_is(name: str, made: Path) -> None:
    check_contents(made / name, CASES[name])


@pytest.mark.parametrize("name", ["stage-2-fp32-3", "stage-3-fp32-3"])
def test_an_interval_of_a_parameter_is_that_part_of_it(name: str, made: Path) -> None:
    source = DeepSpeedSource(made / name / "saved" / TAG)
    for item, stored in source.items().items():
        every = whole(source, item).view(-1)
        for start in range(0, every.numel(), 5):
            for stop in {min(start + length, every.numel()) for length in (0, 1, 4, 17, 40)}:
                out = torch.full((stop - start,), -1.0, dtype=torch.float64)
                source.read(item, start, stop, out)
                assert torch.equal(out, every[start:stop].double()), (item, stored, start, stop)


def test_a_file_of_other_values_and_one_that_is_none_are_refused(
    made: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(made / "stage-1-fp32-2" / "saved", tmp_path / "saved")
    (model,) = (folder / TAG).glob("*model_states.pt")
    rest = {"buffer_names": [], "global_steps": 1, "skipped_steps": 0, "dp_world_size": 2}
    for contents, words in (
        ({"module": {}, "param_shapes": [None], **rest}, "as of version 0.19: TypeError"),
        ({"module": {}, "param_shapes": [], **rest, "global_steps": "a"}, "0.19: ValueError"),
        ([1], "model_states.pt"),
    ):
        torch.save(contents, model)
        with pytest.raises(CheckpointError, match=words):
            DeepSpeedSource(folder)
    model.unlink()
    os.mkfifo(model)
    with pytest.raises(CheckpointError, match="it is a fifo, expected a file"):
        DeepSpeedSource(folder)  # without waiting for somebody to write


def test_only_the_files_that_hold_the_elements_are_opened(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "stage-1-fp32-2" / "saved", tmp_path / "saved")
    source = DeepSpeedSource(folder)
    (gone,) = (folder / TAG).glob("zero_pp_rank_1_*optim_states.pt")
    gone.unlink()
    first, out = Item("parameter", "words.weight"), torch.empty(66)
    source.read(first, 0, 66, out)
    assert torch.equal(
        out.view(11, 6), whole(DeepSpeedSource(made / "stage-1-fp32-2" / "saved"), first)
    )
    with pytest.raises(
        CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is missing"
    ):
        whole(source, Item("parameter", "down.weight"))


# -- going on --------------------------------------------------------------------------------------


def go_on(
    folder: Path, case: Case, stage: int, save: Path | None = None, **arguments: Any
) -> list[float]:
    """The losses after DeepSpeed's save, through the engine of `onefold.initialize` at `stage`, on
    the ranks there are; then save anew.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    said = facts(folder)
    torch.manual_seed(100 + rank)  # nothing of the model's own initialization may matter
    model, share = Tiny(), SAMPLES // ranks
    config = Case(stage, ranks, case.precision, more=case.more).config()
    engine, *_ = onefold.initialize(model=model, model_parameters=model.groups(), config=config)
    path, client_state = engine.load_checkpoint(folder / "saved", **arguments)
    assert (
        path == str(folder / "saved" / TAG)
        and client_state is not None
        and client_state["epoch"] == 2
    )
    assert [engine.global_steps, engine.skipped_steps] == said["counts"]
    assert engine.cur_scale == (said["scale"] if case.precision == "fp16" else 1.0)
    losses = []
    for batch in torch.tensor(said["batches"]):
        loss = engine(batch[rank * share : (rank + 1) * share])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    if save is not None:
        assert engine.save_checkpoint(save, client_state={"losses": losses})
    return losses


def go_on_at_every_stage(folder: str) -> dict[tuple[str, int], list[float]]:
    saves = {("stage-1-bf16-3", 2): Path(folder, "own")}
    return {
        (name, stage): go_on(Path(folder, name), case, stage, saves.get((name, stage)))
        for name, case in CASES.items()
        for stage in (1, 2, 3)
    }


def worst(folder: Path, losses: list[float]) -> float:
    expected = facts(folder)["losses"]
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_goes_on_with_the_losses_deepspeed_had_at_any_stage(ranks: int, made: Path) -> None:
    found = (
        go_on_at_every_stage(str(made))
        if ranks == 1
        else run_ranks(2, go_on_at_every_stage, str(made))[0]
    )
    far = {key: worst(made / key[0], losses) for key, losses in found.items()}
    assert len(far) == 3 * len(CASES) and all(
        distance < CLOSE[CASES[name].precision] for (name, _), distance in far.items()
    ), far
    model, steps = Tiny(), BEFORE + len(next(iter(found.values())))
    config = Case(1, 1, "bf16").config()
    engine = onefold.initialize(model=model, model_parameters=model.groups(), config=config)[0]
    # What was saved on `ranks` ranks at stage 2
    path, client_state = engine.load_checkpoint(made / "own")
    assert (path, client_state) == (
        str(made / "own" / f"global_step{steps}"),
        {"losses": found["stage-1-bf16-3", 2]},
    )
    assert (
        engine.global_steps == steps and engine.optimizer.state[model.norm.weight]["step"] == steps
    )


def test_without_the_optimizers_states_it_would_not(made: Path) -> None:
    folder = made / "stage-3-fp32-2"
    assert worst(folder, go_on(folder, CASES[folder.name], 3, load_optimizer_states=False)) > 1e-3


@pytest.mark.parametrize("ahead", [False, True])
def test_a_plain_loop_goes_on_as_well(ahead: bool, made: Path) -> None:
    """`onefold.load` and `load_async` recognise the folder; the optimizer gets DeepSpeed's options
    with its states.
    """
    folder = made / "stage-3-fp32-2"
    model = onefold.shard(Tiny(), onefold.Recipe.zero(2))
    optimizer = torch.optim.AdamW(model.groups(), lr=9.0)
    if ahead:
        onefold.load_async(folder / "saved", model=model, optimizer=optimizer).wait(300.0)
    else:
        onefold.load(folder / "saved", model=model, optimizer=optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == facts(folder)["rates"]
    # The second depends on the states
    for step, expected in enumerate(facts(folder)["losses"][:2]):
        loss = model(torch.tensor(facts(folder)["batches"][step]))
        assert abs(loss.item() - expected) < 2e-6
        loss.backward()
        onefold.clip_grad_norm_(model, 0.5)
        optimizer.step()


def test_what_the_engine_saves_it_loads_at_another_stage(tmp_path: Path, made: Path) -> None:
    def build(stage: int) -> Any:
        model = Tiny()
        return onefold.initialize(
            model=model, model_parameters=model.groups(), config=Case(stage, 1, "fp16").config()
        )[0]

    engine, batch = build(3), torch.tensor(facts(made / "stage-1-fp32-2")["batches"][0])
    for _ in range(2):
        engine.backward(engine(batch))
        engine.step()
    assert (
        engine.save_checkpoint(tmp_path, client_state={"epoch": 4})
        and (tmp_path / "latest").read_text() == "global_step2"
    )
    assert engine.save_checkpoint(tmp_path, "other", save_latest=False)
    other = build(1)
    assert other.load_checkpoint(tmp_path / "nowhere") == (None, None)
    with pytest.raises(CheckpointError, match="no checkpoint 'missing'"):
        other.load_checkpoint(tmp_path, "missing")
    assert other.load_checkpoint(tmp_path) == (str(tmp_path / "global_step2"), {"epoch": 4})
    assert (
        other.loss_scaler.state_dict() == engine.loss_scaler.state_dict()
        and other.get_lr() == engine.get_lr()
    )
    assert (other.global_steps, other.micro_steps, other.global_samples) == (2, 2, 2 * SAMPLES)
    losses = []
    for each in (engine, other):
        each.backward(each(batch))
        each.step()
        losses.append(each(batch).item())
    assert losses[0] == losses[1]


# -- refusing --------------------------------------------------------------------------------------


class Trap:
    """Would make a folder where it is unpickled."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.where),)


class Own:
    """A class of the user's."""


def test_a_pickle_that_would_run_code_is_refused_by_file_and_class(
    made: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(made / "stage-1-fp32-2" / "saved", tmp_path / "saved")
    model = folder / TAG / "mp_rank_00_model_states.pt"
    contents = torch.load(model, weights_only=True)
    for value, name in ((Trap(tmp_path / "sprung"), r"mkdir"), (Own(), rf"{Own.__module__}\.Own")):
        torch.save({**contents, "mine": value}, model)
        with pytest.raises(CheckpointError, match=rf"mp_rank_00_model_states\.pt.*{name}"):
            DeepSpeedSource(folder)
        assert not (tmp_path / "sprung").exists()
    with torch.serialization.safe_globals([Own]):
        assert isinstance(DeepSpeedSource(folder).extra["mine"], Own)


def test_what_cannot_be_read_says_why(made: Path, tmp_path: Path) -> None:
    def refused(
        pattern: str, change: Any, name: str = "stage-3-fp32-3", tag: str | None = None
    ) -> None:
        folder = shutil.copytree(
            made / name / "saved", tmp_path / f"{len(list(tmp_path.iterdir()))}"
        )
        change(folder)
        with pytest.raises(CheckpointError, match=pattern):
            source = DeepSpeedSource(folder, tag)
            for item in source.items():
                whole(source, item)

    def shard(folder: Path, rank: int, name: str = TAG) -> Path:
        return folder / name / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    assert is_deepspeed(made / "stage-1-fp32-2" / "saved") and is_deepspeed(
        made / "stage-1-fp32-2" / "saved" / TAG
    )
    assert not is_deepspeed(tmp_path) and not is_deepspeed(tmp_path / "nowhere")
    refused("the tag 'five' was given, but .* There are: three steps", lambda f: None, tag="five")
    refused(
        "its file 'latest' names '../elsewhere'",
        lambda f: (f / "latest").write_text("../elsewhere"),
    )
    refused("no file 'latest' that chooses one of three steps", lambda f: (f / "latest").unlink())
    refused(r"no \*_optim_states.pt of rank 1", lambda f: shard(f, 1).unlink())
    refused("saved on 3 ranks, but has 2 files", lambda f: shard(f, 2).unlink())
    refused("saved on 3 ranks, but has 4 files", lambda f: shutil.copy(shard(f, 2), shard(f, 3)))
    refused(
        "holds two checkpoints in one",
        lambda f: shutil.copy(shard(f, 2), f / TAG / f"bf16_{shard(f, 2).name}"),
    )
    refused(
        "tensor- or pipeline-parallel",
        lambda f: shutil.copy(shard(f, 2), f / TAG / "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
    )
    refused("saved at stage 0", lambda f: [shard(f, rank).unlink() for rank in range(3)])
    refused(
        "is damaged, or no file of torch.save",
        lambda f: shard(f, 1).write_bytes(shard(f, 1).read_bytes()[:1000]),
    )
    refused("universal form", lambda f: (f / TAG / "zero").mkdir())
    other = made / "stage-3-fp32-2" / "saved"
    refused(
        "rank_1_.* belongs to another checkpoint",
        lambda f: shutil.copy(shard(other, 1), shard(f, 1)),
    )
    older = made / "stage-3-fp32-3" / "saved"

    def set_back(folder: Path) -> None:
        from onefold.integrations.deepspeed.checkpoint_reader.pickles import STAND_INS

        with torch.serialization.safe_globals(STAND_INS):
            contents = torch.load(shard(older, 2), weights_only=True)
        for state in contents["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state["step"] -= 1
        contents["optimizer_state_dict"].update(zero_stage=3, loss_scaler=None)
        torch.save(contents, shard(folder, 2))

    refused("is of step 2, rank 0's file of step 3: two saves are mixed up", set_back)


# -- with DeepSpeed itself -------------------------------------------------------------------------


def test_checkpoints_made_now_by_deepspeed_are_read_and_continued(tmp_path: Path) -> None:
    """One of each stage, by an interpreter with torch and DeepSpeed: this one, or the one that
    DEEPSPEED_PYTHON names.
    """
    python = os.environ.get("DEEPSPEED_PYTHON") or (
        sys.executable if importlib.util.find_spec("deepspeed") else None
    )
    if python is None:
        pytest.skip(
            "DeepSpeed is not installed (what it made at stages 1, 2 and 3 lies in"
            " data/saved_by_deepspeed and was read). `make bench` installs it; or pip install"
            " setuptools wheel, then DS_BUILD_OPS=0 pip install --no-build-isolation"
            " deepspeed==0.19.8, into this interpreter or into one with torch that DEEPSPEED_PYTHON"
            " names"
        )
    names = ["stage-1-fp32-2", "stage-2-fp32-3", "stage-3-fp32-2"]
    done = subprocess.run(
        [python, str(DATA / "make_deepspeed.py"), str(tmp_path), *names],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in names:
        folder = unpack(tmp_path / f"{name}.zip", tmp_path / name)
        assert facts(folder)["deepspeed"] == "0.19.8"
        check_contents(folder, CASES[name])
        assert worst(folder, go_on(folder, CASES[name], 2)) < CLOSE["fp32"]
