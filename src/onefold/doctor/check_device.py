"""Checks of how steps use the device: bytes at rest, no waiting, overlap.

Whether communication is hidden behind compute is measured as far as the device allows:

| where                   | what is measured                                                   | wrong if           |
|-------------------------|--------------------------------------------------------------------|--------------------|
| everywhere              | gathers that were launched while an earlier unit was computing     | none               |
| an accelerator, N ranks | waits of the compute stream for moves, by timing events around     | under LEAST hidden |
|                         | them, with overlap and with overlap=False                          |                    |
| an accelerator, 1 rank  | copies of parameters from the host that ran beside a kernel,       | under LEAST hidden |
|                         | in a trace of torch's profiler                                     |                    |

On a CPU the ranks' own threads move the bytes. Seconds there depend on the load of the machine, so
they decide nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import onefold
from onefold.device import has_streams, memory_figures, synchronize
from onefold.doctor.check_steps import (
    CLIP,
    PRECISIONS,
    VOCABULARY,
    Small,
    accumulated,
    adamw,
    batches,
    one_step,
    small,
)
from onefold.doctor.checks import Findings, Here, LeftOut
from onefold.observe.trace import Recording, covered, record
from onefold.recipe import Recipe
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.interval import disable_torch_function


def memory_at_rest(here: Here, findings: Findings) -> str:
    """Compare the bytes of tensors and of the ledger between steps with the formula, within 1 MiB.

        fp32    stage 0: P + 2P    stages 1, 2: P + 2P/N          stage 3: P/N + 2P/N
        bf16    stage 0: P/2 + 3P  stages 1, 2: P/2 + (P + 2P)/N  stage 3: (P + 2P)/N

    with P bytes of parameters in fp32, padding included, and two moments.
    """
    # The device's libraries make workspaces for the first products of a process, and keep them
    for precision in PRECISIONS:
        model = onefold.shard(small(here), Recipe.zero(0, precision=precision))
        one_step(here, model, adamw(model), 0)
        del model
    gc.collect()
    # Leave existing objects out of later collections, which would take longer than the steps
    gc.freeze()
    before = _held(here)
    for precision in PRECISIONS:
        for stage in range(4):
            model = onefold.shard(
                small(here, width=WIDE, hidden=2 * WIDE, blocks=DEEP),
                Recipe.zero(stage, precision=precision),
            )
            optimizer = adamw(model)
            for step in range(2):
                one_step(here, model, optimizer, step)
            engine = engine_of(model)
            p = 4 * sum(unit.numel for unit in engine.units)
            share = 1 if stage == 0 else 1 / here.world
            parameters = (
                (p * share if stage == 3 else p)
                if precision == "fp32"
                else (0 if stage == 3 else p / 2) + p * share
            )
            due = parameters + 2 * p * share
            ledger = sum(engine.memory.now().values())
            held = _held(here) - before
            name = f"{precision}, stage {stage}"
            findings.figures[name] = {"held": held, "ledger": ledger, "formula": round(due)}
            findings.expect(
                abs(held - due) < MIB,
                f"{name}: {held:,} bytes are held, the formula says {due:,.0f}",
            )
            findings.expect(
                abs(ledger - parameters) < MIB,
                f"{name}: the ledger says {ledger:,} bytes without moments, the formula"
                f" {parameters:,.0f}",
            )
            del model, optimizer, engine
    gc.unfreeze()
    off = max(abs(f["held"] - f["formula"]) for f in findings.figures.values())
    return f"stages 0 to 3 in fp32 and bf16 hold what the formula says, within {off / MIB:.2f} MiB"


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


def no_synchronization(here: Here, findings: Findings) -> str:
    """Run steps in a mode in which CUDA raises if the host would wait for the device."""
    if not has_streams(here.device):
        raise LeftOut(
            "a CPU has no streams: nothing runs behind the host, and it has nothing to wait for"
        )
    if here.device.type != "cuda":
        raise LeftOut(
            f"torch tells of waits of the host on CUDA and ROCm only, not on {here.device.type}"
        )
    if here.backend == "gloo" and here.world > 1:
        raise LeftOut(
            "ranks that share a GPU move through gloo, which goes through the host's memory"
        )
    for stage in range(4):
        for precision in PRECISIONS:
            recipe = Recipe.zero(stage, precision=precision)
            _step_without_waiting(here, findings, f"stage {stage}, {precision}", recipe)
    return "steps at stages 0 to 3, clipping included, make the host wait for nothing"


def _step_without_waiting(here: Here, findings: Findings, name: str, recipe: Recipe) -> None:
    model = onefold.shard(small(here), recipe)
    optimizer = adamw(model)
    steps = [batches(here, step) for step in range(4)]
    synchronize(here.device)
    for number, taken in enumerate(steps):
        with _refusing() if number == 3 else contextlib.nullcontext():
            try:
                accumulated(model, taken)
                onefold.clip_grad_norm_(model, CLIP)
                optimizer.step()
                optimizer.zero_grad()
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                # The step is half done, so these ranks cannot run further checks
                raise RuntimeError(f"{name}: {error}") from error
    findings.figures[name] = "no wait"


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Make CUDA raise where it would make the host wait, inside the context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


#: Width, blocks, and shape of a step's token ids. On an accelerator the model is so large that
#: compute takes as long as the moves.
SIZES = {"cpu": (128, 6, (2, 16)), "cuda": (2048, 8, (8, 512))}
STEPS = 3
#: Width and blocks of the model whose memory is checked. Its weights take 6 MB; 1 MiB may differ.
WIDE, DEEP = 256, 6
MIB = 1 << 20
#: The least share of communication on an accelerator that must be hidden.
LEAST = 0.1
#: Spans of time: (start, end).
Spans = list[tuple[float, float]]


def overlap(here: Here, findings: Findings) -> str:
    """Compare stage 3 with and without overlap; on a single accelerator, check its copies."""
    if here.world > 1:
        return _between_ranks(here, findings)
    if not has_streams(here.device):
        raise LeftOut("one rank on a CPU neither sends nor copies")
    return _between_tiers(here, findings)


def _model(here: Here, recipe: Recipe) -> Any:
    width, blocks, _ = SIZES["cuda" if has_streams(here.device) else "cpu"]
    torch.manual_seed(0)
    return onefold.shard(Small(width, 4 * width, blocks).to(here.device), recipe)


def _step(here: Here, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Run a step without reading its loss."""
    *_, ids = SIZES["cuda" if has_streams(here.device) else "cpu"]
    model(torch.full(ids, number % VOCABULARY, device=here.device)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _between_ranks(here: Here, findings: Findings) -> str:
    exposed, seen = {}, None
    for name, overlapping in (("with", True), ("without", False)):
        model = _model(here, Recipe.zero(3, precision="bf16", overlap=overlapping))
        optimizer, engine = adamw(model), engine_of(model)
        for step in range(2):
            _step(here, model, optimizer, step)
        synchronize(here.device)
        engine.traffic.reset()
        if overlapping:
            with record(model, optimizer) as seen:
                _step(here, model, optimizer, 2)
        for step in range(STEPS - overlapping):
            _step(here, model, optimizer, 3 + step)
        synchronize(here.device)
        exposed[name] = engine.traffic.exposed / STEPS
    assert seen is not None
    early, gathers = launched_early(seen)
    hidden = 1 - exposed["with"] / exposed["without"] if exposed["without"] > 0 else 0.0
    findings.figures |= {
        "gathers": gathers, "launched ahead": early,
        "exposed_ms": 1000 * exposed["with"], "exposed_without_overlap_ms": 1000 * exposed["without"], "hidden": round(hidden, 3),
    }  # fmt: skip
    findings.expect(
        early > 0,
        f"none of {gathers} gathers was launched before the unit before it had been computed:"
        " nothing is prefetched",
    )
    if not has_streams(here.device):
        return (
            f"{early} of {gathers} gathers were launched ahead, by the recording. A CPU has no"
            f" streams: seconds decide nothing here (waits of a step {1000 * exposed['with']:.0f}"
            f" ms, {1000 * exposed['without']:.0f} ms without overlap)"
        )
    judge(findings, hidden, "of the waits for other ranks")
    return (
        f"{hidden:.0%} of the waits for other ranks are hidden behind computing; {early} of"
        f" {gathers} gathers were launched ahead"
    )


def launched_early(seen: Recording) -> tuple[int, int]:
    """Return (number of gathers launched early, number of all gathers).

    A gather is early if another unit was still computing when it was launched, and finished before
    the gather was waited for. The outermost unit never counts as that other unit: it computes until
    the last block ends, which is after every wait.
    """
    spans = [(w.unit, w.end) for w in seen.work if w.kind == "compute"]
    gathers = [
        m for m in seen.moves if m.move == "all-gather" and m.phase in ("forward", "backward")
    ]
    early = [
        m
        for m in gathers
        if any(unit != m.unit and m.launched < end <= m.landed - m.exposed for unit, end in spans)
    ]
    return len(early), len(gathers)


def _between_tiers(here: Here, findings: Findings) -> str:
    model = _model(
        here, Recipe.zero(3, precision="bf16", offload_optimizer="cpu", offload_param="cpu")
    )
    optimizer = adamw(model)
    for step in range(2):
        _step(here, model, optimizer, step)
    synchronize(here.device)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        _step(here, model, optimizer, 2)
        synchronize(here.device)
    copies, kernels = split(profiler.events() or ())
    if not copies or not kernels:
        raise LeftOut(
            "torch's profiler sees nothing of this device (is CUPTI there, and may it be used?)"
        )
    both, alone = shared(copies, kernels), covered(copies)
    findings.figures |= {
        "copies_ms": alone / 1000,
        "beside_kernels_ms": both / 1000,
        "kernels_ms": covered(kernels) / 1000,
    }
    hidden = both / alone
    judge(findings, hidden, "of the copies between host and device")
    return (
        f"{hidden:.0%} of the copies between host and device had a kernel beside them, by torch's"
        " profiler"
    )


def judge(findings: Findings, hidden: float, what: str) -> None:
    """Note an error if too little is hidden."""
    findings.expect(
        hidden >= LEAST,
        f"{hidden:.0%} {what} are hidden behind computing, expected {LEAST:.0%} or more",
    )


def split(events: Sequence[Any]) -> tuple[Spans, Spans]:
    """Split a profiler's events into (copies and messages, other kernels), in microseconds."""
    moving: Spans = []
    computing: Spans = []
    for event in events:
        if event.device_type.name == "CPU" or event.is_user_annotation:
            continue
        name = event.name.lower()
        moves = "nccl" in name or name.startswith(("memcpy dtoh", "memcpy htod", "memcpy ptop"))
        (moving if moves else computing).append((event.time_range.start, event.time_range.end))
    return moving, computing


def shared(a: Spans, b: Spans) -> float:
    """Return for how long both `a` and `b` were running."""
    return covered(a) + covered(b) - covered([*a, *b])
