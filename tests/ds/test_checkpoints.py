"""What an engine saves and loads, and checkpoints of DeepSpeed 0.19.8 itself (made by
`checkpoints/data/make_deepspeed.py`): read, continued, refused.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import onefold
from ds.engines import adam, made, served, some, train
from on_ranks import on_ranks, slow
from reference import built, differences, weights
from zoo import TinyMLP

DATA = Path(__file__).parents[1] / "checkpoints" / "data"
sys.path.append(str(DATA))
from make_deepspeed import BEFORE, CASES, SAMPLES, TAG, Case, Tiny, digest

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.02}}
FROZEN = {f"blocks.1.{part}" for part in ("up.weight", "up.bias", "down.weight", "down.bias")}


def mixed(width: int = 5, depth: int = 3) -> Any:
    """A tied weight, a frozen block that is the same for every seed, a buffer."""
    model = TinyMLP(width=width, depth=depth)
    model.blocks[-1].up.weight = model.blocks[0].up.weight
    for p in model.blocks[1].requires_grad_(False).parameters():
        nn.init.constant_(p, 0.5)
    model.register_buffer("seen", torch.rand(2))
    return model


def engine_of(stage: int, seed: int = 0, tier: str = "none", make: Any = mixed, **more: Any) -> Any:
    given = {"optimizer": adam(weight_decay=0.0), "scheduler": SCHEDULE, **more}
    return made(stage, built(make, seed), {"offload_optimizer": {"device": tier}}, **given)


def dtype_of(engine: Any) -> torch.dtype:
    return next(engine.module.parameters()).dtype


def moments(engine: Any) -> list[Tensor]:
    params = engine.module.parameters()
    found = [served().utils.safe_get_full_optimizer_state(p, "exp_avg") for p in params]
    return [state for state in found if state is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


# -- save_checkpoint and load_checkpoint -----------------------------------------------------------

#: {what is loaded: (options, steps that it then has, whether states, whether the rate came along)}
PARTS: dict[str, tuple[dict[str, bool], int, bool, bool]] = {
    "all": ({}, 3, True, True),
    "no states": ({"load_optimizer_states": False}, 3, False, True),
    "no schedule": ({"load_lr_scheduler_states": False}, 3, True, False),
    "the module": ({"load_module_only": True}, 0, False, False),
}


#: Stage and tier of the run that saves, and of the one that loads.
PAIRS = [((0, "none"), (2, "none")), ((1, "none"), (3, "cpu")), ((2, "cpu"), (1, "none")), ((3, "none"), (0, "none"))]  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "fp16", pytest.param("bf16", marks=slow)])
def test_parts_of_a_checkpoint_load_at_other_stages_and_tiers(
    precision: str, folder: Path, every: bool
) -> None:
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        more["fp16"]["initial_scale_power"] = 4
    for (stage, tier), (other, there) in some(PAIRS, every, precision == "fp32"):
        place = folder / f"{stage}"
        first = engine_of(stage, 0, tier, **more)
        train(first, range(3), dtype_of(first))
        first.save_checkpoint(place, client_state={"epoch": 7})
        saved, states = weights(first.module), moments(first)
        after = train(first, range(3, 5), dtype_of(first))
        for name, (options, steps, has_states, has_rate) in PARTS.items():
            if name != "all" and precision != "fp32" and not every:
                continue
            again = engine_of(other, 1, there, **more)
            path, client = again.load_checkpoint(place, **options)
            assert Path(path).name == "global_step3" and client == {"epoch": 7}
            assert not differences(saved, weights(again.module)), name
            assert again.global_steps == steps
            assert same(moments(again), states if has_states else [])
            if precision == "fp16":
                assert again.loss_scaler.cur_iter == (3 if has_states else 0)
            losses = train(again, range(3, 5), dtype_of(again))
            assert losses[0] == pytest.approx(after[0], rel=1e-6)
            assert (again.get_lr() == first.get_lr()) == has_rate, name
            if name == "all":
                assert losses == pytest.approx(after, rel=1e-5)
    # The engine that saved it loads it, and what it saves next is the latest
    first.load_checkpoint(place)
    assert not differences(saved, weights(first.module)) and same(moments(first), states)
    first.save_checkpoint(place, tag="again")
    first.save_checkpoint(place, tag="beside", save_latest=False)
    dist.barrier()
    assert (place / "latest").read_text() == "again"
    assert first.load_checkpoint(place / "nowhere") == (None, None)
    with pytest.raises(onefold.CheckpointError, match="no checkpoint 'missing'"):
        first.load_checkpoint(place, "missing")
    counts = {"global_steps": 2, "skipped_steps": 0, "global_samples": 8, "world_size": 99}
    for tag, own in (("more", {"counts": counts, "frozen": True}), ("less", {"frozen": True})):
        extra = {"engine": own, "client_state": {}}
        onefold.save(place / tag, model=first.module, optimizer=first.optimizer, extra=extra)
    first.load_checkpoint(place, "more", load_lr_scheduler_states=False)
    assert (first.global_steps, first.world_size) == (2, 2)
    with pytest.raises(onefold.CheckpointError, match="not saved by an engine"):
        first.load_checkpoint(place, "less")


@on_ranks(2)
def test_frozen_parameters_may_stay_out_and_other_models_are_refused(folder: Path) -> None:
    for stage, other in ((3, 1), (0, 2)):
        place = folder / f"{stage}"
        engine = engine_of(stage)
        train(engine, range(1))
        engine.save_checkpoint(place, exclude_frozen_parameters=True)
        after = train(engine, range(1, 3))
        again = engine_of(other, 1)
        again.load_checkpoint(place, load_module_strict=False)
        assert again.global_steps == 1 and torch.equal(again.module.seen, engine.module.seen)
        assert train(again, range(1, 3)) == pytest.approx(after, rel=1e-6)
        found = served().utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(place))
        assert found.keys() == weights(engine.module).keys() - FROZEN
    for make, words in (
        (partial(mixed, width=7), "shape"),
        (partial(mixed, depth=4), "names are missing in it"),
        (partial(mixed, depth=2), "are unknown to this model"),
    ):
        with pytest.raises(onefold.CheckpointError, match=words):
            engine_of(other, make=make).load_checkpoint(place)


# -- the whole model in fp32 -----------------------------------------------------------------------


def in_fp32(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters."""
    return {name: value.float() for name, value in state.items() if name != "seen"}


