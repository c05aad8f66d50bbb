"""What a run is seen to hold, send and leave: the one file of the recording that knows names that
are no public ones.

A change that renames what is inside Onefold edits this file, and neither the table nor what is
recorded. Options whose spelling changes are translated here too (`recipe_of`, `command`), so that
the table keeps the spelling it was recorded with.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold

#: Imported once for all processes, as tests/ranks.py says.
PRELOADED = (
    "onefold.checkpoint",
    "onefold.checkpoint.saving",
    "onefold.checkpoint.loading",
    "onefold.ema",
    "onefold.observe",
    "onefold.plan.api",
    "onefold.cli.app",
    "onefold.offload.nvme",
    "onefold.integrations.deepspeed.config",
    "onefold.unsharded",
    "recording.runs",
    "recording.plans",
)


def quiet() -> None:
    """Nothing is logged, and the disk's speed is not measured: it is of no interest here."""
    from onefold.offload import preflight

    preflight.measure = lambda *_, **__: []  # type: ignore[assignment]
    logging.getLogger("onefold").setLevel(logging.ERROR)


def recipe_of(stage: int, options: dict[str, Any]) -> onefold.Recipe:
    """A recipe from the table's options; `deepspeed` among them is DeepSpeed's JSON instead."""
    if "deepspeed" in options:
        from onefold.integrations.deepspeed import recipe_from

        return recipe_from(options["deepspeed"])
    return onefold.Recipe.zero(stage, **options)


def command(arguments: list[str]) -> str:
    """What `onefold` with these arguments prints."""
    before, sys.argv = sys.argv, ["onefold", *arguments]
    printed = io.StringIO()
    try:
        from onefold.cli import main

        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = before
    return printed.getvalue()


def answer(printed: str) -> Any:
    """A plan as the command prints it, without how long it took to make."""
    found = json.loads(printed)
    if "simulation" in found:
        del found["simulation"]["seconds"]
    return found


# -- ledgers ---------------------------------------------------------------------------------------


def watch(model: nn.Module) -> None:
    """Count from here on: the wire, the tiers and the peak of a step. Single moves are kept."""
    engine = onefold.engine_of(model)
    engine.memory.record = True
    engine.traffic.reset()
    engine.transfers.moved.reset()
    engine.memory.reset_peak()
    engine.transfers.host.reset_peak()


def layout(model: nn.Module) -> list[list[Any]]:
    """[unit, elements with padding] of each unit, the root first."""
    return [[unit.name, unit.numel] for unit in onefold.engine_of(model).units]


def at_rest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int]]:
    """{tier: {category: bytes}} that are held between steps, the optimizer's states among them."""
    from onefold.observe.memory import moments_by_tier

    engine = onefold.engine_of(model)
    moments = moments_by_tier(optimizer, engine)
    held = {
        "device": engine.memory.now(),
        "host": engine.transfers.host.now(),
        "nvme": engine.transfers.disk.now(),
    }
    for tier, nbytes in moments.items():
        held[tier] = held[tier] | {"moments": held[tier].get("moments", 0) + nbytes}
    held["host"].pop("staging buffers", None)  # how many are in use depends on how far the disk is
    held["host"].pop("idle buffers", None)
    return {
        tier: {category: n for category, n in what.items() if n}
        for tier, what in held.items()
        if any(what.values())
    }


def peak(model: nn.Module) -> dict[str, dict[str, int]]:
    """{tier: {category: bytes}} of the engine, when they were most since `watch`. On the host only
    where neither a disk nor another thread decides when a buffer is free.
    """
    engine = onefold.engine_of(model)
    timed = engine.recipe.nvme or engine.recipe.step_in_backward
    held = {"device": engine.memory.peak(), "host": {} if timed else engine.transfers.host.peak()}
    return {tier: what for tier, what in held.items() if what}


def wire(model: nn.Module) -> dict[str, list[int]]:
    """{move: [bytes sent, those of them between nodes, both as they would be without codecs]} since
    `watch`, and control messages.
    """
    ledger = onefold.engine_of(model).traffic
    moved = {
        move: [s.nbytes, s.between, s.plain, s.plain_between]
        for move, s in ledger.by_move_in_full().items()
        if s.nbytes or s.plain
    }
    return moved | ({"control": [ledger.control_bytes]} if ledger.control_bytes else {})


def moves(model: nn.Module) -> list[str]:
    """Each move since `watch`, in order: phase, move, unit, bytes, [those between nodes], [bytes
    before encoding], dtype, ranks.
    """
    found = []
    for e in onefold.engine_of(model).traffic.events:
        between = f" between {e.between}" if e.between else ""
        plain = f" encoded from {e.plain} between {e.plain_between}" if e.plain else ""
        found.append(f"{e.phase} {e.move} {e.unit} {e.nbytes}{between}{plain} {e.dtype} {e.group}")
    return found


def carried(model: nn.Module) -> dict[str, dict[str, int]]:
    """{"up", "down", "read", "written": {unit: bytes}} between tiers since `watch`."""
    found: dict[str, Counter[str]] = {}
    for unit, by_move in onefold.engine_of(model).transfers.moved.by_unit().items():
        for move, nbytes in by_move.items():
            found.setdefault(move, Counter())[unit] += nbytes
    return {move: dict(units) for move, units in found.items()}


# -- checkpoints -----------------------------------------------------------------------------------


def saved_files(folder: Path) -> dict[str, Any]:
    """What a checkpoint consists of but for its numbers: how many elements of which dtype each file
    has, and which of them lie where.
    """
    files = json.loads((folder / "manifest.json").read_text())["tensor_files"]
    elements: Counter[str] = Counter()
    places = []
    for tensor in _tensors(folder):
        for file, start, stop, _ in tensor["pieces"]:
            elements[f"{files[file]} {tensor['dtype']}"] += stop - start
        # The fourth is a checksum
        places.append({**tensor, "pieces": [piece[:3] for piece in tensor["pieces"]]})
    return {"elements": dict(elements), "places": digest(places)}


def saved_bits(folder: Path) -> dict[str, str]:
    """The same with its numbers: a hash of each tensor's checksums."""
    return {
        " ".join(filter(None, (t["kind"], t["name"], t.get("state")))): digest(t["pieces"])
        for t in _tensors(folder)
    }


def _tensors(folder: Path) -> list[dict[str, Any]]:
    """What the manifest says of each but the random generators, whose states are not the
    recording's.
    """
    return [
        tensor
        for tensor in json.loads((folder / "manifest.json").read_text())["tensors"]
        if tensor["kind"] != "rng"
    ]


# -- hashes ----------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Sixteen digits that stand for a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(tensor: torch.Tensor) -> str:
    """The same of a tensor: its dtype, its shape and every bit."""
    whole = tensor.detach().cpu().contiguous()
    head = f"{whole.dtype} {tuple(whole.shape)}".encode()
    return hashlib.sha256(head + whole.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]


def bits_of(value: Any, name: str = "") -> dict[str, str]:
    """{path: bits} of each tensor and number in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        return {name: digest_of(value)}
    if isinstance(value, dict):
        return {
            path: bits
            for k, v in value.items()
            for path, bits in bits_of(v, f"{name}.{k}" if name else str(k)).items()
        }
    if isinstance(value, (list, tuple)):
        return {
            path: bits
            for k, v in enumerate(value)
            for path, bits in bits_of(v, f"{name}.{k}").items()
        }
    return {name: value.hex() if isinstance(value, float) else repr(value)}
