"""Saved at any stage on any number of ranks in any precision, loaded at any other: bit-equal
states. The reference is put together from the ranks' own tensors by names and intervals, without
any of the checkpoint's code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from zoo import OddPart, tokens_of

STAGES = (0, 1, 2, 3)
Whole = dict[str, dict[str, Any]]


class Three(nn.Module):
    """tokens (batch, length) -> a loss. A part for each kind of optimizer, so that a checkpoint of
    it tries all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(61, 5), nn.Linear(5, 61, bias=False)
        self.head.weight = self.words.weight
        self.parts = nn.ModuleList(OddPart() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for part in self.parts:
            x = part(x)
        return nn.functional.cross_entropy(
            self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


Setting = tuple[str, int, int]  # precision, ranks, stage
COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class One:
    """A model with its three optimizers, on the ranks of `group`."""

    def __init__(self, setting: Setting, group: Any, seed: int, **recipe: Any) -> None:
        import onefold

        self.precision, self.size, stage = setting
        torch.manual_seed(seed)
        self.model = onefold.shard(
            Three(),
            onefold.Recipe.zero(stage, precision=self.precision, stall_timeout=30.0, **recipe),
            group=group,
        )
        adamw, sgd, adagrad = (
            [p for p in part.parameters() if p.requires_grad] for part in self.model.parts
        )
        two = [
            {"params": adamw, "lr": 2e-3},
            {"params": [self.model.words.weight], "weight_decay": 0.3, "betas": (0.8, 0.95)},
        ]
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
        """(name, shape, start, {what: this rank's interval of it, or a scalar}) of each parameter
        that this rank has elements of.
        """
        import onefold

        state = {
            p: values for optimizer in self.optimizers for p, values in optimizer.state.items()
        }
        with torch._C.DisableTorchFunctionSubclass():
            for entry in onefold.engine_of(self.model).entries:
                param, flat = entry.param, entry.flat
                if param.numel():
                    start = 0 if flat.unsharded else flat.local(entry)[0] - entry.slot.start
                    values = {"value": param.data, **state.get(param, {})}
                    flatten = {
                        k: v.reshape(-1) if k != "step" and isinstance(v, Tensor) else v
                        for k, v in values.items()
                    }
                    yield entry.names[0], tuple(entry.slot.shape), start, flatten

    def others(self) -> dict[str, Any]:
        """What is no parameter: buffers, and the options of the groups."""
        buffers = {
            f"buffer {n}": [part.calls.tolist() for part in self.model.parts] for n in ("calls",)
        }
        groups = [
            [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        return {**buffers, "groups": groups}

    def whole(self) -> Whole:
        """Everything there is of it, put together from all ranks of the group by intervals.
        Collective there.
        """
        mine = [
            (*row, {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()})
            for *row, values in self.held()
        ]
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
                whole = out.setdefault(name, {}).setdefault(
                    key, torch.full((math.prod(shape),), torch.nan, dtype=value.dtype)
                )
                whole[start : start + value.numel()] = value
        assert all(
            not t.isnan().any()
            for values in out.values()
            for t in values.values()
            if isinstance(t, Tensor)
        ), "nobody holds a part"
        return out

    def differs_from(self, whole: Whole, cast: torch.dtype | None = None) -> list[str]:
        """What this rank holds otherwise than `whole` says, bit for bit.

        What is frozen has no master: it is held, and so stored, as it is computed in. `cast`: what
        all the rest is to be rounded to.
        """
        wrong = (
            []
            if self.others() == whole[""]
            else [f"buffers or groups: {self.others()} for {whole['']}"]
        )
        for name, _, start, values in self.held():
            if values.keys() != whole[name].keys():
                wrong.append(f"{name} has {sorted(values)} for {sorted(whole[name])}")
                continue
            for key, value in values.items():
                expected = whole[name][key]
                if isinstance(value, Tensor) and key != "step":
                    asked = (
                        COMPUTED_IN[self.precision] if ".fixed." in name else cast or expected.dtype
                    )
                    expected = expected[start : start + value.numel()].to(asked)
                same = (
                    torch.equal(value, expected) and value.dtype == expected.dtype
                    if isinstance(value, Tensor)
                    else value == expected
                )
                if not same:
                    wrong.append(f"{name} {key} at {start}")
        return wrong


def settings_of(precisions: list[str], sizes: list[int]) -> list[Setting]:
    return list(itertools.product(precisions, sizes, STAGES))


def matrix(
    root: str,
    precisions: list[str],
    sizes: list[int],
    pairs: set[tuple[Setting, Setting]],
) -> tuple[int, list[str]]:
    """Save in every setting, load (from, into) those of `pairs`. Returns how many loads, and what
    differed.
    """
    import onefold

    rank, wrong, loads = dist.get_rank(), [], 0
    groups = {
        n: dist.new_group(list(range(n))) if n < dist.get_world_size() else dist.group.WORLD
        for n in sizes
    }
    settings = [s for s in settings_of(precisions, sizes) if any(s in pair for pair in pairs)]
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
    for setting in settings:
        if rank < setting[1]:
            one = One(setting, groups[setting[1]], seed=2)
            if setting[2] % 2:
                one.step(rank)  # states that must make way
            for source in settings:
                if (source, setting) in pairs:
                    onefold.load(
                        f"{root}/{source}", model=one.model, optimizer=one.optimizers, rng=False
                    )
                    wrong += [
                        f"{source} into {setting}: {d}" for d in one.differs_from(saved[source])
                    ]
                    loads += 1
        dist.barrier()  # those who had no part in it must not wait for the others in the next one
    return loads, wrong


@pytest.mark.slow
def test_every_stage_and_number_of_ranks_loads_what_every_other_saved(
    tmp_path: Path, sample: Any
) -> None:
    """fp32 and bf16; AdamW with two groups, SGD with momentum and Adagrad in each; ties and frozen
    parameters for each of them. How a checkpoint is cut has to do with stages and ranks alone: each
    pair of those once, and a fifth of the other precisions beside them.
    """
    precisions, sizes = ["fp32", "bf16"], [1, 2, 3, 4]
    every = list(itertools.product(settings_of(precisions, sizes), repeat=2))
    narrow = [pair for pair in every if {"fp32"} == {p for p, *_ in pair}]
    pairs = {*sample(narrow, 11), *sample([p for p in every if p not in narrow][::5], 31)}
    found = run_ranks(4, matrix, str(tmp_path), precisions, sizes, pairs, timeout=400.0)
    assert [wrong for _, wrong in found] == [[]] * 4
    assert found[0][0] == len(pairs) > 24


def test_masters_and_states_pass_through_every_precision_unchanged(
    tmp_path: Path, sample: Any
) -> None:
    precisions, sizes = ["fp32", "bf16", "fp16"], [1, 3]
    every = itertools.product(settings_of(precisions, sizes), repeat=2)
    pairs = {*sample(list(every)[::7], 5)}
    found = run_ranks(3, matrix, str(tmp_path), precisions, sizes, pairs, timeout=240.0)
    assert [wrong for _, wrong in found] == [[]] * 3 and found[0][0] == len(pairs) > 12


def test_a_load_rounds_to_masters_of_sixteen_bits_where_they_are_asked_for(
    tmp_path: Path,
) -> None:
    import onefold

    one = One(("fp32", 1, 0), None, seed=1)
    for number in range(2):
        one.step(number)
    onefold.save(tmp_path / "fp32", model=one.model, optimizer=one.optimizers)
    for stage in (0, 3):
        narrow = One(("bf16", 1, stage), None, seed=2, master_dtype="bf16")
        onefold.load(tmp_path / "fp32", model=narrow.model, optimizer=narrow.optimizers)
        assert narrow.differs_from(one.whole(), cast=torch.bfloat16) == []
        onefold.save(tmp_path / f"bf16-{stage}", model=narrow.model, optimizer=narrow.optimizers)
        wide = One(("fp32", 1, 3 - stage), None, seed=3)
        onefold.load(tmp_path / f"bf16-{stage}", model=wide.model, optimizer=wide.optimizers)
        assert wide.differs_from(narrow.whole(), cast=torch.float32) == []
