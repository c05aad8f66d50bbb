"""The checks that train a small model: stages against each other and against DDP, groups, offloaded
state, checkpoints, bytes at rest, no waiting, overlap, a rank that is killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onefold
from onefold.device import has_streams, memory_figures, synchronize
from onefold.doctor.model import (
    BLOCKS,
    ROUNDING,
    WIDTH,
    Here,
    LeftOut,
    adamw,
    assert_close,
    assert_near,
    one_step,
    same_bits,
    small,
    train,
)
from onefold.memory import GATHERED
from onefold.observe.trace import record
from onefold.processes.signals import end_with_parent
from onefold.recipe import Recipe
from onefold.runtime.parameters.interval import disable_torch_function
from onefold.sharding import engine_of

MIB = 1 << 20
#: The least share of communication on an accelerator that must be hidden.
LEAST = 0.1


def _made(
    here: Here,
    stage: int,
    precision: Any = "fp32",
    width: int = WIDTH,
    blocks: int = BLOCKS,
    **recipe: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """Return the small model, sharded, and its optimizer."""
    asked = Recipe.zero(stage, precision=precision, **recipe)
    model = onefold.shard(small(here, width, blocks), asked)
    return model, adamw(model)


def stages(here: Here) -> str:
    """Compare stages 0 to 3 to the bit, and with DDP within rounding, in fp32 and bf16.

    Gradients of several micro-batches are added up either before they are reduced (at the boundary)
    or after (reduced every micro-batch). The two orders give different bits, so each is compared by
    itself. With NCCL, native sums are compared within rounding.
    """
    for precision in ROUNDING:
        # Flat over hosts the default would be native sums
        asked: dict[str, Any] = {"precision": precision, "reduce": "ordered"}
        whole, *others = (Recipe.zero(s, reduce_at="boundary", **asked) for s in range(4))
        at_boundary = {"stage 0": whole, "stage 0 again (this device's own kernels)": whole}
        at_boundary |= {f"stage {recipe.stage}": recipe for recipe in others}
        often = {f"stage {s}": Recipe.zero(s, **asked) for s in (2, 3)}
        found = {
            "stage 0": same_bits(here, precision, at_boundary),
            "stage 2": same_bits(here, f"{precision}, reduced every micro-batch", often),
        }
        if here.backend == "nccl":
            found["native sums"] = train(here, Recipe.zero(3, **{**asked, "reduce": "native"}))
        ddp = train(here, precision)
        for name, trained in found.items():
            assert_near(here, f"{precision}: {name} and DDP", trained, ddp, precision)
    return "stages 0 to 3 agree to the bit in fp32 and bf16, and with DDP within rounding"


def two_levels(here: Here) -> str:
    """Compare recipes over groups with each other and with DDP, and count bytes between groups."""
    inner = (
        here.local_world_size if here.local_world_size < here.world_size else here.world_size // 2
    )
    if here.world_size < 4 or here.world_size % inner or inner < 2:
        raise LeftOut(
            f"the launcher says of one node, and {here.world_size} ranks make no two groups of two: use"
            " 4 ranks, or two nodes"
        )
    recipes = {
        "stage 3": Recipe.zero(3, group=inner),
        "stage 2": Recipe.zero(2, group=inner),
        "stage 1": Recipe.zero(1, group=inner),
        "a second copy (hpZ)": Recipe.zero(3, group=inner, second_copy=True),
        "HSDP": Recipe.zero(3, shard_group=inner),
    }
    first = same_bits(here, f"in groups of {inner}", recipes, micro_batches=1)
    assert_near(here, f"groups of {inner} and DDP", first, train(here, "fp32", 1), "fp32")
    sent = {}
    for size in (inner, here.world_size):
        model, optimizer = _made(here, 3, group=size)
        one_step(here, model, optimizer, 0)
        sent[size] = engine_of(model).traffic.sent()
    # A flat move sends a part to each of N − 1 ranks; groups send it to one rank per other group.
    due = sent[here.world_size].nbytes * (here.world_size // inner - 1) // (here.world_size - 1)
    between = sent[inner].between
    assert between == due, f"{between:,} bytes went between groups, the formula says {due:,}"
    return f"recipes over groups of {inner} agree to the bit, with {between:,} bytes between them"


#: Samples and tokens whose activations are large enough to be moved to the host, 1 MiB each.
MOVED = 8, 1024


def offload(here: Here) -> str:
    """Compare recipes with state on the host, with each other to the bit and with the device."""
    for precision in ROUNDING:
        asked: dict[str, Any] = {"precision": precision}
        kept = Recipe.zero(3, offload_activations="cpu", **asked)
        recipes = {"on the device": Recipe.zero(3, **asked), "activations on the host": kept}
        same_bits(here, precision, recipes, shape=MOVED)
        plain = train(here, recipes["on the device"])
        asked["offload_optimizer"] = "cpu"
        hosted = {
            "stage 2": Recipe.zero(2, **asked),
            "stage 3": Recipe.zero(3, **asked),
            "stage 3 with parameters there": Recipe.zero(3, offload_param="cpu", **asked),
        }
        first = same_bits(here, f"{precision}: optimizer on the host", hosted)
        what = f"{precision}: optimizer on the host and on the device"
        if here.device.type == "cpu":
            assert_close(here, what, first, plain)
        else:
            assert_near(here, what, first, plain, precision)
    return "optimizer, parameters and activations on the host train as on the device"


def compiled_blocks(here: Here) -> str:
    """Compare blocks that inductor compiles with eager ones, within rounding."""
    if here.device.type == "cpu":
        raise LeftOut("this needs a GPU: compiling for a CPU asks for a C++ compiler")
    recipe = Recipe.zero(3, precision="bf16")
    compiled = train(here, recipe, compiled=True)
    assert_near(here, "compiled and eager blocks", compiled, train(here, recipe), "bf16")
    return "compiled blocks train as eager ones, within rounding"


def save_and_reload(here: Here) -> str:
    """Save with `save_async`, go on training, and load at another stage. The loaded state must be
    that of the moment of the call.
    """
    path, seen = Path(here.folder) / "checkpoint", Path(here.folder) / "seen"
    if here.rank == 0:
        seen.touch()
    here.gather(None)
    if not all(here.gather(seen.exists())):
        raise LeftOut(
            f"not every node sees {here.folder}: start it in a folder that all of them share"
        )
    model, optimizer = _made(here, 2)
    for step in range(2):
        one_step(here, model, optimizer, step)
    at_the_call = onefold.full_state_dict(model)
    saving = onefold.save_async(path, model=model, optimizer=optimizer)
    went_on = [one_step(here, model, optimizer, step) for step in (2, 3)]
    saving.wait()

    loaded, again = _made(here, 3)
    onefold.load(path, model=loaded, optimizer=again)
    assert_close(here, "what was loaded", onefold.full_state_dict(loaded), at_the_call)
    resumed = [one_step(here, loaded, again, step) for step in (2, 3)]
    assert_close(here, "two steps after the load, losses and norms", resumed, went_on)
    states = onefold.full_state_dict(loaded), onefold.full_state_dict(model)
    assert_close(here, "two steps after the load, weights", *states)
    here.gather(None)
    if here.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    return "saved behind two steps, loaded at another stage: the same bits"


def memory_at_rest(here: Here) -> str:
    """Compare the bytes of tensors between steps with the formula, within 1 MiB.

        fp32    stage 0: P + 2P    stages 1, 2: P + 2P/N          stage 3: P/N + 2P/N
        bf16    stage 0: P/2 + 3P  stages 1, 2: P/2 + (P + 2P)/N  stage 3: (P + 2P)/N

    with P bytes of parameters in fp32, padding included, and two moments.
    """
    before: int | None = None
    # The first round is not compared: libraries make workspaces for a process's first products
    for stage, precision in [(0, "bf16"), *((s, p) for s in range(4) for p in ROUNDING)]:
        model, optimizer = _made(here, stage, precision, 256, 6)
        for step in range(2):
            one_step(here, model, optimizer, step)
        p = 4 * sum(unit.numel for unit in engine_of(model).units)
        share = 1 if stage == 0 else 1 / here.world_size
        due = 2 * p * share + (p if precision == "fp32" and stage < 3 else p * share)
        due += p / 2 if precision == "bf16" and stage < 3 else 0
        if before is not None:
            held = _held(here) - before
            said = (
                f"{precision}, stage {stage}: {held:,} bytes are held, the formula says {due:,.0f}"
            )
            assert abs(held - due) < MIB, said
        del model, optimizer
        before = _held(here) if before is None else before
    return "stages 0 to 3 in fp32 and bf16 hold what the formula says, within 1 MiB"


def _held(here: Here) -> int:
    """Return the allocator's bytes; on a CPU, the bytes of every tensor that Python can reach."""
    gc.collect()
    figures = memory_figures(here.device)
    if figures is not None:
        synchronize(here.device)
        return figures.allocated
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass(), disable_torch_function():
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
                with contextlib.suppress(Exception):  # a tensor without storage
                    storage = thing.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def no_synchronization(here: Here) -> str:
    """Run steps in a mode in which CUDA raises if the host would wait for the device."""
    if here.device.type != "cuda":
        raise LeftOut("torch tells of waits of the host on CUDA and ROCm only")
    if here.backend == "gloo" and here.world_size > 1:
        raise LeftOut("ranks that share a GPU move through gloo, and the host's memory")
    for stage in range(4):
        for precision in ROUNDING:
            model, optimizer = _made(here, stage, precision)
            for step in range(3):
                one_step(here, model, optimizer, step)
            torch.cuda.set_sync_debug_mode("error")
            try:
                one_step(here, model, optimizer, 3)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return "steps at stages 0 to 3, clipping included, make the host wait for nothing"


