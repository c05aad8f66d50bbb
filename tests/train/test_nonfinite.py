"""Loss or gradients that are not finite: where they came from is named, and each policy does what
it says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onefold.train import loop
from onefold.train.config import resolve
from onefold.train.loop import Row, train
from onefold.train.prepare import Run, prepare
from onefold.wording import TrainError
from started_runs import alone

#: Of ranks.SERVERS.
SERVER = "libraries"

TEXT = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ", k=3000))
#: What goes wrong at which micro-batch (see `mark_of`).
FAULTS: dict[int, str] = {}


def mark_of(ids: torch.Tensor) -> int:
    """A number that tells one micro-batch from another."""
    return int((ids.reshape(-1) * torch.arange(1, ids.numel() + 1)).sum())


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


class Faulty(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.fault = number, ""
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.dropout(self.linear(x)))
        if self.number == 1 and self.fault == "output":
            y = y / 0.0
        return x + (_BadGradient.apply(y) if self.number == 1 and self.fault == "gradient" else y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, 16)
        self.blocks = nn.ModuleList(Faulty(i) for i in range(4))
        self.out = nn.Linear(16, 257)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        fault = FAULTS.get(mark_of(input_ids), "")
        self.blocks[1].fault = fault
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.out(x) * (float("nan") if fault == "head" else 1.0)
        return nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 257), labels[:, 1:].reshape(-1)
        )


def build() -> nn.Module:
    return Model()


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    FAULTS.clear()
    yield
    FAULTS.clear()


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def make(text: str, **options: Any) -> Run:
    given = {
        "model": f"{__name__}:build",
        "tokenizer": "bytes",
        "data": text,
        "seq": 32,
        "steps": 8,
        "eval_every": 0,
        "units": "Faulty",
    }
    return prepare(resolve({**given, **options}), alone(), lambda line: None)


def break_at(run: Run, batch: int, fault: str, micro_batch: int = 0) -> None:
    """Let micro-batch `micro_batch` of the global batch of step `batch` (both from 0) go wrong."""
    chosen = run.order.micro_batches(batch, 0, 1, run.choice.micro_batch)[micro_batch]
    FAULTS[mark_of(run.data.samples.batch(chosen)["input_ids"])] = fault


def losses(run: Run, **more: Any) -> list[float | None]:
    rows: list[Row] = []
    train(run, lambda: 0, rows.append, **more)
    return [row["loss"] for row in rows]


@pytest.mark.parametrize(
    ("fault", "unit", "what"),
    [
        ("output", "blocks.1", "the loss at step 3 is nan"),
        ("gradient", "blocks.1", "the gradient norm at step 3 is (nan|inf)"),
        ("head", "(root)", "the loss at step 3 is nan"),
    ],
)
def test_the_unit_and_the_rank_are_named(text: str, fault: str, unit: str, what: str) -> None:
    run = make(text, global_batch=6, micro_batch=2)
    break_at(run, 2, fault, micro_batch=1)
    with pytest.raises(TrainError, match=what) as error:
        losses(run)
    assert re.search(rf"unit '{re.escape(unit)}', on rank 0", str(error.value)), error.value
    assert "--on-nonfinite skip" in str(error.value)


def test_a_step_that_stepped_in_its_backward_pass_is_told_without_a_unit(text: str) -> None:
    run = make(text, offload_optimizer="cpu", step_in_backward=True, clip=0)
    break_at(run, 2, "output")
    with pytest.raises(TrainError, match="the loss at step 3 is nan; its backward pass"):
        losses(run)


def test_a_held_out_loss_that_is_not_finite_is_none(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "held_out_loss", lambda run: float("nan"))
    rows: list[Row] = []
    train(make(text, eval_every=1, steps=1), lambda: 0, rows.append)
    assert rows[0]["eval_loss"] is None


def test_the_unit_whose_weights_an_update_broke_is_named(text: str) -> None:
    run = make(text)
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        if row["step"] == 2:
            with torch.no_grad():
                next(
                    p for n, p in run.model.named_parameters() if n == "blocks.2.linear.bias"
                ).fill_(float("nan"))

    with pytest.raises(
        TrainError,
        match=r"the loss at step 3 is nan; .* the output of unit 'blocks\.2', on rank 0",
    ):
        train(run, lambda: 0, report)
    assert len(rows) == 2


def test_a_step_that_is_left_out_changes_no_weight_and_the_run_goes_on(text: str) -> None:
    run = make(text, on_nonfinite="skip")
    break_at(run, 2, "output")
    weights: list[torch.Tensor] = []
    rows: list[Row] = []
    said: list[str] = []

    def report(row: Row) -> None:
        rows.append(row)
        weights.append(torch.cat([p.detach().reshape(-1) for p in run.model.parameters()]))

    train(run, lambda: 0, report, alert=said.append)
    assert [row["loss"] is None for row in rows] == [False, False, True] + 5 * [False]
    assert [row["step"] for row in rows if row.get("left_out")] == [3]
    assert torch.equal(weights[1], weights[2]) and not torch.equal(weights[2], weights[3])
    assert said == ["the loss at step 3 is nan. The step is left out."]


def test_so_many_in_a_row_end_the_run_and_single_ones_do_not(text: str) -> None:
    run = make(text, on_nonfinite="skip", nonfinite_limit=3)
    for batch in (1, 3, 4):
        break_at(run, batch, "output")
    assert losses(run).count(None) == 3
    run = make(text, on_nonfinite="skip", nonfinite_limit=3)
    for batch in (3, 4, 5):
        break_at(run, batch, "output")
    with pytest.raises(TrainError, match=r"step 6 .* 3 such steps in a row"):
        losses(run)


def test_the_loss_scaler_keeps_its_own_counsel_about_gradients(text: str) -> None:
    run = make(text, precision="fp16", steps=4)
    run.scaler._init_scale = 2.0**60  # more than fp16 holds: the first steps overflow
    rows: list[Row] = []
    train(run, lambda: 0, rows.append)
    assert rows[-1]["scale"] < rows[0]["scale"] and all(row["loss"] is not None for row in rows)
