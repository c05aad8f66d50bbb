"""Saved at any stage on any number of ranks, loaded at any other: bit-equal states. The reference is put together from the ranks' own
tensors by names and intervals, without any of the checkpoint's code."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import TinyGPT, tokens_of
from ranks import run_ranks

STAGES = (0, 1, 2, 3)
Whole = dict[str, dict[str, Any]]


class Odd(nn.Module):
    """A tied model with frozen parameters, a buffer, a scalar and a parameter smaller than the world."""

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


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "AdamW, two groups":
        groups = [{"params": trained[::2], "lr": 2e-3}, {"params": trained[1::2], "weight_decay": 0.3, "betas": (0.8, 0.95)}]
        return torch.optim.AdamW(groups, lr=1e-3)
    if kind == "SGD":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    return torch.optim.Adagrad(trained, lr=0.02)


def build(stage: int, precision: str, kind: str, group: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    import onefold

    torch.manual_seed(seed)
    model = onefold.shard(Odd(), onefold.Recipe.zero(stage, precision=precision, stall_timeout=30.0), group=group)
    return model, optimizer_of(kind, model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, first: int = 0) -> list[float]:
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


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any, size: int) -> Whole:
    """{parameter: {"value": whole tensor, "exp_avg": ...}} from what every rank holds, and the buffers."""
    import onefold

    engine = onefold.engine_of(model)
    mine: dict[str, dict[str, Any]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for entry in engine.entries:
            param, flat = entry.param, entry.flat
            start = 0 if flat.passive else flat.local(entry)[0] - entry.slot.start
            held = {"value": param.data, **optimizer.state.get(param, {})}
            mine[entry.names[0]] = {
                "shape": tuple(entry.slot.shape),
                "held": param.numel(),
                **{k: (start, v.detach().reshape(-1).clone()) if isinstance(v, Tensor) and v.shape == param.shape and k != "step" else v
                   for k, v in held.items()},
            }  # fmt: skip
    said: list[Any] = [mine]
    if size > 1:
        said = [None] * size
        dist.all_gather_object(said, mine, group=group)
    out: Whole = {"(buffers)": {"calls": model.calls.clone()}, "(groups)": {"lr": [g["lr"] for g in optimizer.param_groups]}}
    for name in mine:
        out[name] = {}
        # A rank that holds nothing of a parameter has not stepped it either: counts are those of a rank that does.
        ranks = sorted(said, key=lambda s: -s[name]["held"])
        for key in {k for s in said for k in s[name]} - {"shape", "held"}:
            parts = [s[name][key] for s in ranks if key in s[name]]
            if not isinstance(parts[0], tuple):
                out[name][key] = parts[0]
                continue
            whole = torch.empty(mine[name]["shape"], dtype=parts[0][1].dtype)
            for start, part in parts:
                whole.view(-1)[start : start + part.numel()] = part
            out[name][key] = whole
    return out


def differences(a: Whole, b: Whole) -> list[str]:
    if set(a) != set(b):
        return [f"names: {set(a) ^ set(b)}"]
    out = []
    for name in a:
        if set(a[name]) != set(b[name]):
            out.append(f"{name}: {set(a[name]) ^ set(b[name])}")
            continue
        for key, value in a[name].items():
            other = b[name][key]
            same = torch.equal(value, other) and value.dtype == other.dtype if isinstance(value, Tensor) else value == other
            if not same:
                out.append(f"{name} {key}")
    return out


def every_combination(root: str, precision: str, kind: str, sizes: list[int], pairs: str) -> list[str]:
    """Save at each stage on each number of ranks, load at each other; returns what differed."""
    import onefold

    rank, wrong = dist.get_rank(), []
    groups = {n: dist.new_group(list(range(n))) if n < dist.get_world_size() else dist.group.WORLD for n in sizes}
    saved: dict[tuple[int, int], Whole] = {}
    for size, stage in itertools.product(sizes, STAGES):
        if rank < size:
            model, optimizer = build(stage, precision, kind, groups[size], seed=1)
            train(model, optimizer, rank, 2)
            onefold.save(f"{root}/{size}-{stage}", model=model, optimizer=optimizer, step=2)
            saved[size, stage] = whole_states(model, optimizer, groups[size], size)
        dist.barrier()
    for size, stage in itertools.product(sizes, STAGES):
        if rank < size:
            model, optimizer = build(stage, precision, kind, groups[size], seed=2)
            if stage % 2:
                train(model, optimizer, rank, 1)  # states that must make way
            for number, source in enumerate(itertools.product(sizes, STAGES)):
                if pairs == "some" and (number + stage + size) % 4:
                    continue
                onefold.load(f"{root}/{source[0]}-{source[1]}", model=model, optimizer=optimizer)
                found = whole_states(model, optimizer, groups[size], size)
                expected = saved.get(source)
                if expected is not None:  # a rank knows what was saved by groups it was in; rank 0 was in all
                    wrong += [f"{source} into {(size, stage)}: {d}" for d in differences(expected, found)]
        dist.barrier()
    return wrong


@pytest.mark.slow
def test_every_stage_and_number_of_ranks_loads_what_every_other_saved(tmp_path: Path) -> None:
    for wrong in run_ranks(4, every_combination, str(tmp_path), "fp32", "AdamW, two groups", [1, 2, 3, 4], "all", timeout=400.0):
        assert wrong == []


def other_settings(root: str) -> list[str]:
    wrong = []
    for number, (precision, kind) in enumerate([("bf16", "AdamW, two groups"), ("bf16", "SGD"), ("fp32", "Adagrad")]):
        wrong += [f"{precision} {kind}: {w}" for w in every_combination(f"{root}/{number}", precision, kind, [1, 3], "some")]
    return wrong


def test_half_precision_and_other_optimizers_too(tmp_path: Path) -> None:
    for wrong in run_ranks(3, other_settings, str(tmp_path), timeout=240.0):
        assert wrong == []


def resumed(root: str, stage: int) -> dict[str, Any]:
    """Losses of an uninterrupted run, and of one that was saved and loaded into a fresh model in the middle."""
    import random

    import numpy as np

    import onefold

    rank = dist.get_rank()

    def run(interrupt: bool) -> dict[str, Any]:
        torch.manual_seed(5 + rank)
        random.seed(7 + rank)
        np.random.seed(9 + rank)
        model, optimizer = build(stage, "fp32", "AdamW, two groups", None, seed=1)
        torch.manual_seed(50 + rank)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=8)

        def part(steps: range) -> list[Any]:
            out = []
            for step in steps:
                noise = float(torch.rand(())) + random.random() + float(np.random.rand())
                out.append((train(model, optimizer, rank, 1, step)[0], noise, scheduler.get_last_lr()))
                scheduler.step()
            return out

        seen = part(range(3))
        if interrupt:
            path = f"{root}/resumed-{stage}"
            onefold.save(path, model=model, optimizer=optimizer, scheduler=scheduler, step=3, extra={"best": 0.25, "w": torch.arange(9000)})
            torch.manual_seed(999)
            random.seed(999)
            np.random.seed(999)
            model, optimizer = build(stage, "fp32", "AdamW, two groups", None, seed=77)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=8)
            loaded = onefold.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
            assert loaded.step == 3 and loaded.extra["best"] == 0.25 and torch.equal(loaded.extra["w"], torch.arange(9000))
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
        model, optimizer = build(stage, "fp32", "AdamW, two groups", None, seed=1)
        train(model, optimizer, rank, 1)
        path = f"{root}/count-{stage}"
        onefold.save(path, model=model, optimizer=optimizer)
        size = Path(path, f"rank-{rank:05d}.safetensors").stat().st_size
        for target in (0, 2, 3):
            other, states = build(target, "fp32", "AdamW, two groups", None, seed=2)
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
        assert content < written < content + 300_000, "headers and random states are all there is besides"


def grown(root: str) -> list[float]:
    import onefold

    model, optimizer = build(3, "fp32", "SGD", None, seed=2)
    onefold.load(root, model=model, optimizer=optimizer)
    return [float(torch.rand(())), *train(model, optimizer, dist.get_rank(), 1, 9)]


def saved_on_two(root: str) -> float:
    import onefold

    model, optimizer = build(1, "fp32", "SGD", None, seed=1)
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