def overlap(here: Here) -> str:
    """See that more is gathered at a time than without overlap. On an accelerator, compare the waits
    too; on a CPU seconds depend on the load of the machine, and decide nothing.
    """
    large = has_streams(here.device)
    width, blocks, shape = (2048, 8, (8, 512)) if large else (128, 6, (2, 16))
    exposed, held = [], []
    for options in dict[str, Any](), {"prefetch": 0, "in_flight": 0}:
        model, optimizer = _made(here, 3, "bf16", width, blocks, **options)
        for step in range(2):
            one_step(here, model, optimizer, step, 1, shape)
        synchronize(here.device)
        with record(model, optimizer) as seen:
            for step in range(3):
                one_step(here, model, optimizer, step, 1, shape)
            synchronize(here.device)
        exposed.append(seen.exposed)
        held.append(sum(seen.peak([GATHERED]).values()))
    ahead = f"{held[0]:,} bytes were gathered at a time, {held[1]:,} without overlap"
    assert held[0] > held[1], f"{ahead}: nothing is prefetched"
    hidden = 1 - exposed[0] / exposed[1] if exposed[1] else 0.0
    if not large:
        return f"{ahead}; a CPU has no streams, so seconds decide nothing here"
    assert hidden >= LEAST, (
        f"{hidden:.0%} of the waits are hidden behind computing: under {LEAST:.0%}"
    )
    return f"{ahead}; {hidden:.0%} of the waits for other ranks are hidden behind computing"


