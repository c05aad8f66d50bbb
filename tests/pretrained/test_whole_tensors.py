"""Whole tensors in buckets (`onefold.stream_params`): the same on every rank, of every recipe, and
never more bytes than were asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from ranks import RankFailure, run_ranks

WIDTH = 8


class WithBuffers(nn.Module):
    """A tied weight, a norm's statistics, a frozen matrix, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.inner(x + self.frozen(x))
        return self.head(x).float().square().mean() + self.norm(x).float().square().mean()


RECIPES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1 in bf16": {"stage": 1, "precision": "bf16"},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3 in bf16": {"stage": 3, "precision": "bf16"},
    "in groups": {"stage": 3, "shard_group": 1},
    "on the host": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "tiles": {"stage": 3, "tile": 512},
    "encoded": {"stage": 3, "frozen": "int8"},
}


def streamed(names: list[str]) -> list[str]:
    """What is wrong with any recipe at any bucket size."""
    wrong = []
    for name in names:
        torch.manual_seed(0)
        model = onefold.shard(
            WithBuffers(), onefold.Recipe.zero(**RECIPES[name]), units=(nn.Linear,)
        )
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            model(torch.arange(12)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with onefold.full_params(model):
            expected = {n: t.detach().clone() for n, t in model.state_dict().items()}
        compute = "bf16" in name
        for bucket in (600, 2_000, "1MB"):
            for dtype in ("compute", "master", torch.float64):
                seen = dict(onefold.stream_params(model, bucket, dtype))
                if list(seen) != list(dict.fromkeys(seen)) or set(expected) - set(seen) != {
                    "head.weight"
                }:
                    wrong.append(f"{name}, {bucket}: names {sorted(seen)}")
                for n, t in seen.items():
                    want = expected[n]
                    if not n.startswith("norm."):
                        if dtype == "compute" and compute:
                            want = want.bfloat16()
                        elif isinstance(dtype, torch.dtype):
                            want = want.to(dtype)
                        elif n.startswith("frozen"):  # what rests in the compute dtype is that
                            want = want.to(t.dtype)
                    if type(t) is not Tensor or t.dtype != want.dtype or not torch.equal(t, want):
                        wrong.append(f"{name}, {bucket}, {dtype}: {n} {t.dtype} {tuple(t.shape)}")
        # Copies: training goes on beside them
        name_of, kept = next(iter(onefold.stream_params(model, 600, "master")))
        before = kept.clone()
        model(torch.arange(12)).backward()
        optimizer.step()
        if not torch.equal(kept, before):
            wrong.append(f"{name}: a step changed what was given out of {name_of}")
    return wrong


def test_whole_tensors_of_every_recipe_and_bucket() -> None:
    assert run_ranks(2, streamed, list(RECIPES)) == [[], []]


def test_ranks_in_groups_and_one_rank() -> None:
    assert run_ranks(1, streamed, ["stage 0", "stage 3", "stage 3 in bf16"]) == [[]]
    RECIPES["in groups"]["shard_group"] = 2
    assert run_ranks(4, in_groups) == [[]] * 4


def in_groups() -> list[str]:
    RECIPES["two groups"] = {"stage": 3, "shard_group": 2}
    RECIPES["optimizer over all"] = {"stage": 3, "shard_group": 2, "optimizer_over": "all"}
    RECIPES["second copies"] = {"stage": 3, "group": 2, "second_copy": True}
    return streamed(["two groups", "optimizer over all", "second copies"])


def refusals() -> list[str]:
    import torch.distributed as dist

    torch.manual_seed(0)
    model = onefold.shard(WithBuffers(), onefold.Recipe.zero(3), units=(nn.Linear,))
    said = []
    for arguments in (("no size",), (0,), ("1MB", torch.int32), (1000 + dist.get_rank(),)):
        try:
            list(onefold.stream_params(model, *arguments))
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    stream = onefold.stream_params(model, 600)
    next(stream)
    model(torch.arange(12)).backward()
    optimizer.step()
    try:
        list(stream)
        said.append("nothing")
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    words = ("bucket='no size'", "bucket=0", "torch.int32", "give all ranks the same", "trained")
    for said in run_ranks(2, refusals):
        assert all(word in text for word, text in zip(words, said, strict=True)), said


def only_one_calls() -> None:
    import torch.distributed as dist

    model = onefold.shard(nn.Linear(4, 4), onefold.Recipe.zero(3, stall_timeout=2))
    if dist.get_rank() == 0:
        list(onefold.stream_params(model))


def test_a_rank_that_does_not_come_is_told() -> None:
    with pytest.raises(RankFailure, match=r"stream_params\(\) is a collective on this model"):
        run_ranks(2, only_one_calls)
