"""Two ranks run a habit by its reference and in each column, and say how they compare.

| verdict | what was seen |
|---|---|
| same bits, rounding | every rank has the reference's losses, notes, buffers and whole weights |
| refused | every rank was told the same sentence by Onefold |
| DIFFERENT | a number differs, and nobody said so |
| CRASH | something else was raised; or ranks were told different things (uneven) |
| StallError | ranks did not do the same, and were told which of them stood where |
| HANG | a rank waited for others until its time was up, or died |

Ranks write each verdict into a folder as they find it. What leaves ranks out of step ends their
start: the rest is run in a new one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onefold
from looks import gathered
from ranks import outcomes_of
from scripts.loop import Result, World, differences, run
from scripts.registry import (
    BITS,
    COLUMNS,
    EITHER,
    HABITS,
    REFUSED,
    ROUNDING,
    STALLED,
    Habit,
    everything,
)

#: Titles of habits that are run together, and the column.
Task = tuple[tuple[str, ...], str]
DIFFERENT, CRASH, HANG = "DIFFERENT", "CRASH", "HANG"
#: Seconds that a rank waits for the other: habits that stall take them, a busy machine does not.
STALL_TIMEOUT = 20.0
#: Seconds for a habit in a column, after which its rank ends. They bound a hang only.
TIME = 120.0
PACKAGE = str(Path(onefold.__file__).parent) + os.sep
#: A message that names a cure has one of these.
CURES = (
    "use ", "call ", "give ", "keep ", "put ", "save ", "leave ", "make ", "write ", "move ", "inside ", "instead", "before shard",
    "full_params", "gather",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """How a habit went in a column. `why`: the differences, or the message."""

    kind: str
    why: str = ""
    error: str = ""

    @property
    def right(self) -> bool:
        return self.kind in (BITS, ROUNDING)

    @property
    def failed(self) -> bool:
        return self.kind in (DIFFERENT, CRASH, HANG, STALLED)


class DDP(World):
    def __init__(self, options: Any) -> None:
        self.options = {"find_unused_parameters": True, **options}

    def wrap(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, **self.options)


class Mean(World):
    """Plain backward passes, and the mean of gradients over ranks. One that no rank has stays
    None.
    """

    def reduce(self, model: nn.Module) -> None:
        for p in model.parameters():
            present = torch.tensor(float(p.grad is not None))
            dist.all_reduce(present)
            if present.item():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad = p.grad / dist.get_world_size()


class Onefold(World):
    def __init__(self, stage: int, group: Any, options: Any, units: Any = None) -> None:
        self.stage, self.group, self.options, self.units = stage, group, options, units
        self.left: list[str] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        recipe = onefold.Recipe.zero(self.stage, **{"stall_timeout": STALL_TIMEOUT, **self.options})
        units, self.units = self.units, None  # of the first model
        return onefold.shard(module, recipe, units=units, group=self.group)

    def reduce(self, model: nn.Module) -> None:
        if self.stage == 3 and any(p.grad is not None for p in model.parameters()):
            self.left = gathered(model)

    def whole(self, model: nn.Module, module: nn.Module) -> dict[str, Tensor]:
        return onefold.full_state_dict(model)

    def load(
        self, model: nn.Module, module: nn.Module, state: dict[str, Tensor], strict: bool
    ) -> None:
        onefold.load_full_state_dict(model, state, strict=strict)

    def gathered(self, model: nn.Module, write: bool) -> Any:
        return onefold.full_params(model, write=write)

    @contextlib.contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        onefold.unshard(model)
        yield
        self.wrap(model)

    def no_sync(self, model: nn.Module) -> Any:
        return onefold.no_sync(model)


# -- on a rank -------------------------------------------------------------------------------------


def judge(habits: Sequence[Habit], column: str, alone: Any, references: dict[Any, Any]) -> Verdict:
    """On one rank: run by the reference (once for several columns) and in `column`, and compare."""
    rank = dist.get_rank()
    plain = column == "one" or any(h.reference == "plain" for h in habits)
    same_batch = any(h.reference == "plain" for h in habits)
    options = {k: v for h in habits for k, v in h.options.items()}
    key = (tuple(h.title for h in habits), plain)
    if key not in references:
        references.clear()
        mean = any(h.reference == "mean" for h in habits)
        ddp = {k: v for h in habits for k, v in h.ddp.items()}
        reference = World() if plain else Mean() if mean else DDP(ddp)
        try:
            references[key] = run(habits, reference, rank, same_batch)
        except Exception:
            return Verdict(
                CRASH, "the reference itself failed: " + traceback.format_exc(), "reference"
            )
    sharded = Onefold(
        3 if column == "one" else int(column),
        alone if column == "one" else None,
        options,
        next((h.units for h in habits if h.units is not None), None),
    )
    try:
        result = run(habits, sharded, rank, same_batch)
    except Exception as error:
        verdict = of_error(error)
        traceback.clear_frames(error.__traceback__)
        del error
        gc.collect()
        return verdict
    if sharded.left:
        return Verdict(DIFFERENT, f"gathered behind the backward pass: {', '.join(sharded.left)}")
    if column != "one" and all(h.alike for h in habits):
        first = references.setdefault(f"a stage of {key[0]}", result)
        if found := differences(first, result, 0.0, 0.0):
            return Verdict(DIFFERENT, f"stages have other bits: {'; '.join(found[:4])}")
    wider = 10.0 if len(habits) > 1 else 1.0  # what one habit rounds, another may enlarge
    return _of_results(
        references[key],
        result,
        wider * max(h.rtol for h in habits),
        wider * max(h.atol for h in habits),
    )


def _of_results(expected: Result, actual: Result, rtol: float, atol: float) -> Verdict:
    if found := differences(expected, actual, rtol, atol):
        return Verdict(
            DIFFERENT,
            "; ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else ""),
        )
    return Verdict(ROUNDING if differences(expected, actual, 0.0, 0.0) else BITS)


def of_error(error: Exception) -> Verdict:
    """Onefold's own sentences are refusals; everything else is a crash."""
    name, text = type(error).__name__, str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    if name == "StallError":
        return Verdict(STALLED, text[:600], name)
    # By the package's own folder: a checkout may be in a folder of any name
    own = last.filename.startswith(PACKAGE) and (last.line or "").lstrip().startswith("raise")
    if own and any(word in text.lower() for word in CURES):
        return Verdict(REFUSED, text, name)
    frames = [
        f"{Path(f.filename).name}:{f.lineno} {f.name}"
        for f in traceback.extract_tb(error.__traceback__)
    ]
    return Verdict(CRASH, f"{text[:400]}\n      at {' > '.join(frames[-4:])}", name)


