"""One rank of one side of a learning curve, started by `launch.run_ranks`."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist

import onefold
from benchmarks.convergence import settings as convergence
from benchmarks.convergence.worker import (
    DECAY,
    HELD_OUT_SHARE,
    LAST_LR,
    WARMUP,
    held_out_loss,
)
from benchmarks.launch import join as meet
from benchmarks.whole.newton_schulz import Spent
from onefold.data.order import DataOrder
from onefold.data.samples import load_data
from onefold.models.build import load_on_first_rank
from onefold.optim.muon import MuonWithAdamW
from onefold.processes.ranks import Ranks
from onefold.train.prepare import (
    hidden_matrices,
    lr_factor,
    names_without_decay,
    parameter_groups,
)

STAGE = 3


@dataclass(frozen=True)
class Case(convergence.Case):
    """`by_muon`: patterns of names of the hidden matrices that Muon steps, at the rate `muon_lr`; AdamW
    steps the rest, at `lr`.
    """

    muon_lr: float = 0.02
    by_muon: tuple[str, ...] = ("*",)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Case:
        tuples = {name: tuple(values[name]) for name in ("sides", "by_muon")}
        return cls(**{**values, **tuples})


def optimizer_of(groups: list[dict[str, Any]], case: Case, *, muon: bool) -> torch.optim.Optimizer:
    if not muon:
        return torch.optim.AdamW(groups, lr=case.lr, fused=True)
    options: dict[bool, dict[str, Any]] = {
        True: {"lr": case.muon_lr},
        False: {"fused": True},
    }
    return MuonWithAdamW([{**options[g["use_muon"]], **g} for g in groups], lr=case.lr)


def train(case: Case, side: str, ranks: Ranks, patience: float) -> dict[str, Any]:
    """Train one side of a case. Collective. One process computes what all ranks would: it adds up the
    same gradients in the same order. Nothing is clipped, since the norm's sum has another order.

    Args:
        patience: seconds that a rank waits for the others.
    """
    loaded = load_on_first_rank(case.model, case.tokenizer, case.seed, case.seq, ranks)
    assert loaded.tokenizer is not None
    data = load_data(case.data, loaded.tokenizer, case.seq, case.seed, HELD_OUT_SHARE)
    spent = Spent()
    spent.watch_torch(5)
    alone, model = ranks.world_size == 1, loaded.module
    skip = names_without_decay(model)
    chosen = frozenset(
        name for name in hidden_matrices(model) if any(fnmatch(name, p) for p in case.by_muon)
    )
    if not alone:
        recipe = onefold.Recipe.zero(STAGE, precision=case.precision, stall_timeout=patience)
        model = onefold.shard(model, recipe, device=ranks.device)
    muon = side != "adamw"
    groups = parameter_groups(model.named_parameters(), skip, DECAY, chosen if muon else None)
    optimizer = optimizer_of(groups, case, muon=muon)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lr_factor("cosine", case.steps, round(WARMUP * case.steps), LAST_LR)
    )
    order = DataOrder(len(data.train), case.micro_batch * case.ranks, case.seed)
    mine = range(case.ranks) if alone else [ranks.rank]

    def micro_batches(step: int) -> Iterator[Mapping[str, Any]]:
        for rank in mine:
            (indices,) = order.micro_batches(step, rank, case.ranks, case.micro_batch)
            yield data.train.batch(indices)

    held_out: list[list[float]] = [[0, held_out_loss(model, data, case, ranks)]]
    losses, seconds = [], []
    for step in range(case.steps):
        begun, total = time.perf_counter(), 0.0
        spent.step()
        for batch in micro_batches(step):
            loss = model(**batch, use_cache=False).loss / len(mine)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(ranks.sum(total)[0] / ranks.world_size)
        seconds.append(time.perf_counter() - begun)
        if (step + 1) % case.every == 0 or step + 1 == case.steps:
            held_out.append([step + 1, held_out_loss(model, data, case, ranks)])
    return {
        "rank": ranks.rank,
        "losses": losses,
        "held_out": held_out,
        "step_s": seconds,
        "newton_schulz_s": spent.seconds,
        "newton_schulz_calls": spent.calls,
    }


def join(job: dict[str, Any]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    meet(job, timeout=datetime.timedelta(seconds=job["timeout"]))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train the job's side on this rank."""
    case, rank, world, patience = Case.of(job["case"]), job["rank"], job["ranks"], job["timeout"]
    control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=patience))
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"), "gloo", control)
    return train(case, job["side"], ranks, float(patience))