#: The recipe's `stall_timeout` in `lost_peer`, and the step before which the last rank is killed.
PATIENCE, AT = 5.0, 3


def lost_peer(here: Here) -> str:
    """Kill the last of as many ranks in a training, and see that every other one ends in a StallError.
    Ranks that lose one of them are of no further use, so each rank of the check starts a process for it.
    """
    if here.local_world_size < here.world_size:
        raise LeftOut("this needs all ranks on one node")
    there = replace(here, control=None)
    child = get_context("spawn").Process(target=_train_until_lost, args=(there,), daemon=True)
    child.start()
    child.join(60.0)
    expected = -signal.SIGKILL if here.rank == here.world_size - 1 else 0
    said = f"it should have ended with status {expected}, not {child.exitcode}"
    assert child.exitcode == expected, said
    return "the last rank was killed, and the others ended in a StallError"


def _train_until_lost(here: Here) -> None:
    """Train until this rank is told, or is the one that is killed."""
    end_with_parent()
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    store = dist.FileStore(str(Path(here.folder, "lost peer")), here.world_size)
    dist.init_process_group(here.backend, store=store, rank=here.rank, world_size=here.world_size)
    model, optimizer = _made(here, 3, stall_timeout=PATIENCE)
    with contextlib.suppress(onefold.StallError):
        for step in range(1000):
            if step == AT and here.rank == here.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            one_step(here, model, optimizer, step)
        os._exit(1)  # a thousand steps went on without the rank that was killed
    os._exit(0)  # without waiting for the one that is gone
