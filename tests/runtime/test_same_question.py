"""What the user's code asks of a sharded parameter, every rank asks: ranks that ask for different
numbers are told so, and get none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
import standin
from ranks import outcomes_of, run_ranks

#: {name: (what rank 0 asks for, what the others ask for)}, of the model and its optimizer
Ask = Callable[[Any, Any], Any]
DIFFERENT: dict[str, tuple[Ask, Ask]] = {
    "norms": (lambda m, _: m.a.data.norm(), lambda m, _: m.b.data.norm()),
    "norms of parameters": (lambda m, _: norm(m.a), lambda m, _: norm(m.b)),
    "1-norms": (lambda m, _: m.a.data.norm(1), lambda m, _: m.a.data.norm()),
    "sums": (lambda m, _: m.a.data.sum(), lambda m, _: m.b.data.sum()),
    "a sum and a mean": (lambda m, _: m.a.data.sum(), lambda m, _: m.a.data.mean()),
    "maxima": (lambda m, _: m.a.data.max(), lambda m, _: m.b.data.max()),
    "any": (lambda m, _: (m.a.data > 9).any(), lambda m, _: (m.b.data > 0).any()),
    "counts": (lambda m, _: m.a.data.count_nonzero(), lambda m, _: m.b.data.count_nonzero()),
    "equal": (
        lambda m, _: torch.equal(m.a.data, m.a.data.clone()),
        lambda m, _: torch.equal(m.b.data, m.b.data + 1),
    ),
    "gradients": (lambda m, _: m.a.grad.norm(), lambda m, _: m.b.grad.norm()),
    "a gradient and its parameter": (lambda m, _: m.a.grad.norm(), lambda m, _: m.a.data.norm()),
    "moments": (
        lambda m, o: o.state[m.a]["exp_avg"].norm(),
        lambda m, o: o.state[m.b]["exp_avg"].norm(),
    ),
    "two moments": (
        lambda m, o: o.state[m.a]["exp_avg"].sum(),
        lambda m, o: o.state[m.a]["exp_avg_sq"].sum(),
    ),
    "rows": (lambda m, _: m.a.data[1].norm(), lambda m, _: m.a.data[2].norm()),
    "lists": (
        lambda m, _: torch._foreach_norm([m.a.data, m.b.data]),
        lambda m, _: torch._foreach_norm([m.b.data, m.a.data]),
    ),
    "long lists": (
        lambda m, _: torch._foreach_norm([m.a.data, m.b.data] * 4),
        lambda m, _: torch._foreach_norm([m.b.data, m.a.data] * 4),
    ),
    "a list and one": (
        lambda m, _: torch._foreach_norm([m.a.data, m.b.data] * 4),
        lambda m, _: m.a.data.norm(),
    ),
    "clipping of parts": (
        lambda m, _: nn.utils.clip_grad_norm_([m.a], 1.0),
        lambda m, _: nn.utils.clip_grad_norm_([m.b], 1.0),
    ),
}


def norm(param: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return param.norm()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(40, 8)), nn.Parameter(torch.randn(40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.a) * (x @ self.b)).sum()


def made(stage: int, native: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    group = standin.new_group() if native else None
    model: Any = onefold.shard(Two(), onefold.Recipe.zero(stage, stall_timeout=10.0), group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 40)).backward()
    optimizer.step()
    return model, optimizer


def asked(stage: int, native: bool) -> list[str]:
    wrong = []
    model, optimizer = made(stage, native)
    for name, (first, others) in DIFFERENT.items():
        try:
            found = (first if dist.get_rank() == 0 else others)(model, optimizer)
            wrong.append(f"{name}: {found}")
        except RuntimeError as error:
            said = str(error)
            if "every rank must call the same, in the same order." not in said or (
                f"rank {dist.get_rank()} called" not in said
            ):
                wrong.append(f"{name}: {said}")
        # The same question is answered afterwards
        with onefold.full_params(model):
            whole = model.a.detach().norm()
        if not torch.allclose(model.a.data.norm(), whole):
            wrong.append(f"{name}: afterwards the norm is {model.a.data.norm()}, expected {whole}")
        first(model, optimizer)
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_numbers_of_different_things_asked_for_at_once_are_refused(stage: int, ranks: int) -> None:
    assert run_ranks(ranks, asked, stage, False) == [[]] * ranks


def test_they_are_refused_on_a_backend_that_computes_on_the_device() -> None:
    assert run_ranks(2, asked, 3, True) == [[], []]


def sentence() -> str:
    model, _ = made(3)
    try:
        (model.a if dist.get_rank() == 0 else model.b).data.norm()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_the_sentence_names_both_parameters() -> None:
    told = run_ranks(3, sentence)
    rest = ": every rank must call the same, in the same order."
    assert told == [
        f"rank 0 called the norm of 'a' while rank 1 called the norm of 'b'{rest}",
        f"rank 1 called the norm of 'b' while rank 0 called the norm of 'a'{rest}",
        f"rank 2 called the norm of 'b' while rank 0 called the norm of 'a'{rest}",
    ]


def read_whole(kind: str) -> Any:
    model, _ = made(3)
    first = dist.get_rank() == 0
    if kind == "parameters":
        return (model.a if first else model.b).data.tolist()
    if kind == "a gradient and its parameter":
        return (model.a.grad if first else model.a.data).tolist()
    return (model.a.data[3] if first else model.a.data[4]).tolist()


@pytest.mark.parametrize("kind", ["parameters", "a gradient and its parameter"])
def test_reads_of_different_wholes_are_never_taken_for_each_other(kind: str) -> None:
    for outcome in outcomes_of(2, read_whole, kind):
        assert outcome.error == "StallError" and "which every rank must call" in outcome.message
