"""Saved at any stage on any number of ranks, loaded at any other: bit-equal states. The reference is put together from the ranks' own
tensors by names and intervals, without any of the checkpoint's code."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
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
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


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


# -- every stage and number of ranks, into every other ---------------------------------------------------------------------------


class Part(nn.Module):
    """x (batch, 5) -> the same; ties, a frozen matrix, a scalar, a parameter smaller than the world, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.again, self.down, self.fixed = nn.Linear(5, 7), nn.Linear(5, 7, bias=False), nn.Linear(7, 5), nn.Linear(5, 5)
        self.again.weight = self.up.weight
        self.fixed.requires_grad_(False)
        self.gain, self.pair = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.5, -0.5]))
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return self.fixed(x) + self.down(torch.tanh(self.up(x) + self.again(x))) * self.gain + self.pair.sum()


class Three(nn.Module):
    """tokens (batch, length) -> a loss. A part for each kind of optimizer, so that a checkpoint of it tries all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(61, 5), nn.Linear(5, 61, bias=False)
        self.head.weight = self.words.weight
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for part in self.parts:
            x = part(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


Setting = tuple[str, int, int]  # precision, ranks, stage
COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class One:
    """A model with its three optimizers, on the ranks of `group`."""

    def __init__(self, setting: Setting, group: Any, seed: int, **recipe: Any) -> None:
        import onefold

        self.precision, self.size, stage = setting
        torch.manual_seed(seed)
        self.model = onefold.shard(Three(), onefold.Recipe.zero(stage, precision=self.precision, stall_timeout=30.0, **recipe), group=group)
        adamw, sgd, adagrad = ([p for p in part.parameters() if p.requires_grad] for part in self.model.parts)
        two = [{"params": adamw, "lr": 2e-3}, {"params": [self.model.words.weight], "weight_decay": 0.3, "betas": (0.8, 0.95)}]
        self.optimizers = [
            torch.optim.AdamW(two, lr=1e-3),
            torch.optim.SGD(sgd, lr=0.05, momentum=0.9),
            torch.optim.Adagrad(adagrad, lr=0.02),
        ]
        self.group = group

    def step(self, number: int) -> None:
        self.model(tokens_of(number)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def held(self) -> Iterator[tuple[str, tuple[int, ...], int, dict[str, Any]]]:
        """(name, shape, start, {what: this rank's interval of it, or a scalar}) of each parameter that this rank has elements of."""
        import onefold

        state = {p: values for optimizer in self.optimizers for p, values in optimizer.state.items()}
        with torch._C.DisableTorchFunctionSubclass():
            for entry in onefold.engine_of(self.model).entries:
                param, flat = entry.param, entry.flat
                if param.numel():
                    start = 0 if flat.passive else flat.local(entry)[0] - entry.slot.start
                    values = {"value": param.data, **state.get(param, {})}
                    flatten = {k: v.reshape(-1) if k != "step" and isinstance(v, Tensor) else v for k, v in values.items()}
                    yield entry.names[0], tuple(entry.slot.shape), start, flatten

    def others(self) -> dict[str, Any]:
        """What is no parameter: buffers, and the options of the groups."""
        buffers = {f"buffer {n}": [part.calls.tolist() for part in self.model.parts] for n in ("calls",)}
        groups = [[{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] for optimizer in self.optimizers]
        return {**buffers, "groups": groups}

    def whole(self) -> Whole:
        """Everything there is of it, put together from all ranks of the group by intervals. Collective there."""
        mine = [(*row, {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}) for *row, values in self.held()]
        said: list[Any] = [mine]
        if self.size > 1:
            said = [None] * self.size
            dist.all_gather_object(said, mine, group=self.group)
        out: Whole = {"": self.others()}
        for name, shape, start, values in (row for rank in said for row in rank):
            for key, value in values.items():
                if not isinstance(value, Tensor) or key == "step":
                    out.setdefault(name, {})[key] = value
                    continue
                whole = out.setdefault(name, {}).setdefault(key, torch.full((math.prod(shape),), torch.nan, dtype=value.dtype))
                whole[start : start + value.numel()] = value
        assert all(not t.isnan().any() for values in out.values() for t in values.values() if isinstance(t, Tensor)), "nobody holds a part"
        return out

    def differs_from(self, whole: Whole, cast: torch.dtype | None = None) -> list[str]:
        """What this rank holds otherwise than `whole` says, bit for bit.

        What is frozen has no master: it is held, and so stored, as it is computed in. `cast`: what all the rest is to be rounded to.
        """
        wrong = [] if self.others() == whole[""] else [f"buffers or groups: {self.others()} for {whole['']}"]
        for name, _, start, values in self.held():
            if values.keys() != whole[name].keys():
                wrong.append(f"{name} has {sorted(values)} for {sorted(whole[name])}")
                continue
            for key, value in values.items():
                expected = whole[name][key]
                if isinstance(value, Tensor) and key != "step":
                    asked = COMPUTED_IN[self.precision] if ".fixed." in name else cast or expected.dtype
                    expected = expected[start : start + value.numel()].to(asked)
                same = torch.equal(value, expected) and value.dtype == expected.dtype if isinstance(value, Tensor) else value == expected
                if not same:
                    wrong.append(f"{name} {key} at {start}")
        return wrong


def matrix(root: str, precisions: list[str], sizes: list[int], pairs: Callable[[Setting, Setting, int], bool]) -> tuple[int, list[str]]:
    """Save in every setting, load those of `pairs(from, into, number)` into every other. Returns how many loads, and what differed."""
    import onefold

    rank, wrong, loads = dist.get_rank(), [], 0
    groups = {n: dist.new_group(list(range(n))) if n < dist.get_world_size() else dist.group.WORLD for n in sizes}
    settings = list(itertools.product(precisions, sizes, STAGES))
    saved: dict[Setting, Whole] = {}
    for setting in settings:
        box: list[Any] = [None]
        if rank < setting[1]:
            one = One(setting, groups[setting[1]], seed=1)
            for number in range(2):
                one.step(100 * rank + number)
            onefold.save(f"{root}/{setting}", model=one.model, optimizer=one.optimizers, step=2)
            box = [one.whole()]
        dist.broadcast_object_list(box)  # also to ranks that had no part in it
        saved[setting] = box[0]
    for index, setting in enumerate(settings):
        if rank < setting[1]:
            one = One(setting, groups[setting[1]], seed=2)
            if setting[2] % 2:
                one.step(rank)  # states that must make way
            for number, source in enumerate(settings):
                if pairs(source, setting, index + number):
                    onefold.load(f"{root}/{source}", model=one.model, optimizer=one.optimizers, rng=False)
                    wrong += [f"{source} into {setting}: {d}" for d in one.differs_from(saved[source])]
                    loads += 1
        dist.barrier()  # those who had no part in it must not wait for the others in the next one
    return loads, wrong


def of_one_precision_or_a_few(source: Setting, target: Setting, number: int) -> bool:
    return source[0] == target[0] or number % 17 == 0


def a_seventh(source: Setting, target: Setting, number: int) -> bool:
    return number % 7 == 0


@pytest.mark.slow
def test_every_stage_and_number_of_ranks_loads_what_every_other_saved(tmp_path: Path) -> None:
    """fp32 and bf16; AdamW with two groups, SGD with momentum and Adagrad in each; ties and frozen parameters for each of them."""
    found = run_ranks(4, matrix, str(tmp_path), ["fp32", "bf16"], [1, 2, 3, 4], of_one_precision_or_a_few, timeout=400.0)
    assert [wrong for _, wrong in found] == [[]] * 4
    assert found[0][0] > 2 * 16 * 16


def test_masters_and_states_pass_through_every_precision_unchanged(tmp_path: Path) -> None:
    found = run_ranks(3, matrix, str(tmp_path), ["fp32", "bf16", "fp16"], [1, 3], a_seventh, timeout=240.0)
    assert [wrong for _, wrong in found] == [[]] * 3 and found[0][0] >= 24 * 24 // 7


def test_a_load_rounds_to_masters_of_sixteen_bits_where_those_are_asked_for_and_back_to_the_same(tmp_path: Path) -> None:
    import onefold

    one = One(("fp32", 1, 0), None, seed=1)
    for number in range(2):
        one.step(number)
    onefold.save(tmp_path / "fp32", model=one.model, optimizer=one.optimizers)
    for stage in (0, 3):
        narrow = One(("bf16", 1, stage), None, seed=2, master_dtype=torch.bfloat16)
        onefold.load(tmp_path / "fp32", model=narrow.model, optimizer=narrow.optimizers)
        assert narrow.differs_from(one.whole(), cast=torch.bfloat16) == []
        onefold.save(tmp_path / f"bf16-{stage}", model=narrow.model, optimizer=narrow.optimizers)
        wide = One(("fp32", 1, 3 - stage), None, seed=3)
        onefold.load(tmp_path / f"bf16-{stage}", model=wide.model, optimizer=wide.optimizers)
        assert wide.differs_from(narrow.whole(), cast=torch.float32) == []


# -- any optimizer -----------------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "Adam, the rate a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "SGD, no momentum": lambda params: torch.optim.SGD(params, lr=0.1),
}


def go_on_with(root: str) -> list[str]:
    """Which optimizers go on with other losses after a save and a load, at this number of ranks."""
    import onefold

    rank, wrong = dist.get_rank() if dist.is_initialized() else 0, []

    def start(kind: str, stage: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = onefold.shard(Odd(), onefold.Recipe.zero(stage, stall_timeout=30.0))
        return model, OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])

    for number, kind in enumerate(OPTIMIZERS):
        one = start(kind, number % 4, seed=1)
        train(*one, rank, 2)
        onefold.save(f"{root}/{number}", model=one[0], optimizer=one[1])
        other = start(kind, (number + 1) % 4, seed=2)
        onefold.load(f"{root}/{number}", model=other[0], optimizer=other[1])
        expected, found = train(*one, rank, 2, 2), train(*other, rank, 2, 2)
        if found != expected:
            wrong.append(f"{kind}: {found} for {expected}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_optimizer_of_torch_goes_on_as_if_nothing_had_been(ranks: int, tmp_path: Path) -> None:
    assert (go_on_with(str(tmp_path)) if ranks == 1 else run_ranks(2, go_on_with, str(tmp_path))) in ([], [[], []])


# -- going on, and what is read ----------------------------------------------------------------------------------------------------


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