@on_ranks(2)
def test_an_engines_module_takes_the_whole_model_of_a_folder(folder: Path) -> None:
    load = served().utils.zero_to_fp32.load_state_dict_from_zero_checkpoint
    for stage, more in ((0, {}), (3, {"bf16": {"enabled": True}})):
        place = folder / f"{stage}"
        engine = engine_of(stage, **more)
        train(engine, range(3), dtype_of(engine))
        engine.save_checkpoint(place)
        dist.barrier()
        saved = weights(engine.module)
        named = in_fp32(saved)
        plain = built(mixed, 2)
        assert load(plain, str(place)) is plain
        assert not differences(named, in_fp32(plain.state_dict()))
        # Into the engine's own module, after more steps, and into another stage's
        train(engine, range(3, 5), dtype_of(engine))
        for target in (engine, engine_of(3 - stage, 2, **more)):
            assert differences(saved, weights(target.module))
            load(target.module, str(place))
            assert not differences(named, in_fp32(weights(target.module)))
            train(target, range(5, 9), dtype_of(target))
            assert differences(saved, weights(target.module)), "it trains on"
        with pytest.raises(onefold.CheckpointError):
            load(engine.module, f"{place}/none")


def saved_twice(folder: Path) -> dict[str, Tensor]:
    """Two tags, of which "latest" names the first. Returns the model of the second in fp32."""
    engine = engine_of(3, bf16={"enabled": True})
    for tag in (None, "other"):
        train(engine, range(3), torch.bfloat16)
        engine.save_checkpoint(folder / "whole", tag, {"epoch": 3}, save_latest=tag is None)
    onefold.save(folder / "plain/step-2", model=engine.module, optimizer=engine.optimizer, step=2)
    dist.barrier()
    return {name: value.float() for name, value in weights(engine.module).items()}


@on_ranks(2)
def test_zero_to_fp32_reads_tags_leaves_frozen_out_and_writes_files_of_a_size(folder: Path) -> None:
    model = saved_twice(folder)
    read = served().utils.zero_to_fp32
    of = read.get_fp32_state_dict_from_zero_checkpoint
    for name, tag in (("whole", "other"), ("plain", None)):
        assert not differences(model, of(folder / name, tag)), name
        found = of(folder / name, tag, True)
        assert not differences({n: v for n, v in model.items() if n not in FROZEN}, found)
    assert differences(model, of(folder / "whole")), "latest names the first tag"
    for safe, suffix, size in ((True, ".safetensors", 300), (False, ".bin", "5GB")):
        out = folder / f"{dist.get_rank()}-{size}"
        read.convert_zero_checkpoint_to_fp32_state_dict(folder / "whole", out, size, safe, "other")
        files = sorted(out.glob(f"*{suffix}"))
        parts = {f.name: load_file(f) if safe else torch.load(f) for f in files}
        assert not differences(model, {n: v for p in parts.values() for n, v in p.items()})
        if size == "5GB":
            assert [f.name for f in files] == ["pytorch_model.bin"]
            continue
        assert files[0].name == f"model-00001-of-{len(files):05d}{suffix}"
        index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        assert index == {n: name for name, part in parts.items() for n in part}
        assert len(files) > 1 and max(f.stat().st_size for f in files) < 2000


