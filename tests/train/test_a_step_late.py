"""On a device with streams the loop reads each step in the next one; all else is as on a device
without: rows, weights, words, checkpoints.

The device is tests/virtual, whose kernels are the CPU's: what differs from a run on the CPU differs
for a reason of ours.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.optim.clip import skips_on_device
from onefold.processes.ranks import Ranks
from onefold.processes.signals import Stop
from onefold.train import loop
from onefold.train.checkpoints import Keeper
from onefold.train.config import resolve
from onefold.train.loop import Row, train
from onefold.train.prepare import Run
from onefold.train.report import Reporter
from onefold.wording import TrainError
from started_runs import begun

pytestmark = pytest.mark.one_in(9)

#: Of ranks.SERVERS.
SERVER = "libraries"

virtual = pytest.importorskip("virtual")

TEXT = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ", k=3000))
HERE = "virtual:0"
#: What goes wrong with which micro-batch (see `mark_of`).
FAULTS: dict[int, str] = {}
#: Of a row, what does not depend on how long things take or on where they lie.
EQUAL = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "scale",
    "left_out",
    "tokens",
    "wire_bytes",
    "eval_loss",
)


def mark_of(ids: torch.Tensor) -> torch.Tensor:
    """A number that tells one micro-batch from another, where the micro-batch is."""
    return (ids.reshape(-1) * torch.arange(1, ids.numel() + 1, device=ids.device)).sum()


class _Times(torch.autograd.Function):
    """Passes its gradient on times a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0].to(gradient), None


class Faulty(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.fault: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.dropout(self.linear(x)))
        if self.fault:
            y = _Times.apply(y * self.fault["output"].to(y), self.fault["gradient"])
        return x + y


class Model(nn.Module):
    """What is wrong with a micro-batch is found on the device."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, 16)
        self.blocks = nn.ModuleList(Faulty(dropout) for _ in range(3))
        self.out = nn.Linear(16, 257)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mark = mark_of(input_ids)
        factors = {
            kind: torch.ones((), device=mark.device) for kind in ("output", "gradient", "loss")
        }
        for number, kind in FAULTS.items():
            factors[kind] = torch.where(mark == number, float("inf"), factors[kind])
        self.blocks[1].fault = factors
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(
            self.out(x)[:, :-1].reshape(-1, 257), labels[:, 1:].reshape(-1)
        )
        return loss + (factors["loss"] - 1)  # its gradients stay finite


def dropping() -> nn.Module:
    return Model(0.2)


def plain() -> nn.Module:
    """Draws nothing at random, which devices do not do alike."""
    return Model(0.0)


def start(
    device: str, folder: Path, ranks: Ranks | None = None, **options: Any
) -> tuple[Run, Keeper]:
    """A start of the run as the command makes it."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    given = {
        "model": f"{__name__}:dropping", "tokenizer": "bytes", "data": str(text), "seq": 32, "steps": 8, "eval_every": 0, "units": "Faulty",
        "global_batch": 4, "micro_batch": 2, "output": str(folder / device),
    }  # fmt: skip
    config = resolve({**given, **options})
    where = torch.device(HERE if device == "virtual" else "cpu")
    run, _ = begun(config, ranks or Ranks(0, 1, 0, 1, where, "gloo", None))
    return run, Keeper(run, folder / device, Reporter())


def break_at(run: Run, batch: int, fault: str, micro_batch: int = 0, rank: int = 0) -> None:
    chosen = run.order.micro_batches(batch, rank, run.ranks.world_size, run.choice.micro_batch)[
        micro_batch
    ]
    FAULTS[int(mark_of(run.data.samples.batch(chosen)["input_ids"]))] = fault


