"""A save and a load in the middle of a run: it goes on as if nothing had been, with any optimizer;
what is read, and by whom.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from zoo import TinyGPT, tokens_of


class Odd(nn.Module):
    """A tied model with frozen parameters, a buffer, a scalar and a parameter smaller than the
    world.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT(tied=True, width=12, depth=2)
        self.gpt.blocks[0].requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.pair = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1.0
        return self.gpt(tokens) * self.gain + self.pair.square().sum()


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": params[::2], "lr": 2e-3},
        {"params": params[1::2], "weight_decay": 0.3, "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW, two groups": two_groups,
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "Adam, the rate a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "SGD, no momentum": lambda params: torch.optim.SGD(params, lr=0.1),
}


def build(stage: int, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    import onefold

    torch.manual_seed(seed)
    model = onefold.shard(Odd(), onefold.Recipe.zero(stage, stall_timeout=30.0))
    return model, OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, first: int = 0
) -> list[float]:
    import onefold

    losses = []
    for step in range(first, first + steps):
        loss = model(tokens_of(100 * rank + step))
        loss.backward()
        onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def go_on_with_each(root: str) -> list[str]:
    """Which optimizers have other losses after a save and a load, at this number of ranks."""
    import onefold

    rank, wrong = dist.get_rank() if dist.is_initialized() else 0, []
    for number, kind in enumerate(OPTIMIZERS):
        one, other = build(number % 4, kind, seed=1), build((number + 1) % 4, kind, seed=2)
        train(*one, rank, 2)
        onefold.save(f"{root}/{number}", model=one[0], optimizer=one[1])
        onefold.load(f"{root}/{number}", model=other[0], optimizer=other[1])
        expected, found = train(*one, rank, 2, 2), train(*other, rank, 2, 2)
        if found != expected:
            wrong.append(f"{kind}: {found} for {expected}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_optimizer_of_torch_goes_on_as_if_nothing_had_been(ranks: int, tmp_path: Path) -> None:
    assert (
        go_on_with_each(str(tmp_path))
        if ranks == 1
        else run_ranks(2, go_on_with_each, str(tmp_path))
    ) in ([], [[], []])


def resumed(root: str, stage: int) -> dict[str, Any]:
    """Losses of an uninterrupted run, and of one that was saved and loaded into a fresh model in
    the middle.
    """
    import random

    import numpy as np

    import onefold

    rank = dist.get_rank()

    def run(interrupt: bool) -> dict[str, Any]:
        torch.manual_seed(5 + rank)
        random.seed(7 + rank)
        np.random.seed(9 + rank)
        model, optimizer = build(stage, "AdamW, two groups", seed=1)
        torch.manual_seed(50 + rank)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[1e-2, 2e-2], total_steps=8
        )

        def part(steps: range) -> list[Any]:
            out = []
            for step in steps:
                noise = float(torch.rand(())) + random.random() + float(np.random.rand())
                out.append(
                    (train(model, optimizer, rank, 1, step)[0], noise, scheduler.get_last_lr())
                )
                scheduler.step()
            return out

        seen = part(range(3))
        if interrupt:
            path = f"{root}/resumed-{stage}"
            onefold.save(
                path,
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                step=3,
                extra={"best": 0.25, "w": torch.arange(9000)},
            )
            torch.manual_seed(999)
            random.seed(999)
            np.random.seed(999)
            model, optimizer = build(stage, "AdamW, two groups", seed=77)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=[1e-2, 2e-2], total_steps=8
            )
            loaded = onefold.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
            assert (
                loaded.step == 3
                and loaded.extra["best"] == 0.25
                and torch.equal(loaded.extra["w"], torch.arange(9000))
            )
        return {"seen": seen + part(range(3, 7))}

    return {"whole": run(False)["seen"], "interrupted": run(True)["seen"]}


def resumed_at_stages(root: str) -> list[dict[str, Any]]:
    return [resumed(root, stage) for stage in (0, 1, 3)]


def test_a_resumed_run_is_bit_equal_to_one_that_was_never_interrupted(tmp_path: Path) -> None:
    for stages in run_ranks(2, resumed_at_stages, str(tmp_path)):
        for found in stages:
            assert found["interrupted"] == found["whole"]
            assert len({noise for _, noise, _ in found["whole"]}) == 7  # the generators moved


def bytes_read_and_written(root: str) -> dict[str, Any]:
    """What each rank reads of the files, counted at the system call."""
    import onefold
    from onefold.checkpoint import tensorfile

    rank, count = dist.get_rank(), [0]
    real = tensorfile.os.preadv

    def counting(file: int, buffers: Any, at: int) -> int:
        got = real(file, buffers, at)
        count[0] += got
        return got

    out = {}
    for stage in (0, 3):
        model, optimizer = build(stage, "AdamW, two groups", seed=1)
        train(model, optimizer, rank, 1)
        path = f"{root}/count-{stage}"
        onefold.save(path, model=model, optimizer=optimizer)
        size = Path(path, f"rank-{rank:05d}.safetensors").stat().st_size
        for target in (0, 2, 3):
            other, states = build(target, "AdamW, two groups", seed=2)
            count[0] = 0
            tensorfile.os.preadv = counting
            try:
                onefold.load(path, model=other, optimizer=states, rng=False)
            finally:
                tensorfile.os.preadv = real
            out[stage, target] = (count[0], size)
    return out


def test_every_byte_is_written_once_and_read_once_over_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(3, bytes_read_and_written, str(tmp_path))
    model = Odd()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    content = 4 * (3 * trained + frozen) + 4 * 3  # masters and two moments; the buffer
    for (stage, target), _ in found[0].items():
        read = [ranks[stage, target][0] for ranks in found]
        written = sum(ranks[stage, target][1] for ranks in found)
        assert sum(read) == content, (stage, target, read, content)
        assert max(read) < content / 3 * 1.25, "the ranks share the reading"
        assert content < written < content + 300_000, (
            "headers and random states are all there is besides"
        )


def grown(root: str) -> list[float]:
    import onefold

    model, optimizer = build(3, "SGD", seed=2)
    onefold.load(root, model=model, optimizer=optimizer)
    return [float(torch.rand(())), *train(model, optimizer, dist.get_rank(), 1, 9)]


def saved_on_two(root: str) -> float:
    import onefold

    model, optimizer = build(1, "SGD", seed=1)
    train(model, optimizer, dist.get_rank(), 2)
    torch.manual_seed(dist.get_rank())
    onefold.save(f"{root}/step-2", model=model, optimizer=optimizer, step=2)
    return float(torch.rand(()))


def test_more_ranks_get_random_streams_of_their_own() -> None:
    with tempfile.TemporaryDirectory() as root:
        before = run_ranks(2, saved_on_two, root)
        first = [noise for noise, _ in run_ranks(4, grown, root)]
        again = [noise for noise, _ in run_ranks(4, grown, root)]
    assert first[:2] == before, "ranks that there were go on where they stood"
    assert len(set(first)) == 4, "no two ranks share a stream"
    assert first == again