@slow
@on_ranks(2)
def test_the_script_in_the_folder_writes_the_model(folder: Path) -> None:
    model = saved_twice(folder)
    if dist.get_rank():
        return

    def run(*given: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "zero_to_fp32.py", ".", *given]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            command, cwd=folder / "whole", env=env, capture_output=True, text=True, timeout=300
        )

    done = run(str(folder / "out.bin"), "-t", "other")
    assert done.returncode == 0, done.stderr
    assert not differences(model, torch.load(folder / "out.bin"))
    wrong = run(str(folder / "none"), "-t", "missing")
    assert wrong.returncode == 1 and wrong.stderr.startswith("zero_to_fp32.py: ")
    assert "Traceback" not in wrong.stderr and not (folder / "none").exists()


# -- checkpoints that DeepSpeed saved --------------------------------------------------------------

#: How far losses may be from DeepSpeed's: rounding of the dtype computed in, over a few steps.
CLOSE = {"fp32": 2e-6, "bf16": 1e-2, "fp16": 2e-3}


def unpacked(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint that came with the project, one a rank, and what DeepSpeed said of
    it.
    """
    place = folder / f"{name}-{dist.get_rank()}"
    with zipfile.ZipFile(DATA / "saved_by_deepspeed" / f"{name}.zip") as archive:
        archive.extractall(place)
    dist.barrier()
    return folder / f"{name}-0", json.loads((folder / f"{name}-0" / "case.json").read_text())


def check_contents(engine: Any, said: dict[str, Any], path: Path) -> None:
    """Every tensor, group and count is what DeepSpeed said it was."""
    utils, model = served().utils, engine.module
    read = utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(path / "saved"))
    assert {"fixed.weight", "gains"} <= read.keys()
    assert torch.equal(read["head.weight"], read["words.weight"])
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        assert (
            digest(utils.safe_get_full_fp32_param(p))
            == said["parameters"][name]
            == digest(read[name])
        )
        for state in ("exp_avg", "exp_avg_sq"):
            assert digest(utils.safe_get_full_optimizer_state(p, state)) == said[state][name]
    assert digest(model.gains) == said["gains"]
    decayed, plain = engine.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert [decayed["lr"], plain["lr"]] == said["rates"] and tuple(decayed["betas"]) == (0.8, 0.9)
    assert [engine.global_steps, engine.skipped_steps] == said["counts"]
    assert engine.global_samples == BEFORE * SAMPLES


def go_on(name: str, stage: int, folder: Path, path: Path, said: dict[str, Any]) -> list[float]:
    """How far each loss after DeepSpeed's save is from DeepSpeed's; then save anew."""
    case, rank, ranks = CASES[name], dist.get_rank(), dist.get_world_size()
    model, share = Tiny(), SAMPLES // ranks  # nothing of its own initialization may matter
    config = Case(stage, ranks, case.precision, more=case.more).config()
    engine, *_ = served().initialize(model=model, model_parameters=model.groups(), config=config)
    found, client = engine.load_checkpoint(path / "saved")
    assert found == str(path / "saved" / TAG)
    assert client["seen"].tolist() == [0, 1, 2] and client["epoch"] == 2
    check_contents(engine, said, path)
    assert engine.cur_scale == (said["scale"] if case.precision == "fp16" else 1.0)
    far = []
    for tokens, expected in zip(torch.tensor(said["batches"]), said["losses"], strict=True):
        loss = engine(tokens[rank * share : (rank + 1) * share])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        far.append(abs(float(mean) / ranks - expected))
    engine.save_checkpoint(folder / f"{name}-again-{stage}", client_state={"far": far})
    return far


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_a_run_of_deepspeed_goes_on_with_the_losses_it_had(
    name: str, folder: Path, every: bool
) -> None:
    path, said = unpacked(name, folder)
    for stage in (1, 2, 3) if every else (1 + list(CASES).index(name) % 3,):
        far = go_on(name, stage, folder, path, said)
        assert max(far) < CLOSE[CASES[name].precision], (stage, far)
    model = Tiny()
    config = Case(0, 1, CASES[name].precision, more=CASES[name].more).config()
    engine = served().initialize(model=model, model_parameters=model.groups(), config=config)[0]
    _, client = engine.load_checkpoint(folder / f"{name}-again-{stage}")
    assert client == {"far": far} and engine.global_steps == BEFORE + len(far)


@on_ranks(1)
def test_a_plain_loop_goes_on_from_deepspeeds_folder(folder: Path) -> None:
    path, said = unpacked("stage-3-fp32-2", folder)
    model = onefold.shard(Tiny(), onefold.Recipe.zero(2))
    optimizer = torch.optim.AdamW(model.groups(), lr=9.0)
    onefold.load(path / "saved", model=model, optimizer=optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == said["rates"], "with DeepSpeed's options"
    for tokens, expected in zip(said["batches"][:2], said["losses"], strict=False):
        loss = model(torch.tensor(tokens))
        assert abs(loss.item() - expected) < 2e-6
        loss.backward()
        onefold.clip_grad_norm_(model, 0.5)
        optimizer.step()


# -- refused ---------------------------------------------------------------------------------------


def shard(folder: Path, rank: int, prefix: str = "zero_pp") -> Path:
    return folder / TAG / f"{prefix}_rank_{rank}_mp_rank_00_optim_states.pt"


def from_other(name: str, rank: int) -> Callable[[Path], Any]:
    """Replace a rank's file with that of another checkpoint."""

    def change(folder: Path) -> None:
        with zipfile.ZipFile(DATA / "saved_by_deepspeed" / f"{name}.zip") as archive:
            inside = shard(Path("saved"), rank).as_posix()
            shard(folder, rank).write_bytes(archive.read(inside))

    return change


def with_model_states(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def changed(folder: Path) -> None:
        file = next((folder / TAG).glob("*model_states.pt"))
        contents = torch.load(file, weights_only=False)
        torch.save(change(contents), file)

    return changed


class Trap:
    """Would make a folder where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


#: (words of the error, what is done to the folder, the checkpoint).
REFUSED: list[tuple[str, Any, str]] = [
    ("names '../elsewhere'", lambda f: (f / "latest").write_text("../elsewhere"), "stage-3-fp32-3"),
    ("latest cannot be read .it has 97.7 KiB", lambda f: (f / "latest").write_text("x" * 100_000), "stage-3-fp32-3"),
    (r"no \*_optim_states.pt of rank 1", lambda f: shard(f, 1).unlink(), "stage-3-fp32-3"),
    ("saved on 3 ranks, but has 2 files", lambda f: shard(f, 2).unlink(), "stage-3-fp32-3"),
    ("saved on 3 ranks, but has 4 files", lambda f: shutil.copy(shard(f, 2), shard(f, 3)), "stage-3-fp32-3"),
    ("holds two checkpoints in one", lambda f: shutil.copy(shard(f, 2), shard(f, 2, "bf16_zero_pp")), "stage-3-fp32-3"),
    ("tensor- or pipeline-parallel",
     lambda f: shutil.copy(shard(f, 2), f / TAG / "zero_pp_rank_0_mp_rank_01_optim_states.pt"), "stage-3-fp32-3"),
    ("saved at stage 0", lambda f: [shard(f, rank).unlink() for rank in range(3)], "stage-3-fp32-3"),
    ("is damaged, or no file of torch.save",
     lambda f: shard(f, 1).write_bytes(shard(f, 1).read_bytes()[:1000]), "stage-3-fp32-3"),
    ("rank_1_.* belongs to another checkpoint", from_other("stage-3-fp32-2", 1), "stage-3-fp32-3"),
    (r"model_states\.pt.*mkdir", with_model_states(lambda c: {**c, "mine": Trap()}), "stage-1-fp32-2"),
    (r"as of version 0.19, .*: TypeError", with_model_states(lambda c: {**c, "param_shapes": [None]}), "stage-1-fp32-2"),
]  # fmt: skip


class Lenient(pickle.Unpickler):
    """Reads objects of DeepSpeed's classes without them."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("deepspeed"):
            return type(name, (SimpleNamespace,), {"__init__": lambda self, *given: None})
        return super().find_class(module, name)


def set_back(folder: Path) -> None:
    """Rank 2's file is of an earlier step."""
    lenient: Any = SimpleNamespace(Unpickler=Lenient, load=pickle.load, __name__="lenient")
    contents = torch.load(shard(folder, 2), weights_only=False, pickle_module=lenient)
    inner = contents["optimizer_state_dict"]
    for state in inner["optimizer_state_dict"]["state"].values():
        state["step"] -= 1
    inner.update(zero_stage=3, loss_scaler=None)
    torch.save(contents, shard(folder, 2))


@on_ranks(1)
def test_what_cannot_be_read_says_why(folder: Path) -> None:
    os.chdir(folder)
    mixed_up = r"steps .*2\.0.*rank 0's file .*3\.0.* belongs to another checkpoint"
    for at, (words, change, name) in enumerate([*REFUSED, (mixed_up, set_back, "stage-3-fp32-3")]):
        path, _ = unpacked(name, folder / f"{at}")
        change(path / "saved")
        model = onefold.shard(built(Tiny), onefold.Recipe.zero(1))
        with pytest.raises(onefold.CheckpointError, match=words):
            onefold.load(path / "saved", model=model)
        assert not Path("sprung").exists()