class Told:
    """What came of a run: its rows, its words, why it broke off, its weights and the counts of its
    optimizer.
    """

    def __init__(self, run: Run, keeper: Keeper | None, stop_in: int = -1) -> None:
        self.rows: list[Row] = []
        self.said: list[str] = []
        self.error = ""
        asked: list[int] = []

        def stopping() -> int:
            asked.append(0)
            return Stop.PREEMPT if len(asked) - 1 == stop_in else Stop.NONE

        try:
            self.done = train(
                run,
                stopping,
                self.rows.append,
                keeper=keeper,
                alert=self.said.append,
            )
        except TrainError as error:
            self.error = str(error)
        if keeper is not None:
            keeper.close()
        self.weights = {
            name: t.cpu().clone() for name, t in onefold.full_state_dict(run.model).items()
        }
        states = run.optimizer.state_dict()["state"].values()
        self.counts = {float(state["step"]) for state in states}

    def unlike(self, other: Told) -> list[str]:
        """What is not as in `other`, to the bit."""
        mine, its = (
            [{key: row.get(key) for key in EQUAL} for row in told.rows] for told in (self, other)
        )
        found = [f"{a} for {b}" for a, b in zip(mine, its, strict=False) if a != b]
        for name in ("said", "error", "counts"):
            if getattr(self, name) != getattr(other, name):
                found.append(f"{name}: {getattr(self, name)!r} for {getattr(other, name)!r}")
        found += [f"{len(mine)} rows for {len(its)}"] if len(mine) != len(its) else []
        return found + [
            name for name, t in other.weights.items() if not torch.equal(t, self.weights[name])
        ]


def in_both_ways(faults: tuple[tuple[Any, ...], ...] = (), **options: Any) -> tuple[Told, Told]:
    """On the virtual device, (each step read in time, each read in the next). Random numbers are
    the same in both.
    """
    found, asked = [], loop.skips_on_device
    for late in (False, True):
        loop.skips_on_device = lambda *args, late=late: late and asked(*args)
        FAULTS.clear()
        with tempfile.TemporaryDirectory() as folder:
            run, keeper = start("virtual", Path(folder), **options)
            for fault in faults:
                break_at(run, *fault)
            assert skips_on_device(run.optimizer, onefold.engine_of(run.model))
            found.append(Told(run, keeper))
    loop.skips_on_device = asked
    return found[0], found[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16", "schedule": "cosine", "warmup": 3},
        {"eval_every": 3, "save_every": 4, "async_save": False},
        {"clip": 0.0},
        {"precision": "fp16"},
    ],
    ids=str,
)
@virtual.alone
def test_rows_and_weights_are_those_of_steps_that_are_read_at_once(options: dict[str, Any]) -> None:
    there, here = in_both_ways(**options)
    assert not here.unlike(there), here.unlike(there)
    assert [row["step"] for row in here.rows] == list(range(1, 9)) and not here.error
    assert all(row["step_ms"] > 0 and row["tokens_per_s"] > 0 for row in here.rows)


# -- steps that are left out -----------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["gradient", "loss"])
@virtual.alone
def test_the_device_leaves_a_bad_step_out_before_anybody_has_read_it(fault: str) -> None:
    """Weights, moments and the counts of steps are to the bit what they were; no answer of the
    device was waited for.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, _ = start("virtual", Path(folder), on_nonfinite="skip")
        break_at(run, 5, fault, micro_batch=1)
        update, held = loop.update_unless_bad, []

        def states() -> list[torch.Tensor]:
            params = [p for group in run.optimizer.param_groups for p in group["params"]]
            return [
                t.detach().clone() for p in params for t in (p, *run.optimizer.state[p].values())
            ]

        def watched(*args: Any) -> None:
            before = states()
            with virtual.no_synchronization():
                update(*args)
            held.append((before, states()))

        loop.update_unless_bad = watched
        train(run, lambda: 0, lambda row: None)
    same = [
        len(a) == len(b) and all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))
        for a, b in held
    ]
    assert same == [False] * 5 + [True] + [False] * 2


# -- stopping and going on -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}], ids=str)
@virtual.alone
def test_a_run_that_was_stopped_goes_on_to_the_bit(options: dict[str, Any]) -> None:
    FAULTS.clear()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = Told(*start("virtual", folder, **options))
        (folder / "cut").mkdir()
        first = Told(*start("virtual", folder / "cut", save_every=3, **options), stop_in=6)
        assert [row["step"] for row in first.rows] == [1, 2, 3, 4, 5] and first.done == 5
        run, keeper = start("virtual", folder / "cut", resume="auto", **options)
        assert run.start == 5
        second = Told(run, keeper)
        second.rows[:0] = first.rows
        assert not second.unlike(whole), second.unlike(whole)


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    FAULTS.clear()
    yield
    FAULTS.clear()