def work(tasks: Sequence[Task], folder: str) -> None:
    """On one rank: judge each task until one leaves the ranks out of step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Attention on the CPU too: second derivatives need the plain one
    torch.backends.cuda.enable_flash_sdp(False)
    everything()
    importlib.import_module("scripts.deliberate")
    rank, references = dist.get_rank(), {}  # type: ignore[var-annotated]
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    gc.collect()
    gc.freeze()
    for at, (titles, column) in enumerate(tasks):
        faulthandler.dump_traceback_later(TIME, exit=True)
        verdict = judge([HABITS[t] for t in titles], column, groups[rank], references)
        (Path(folder) / f"{at}-{rank}").write_text(json.dumps(asdict(verdict)))
        kinds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(kinds, (verdict.kind, verdict.error))
        if len({kind if kind in (REFUSED, CRASH) else "" for kind, _ in kinds}) > 1 or any(
            kind == STALLED for kind, _ in kinds
        ):
            break
    faulthandler.cancel_dump_traceback_later()


# -- in the test -----------------------------------------------------------------------------------


def verdicts_of(
    tasks: Sequence[Task],
    ranks: int = 2,
    tell: Callable[[Task, Verdict], object] | None = None,
) -> list[Verdict]:
    """The verdict of each task (titles of habits, column), in order. `tell` is called with them
    start by start.
    """
    found: list[Verdict] = []
    while len(found) < len(tasks):
        rest = tasks[len(found) :]
        with tempfile.TemporaryDirectory(prefix="onefold-habits-") as folder:
            outcomes = outcomes_of(
                ranks,
                work,
                rest,
                folder,
                timeout=60.0 + TIME + 10.0 * len(rest),
                grace=3 * STALL_TIMEOUT,
            )
            begun = len(found)
            for at in range(len(rest)):
                told = [
                    path
                    for rank in range(ranks)
                    if (path := Path(folder) / f"{at}-{rank}").exists()
                ]
                if len(told) < ranks:
                    break
                found.append(_together([Verdict(**json.loads(path.read_text())) for path in told]))
            if len(found) == begun or any(o.error for o in outcomes):  # a rank went without a word
                said = "; ".join(
                    f"rank {o.rank}: {o.error} {o.message[:300]} (exit {o.exitcode})"
                    for o in outcomes
                    if o.error
                )
                assert not all(o.error and o.error not in ("died", "killed") for o in outcomes), (
                    said + outcomes[0].trace
                )
                if len(found) < len(tasks):
                    found.append(Verdict(HANG, said))
            for at in range(begun, len(found)) if tell else ():
                tell(tasks[at], found[at])
    return found


def _together(verdicts: list[Verdict]) -> Verdict:
    """One verdict for all ranks."""
    for kind in (CRASH, HANG, DIFFERENT, STALLED):
        for rank, verdict in enumerate(verdicts):
            if verdict.kind == kind:
                others = ", ".join(v.kind for v in verdicts if v is not verdict)
                return Verdict(
                    kind, f"rank {rank} (others: {others}): {verdict.why}", verdict.error
                )
    refused = [v for v in verdicts if v.kind == REFUSED]
    if refused and (
        len(refused) < len(verdicts)
        or len({(v.error, _without_names(sentence(v.why))) for v in refused}) > 1
    ):
        return Verdict(
            CRASH,
            "uneven: " + " | ".join(f"{v.kind}: {sentence(v.why)}" for v in verdicts),
            "uneven",
        )
    if refused:
        return refused[0]
    return Verdict(ROUNDING) if any(v.kind == ROUNDING for v in verdicts) else Verdict(BITS)


def _without_names(text: str) -> str:
    """A sentence without the parameter and the numbers that it names: each rank's own."""
    return re.sub(r"'[^']*'|\d+", "#", text)


def sentence(message: str) -> str:
    """The first sentence of a message."""
    first = " ".join(message.split())
    for at, letter in enumerate(first):
        if letter == "." and (at + 1 == len(first) or first[at + 1] == " ") and at > 20:
            return first[: at + 1]
    return first


def surprises(habit: Habit, column: str, verdict: Verdict) -> str | None:
    """What is wrong with the verdict, or None."""
    expected = habit.expect[column]
    fine = {
        BITS: verdict.kind == BITS,
        ROUNDING: verdict.right,
        REFUSED: verdict.kind == REFUSED,
        STALLED: verdict.kind == STALLED,
        EITHER: verdict.right or verdict.kind == REFUSED,
    }[expected]
    where = "on one process" if column == "one" else f"at stage {column}"
    return (
        None
        if fine
        else (
            f"{habit.title} {where}: {verdict.kind} {verdict.error} {verdict.why}, expected"
            f" {expected}"
        )
    )


def tasks_of(habits: Sequence[Habit], columns: Sequence[str] = COLUMNS) -> list[Task]:
    return [((habit.title,), column) for habit in habits for column in columns]
