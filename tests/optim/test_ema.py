"""Averages of weights: `onefold.ema` is torch's AveragedModel under DDP, in 1/N of its memory; and
AveragedModel itself beside shard().
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onefold
import onefold.runtime.parts as parts
from moments_runs import Net, unlike
from ranks import outcomes_of, run_ranks
from zoo import features_of

DECAY = 0.7


class Normed(Net):
    """With a buffer that moves, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return super().forward(x) * (1 + 0.01 * self.seen)


def built(seed: int = 0) -> Normed:
    torch.manual_seed(seed)
    return Normed()


def steps(model: nn.Module, update: Any, first: int = 0, count: int = 3) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(first, first + count):
        (
            model(features_of(10 * step, 8, 19)) - features_of(5 + step, 8, 300)
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update()


def evaluated(model: nn.Module) -> float:
    training = model.training
    with torch.no_grad():
        loss = model.eval()(features_of(99, 8, 19)).square().mean().item()
    model.train(training)
    return loss


def averages(folder: str) -> list[str]:
    """All stages, tiers and dtypes: the state dict, what is computed inside, what is left behind;
    from DDP's dict and into it.
    """
    parts.CHUNK = 5120  # elements: a weight takes several
    wrong: list[str] = []
    decays: tuple[float | None, ...] = (DECAY, None)
    theirs: dict[float | None, Any] = {}
    for decay in decays:
        plain = DistributedDataParallel(built())
        average = AveragedModel(
            plain.module, multi_avg_fn=get_ema_multi_avg_fn(decay) if decay is not None else None
        )
        steps(plain, lambda average=average, plain=plain: average.update_parameters(plain.module))
        theirs[decay] = copy.deepcopy(average.state_dict()), evaluated(average), average
    kinds: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}
    kinds |= {
        "on the host": {"stage": 3, "offload_optimizer": "cpu"},
        "on NVMe": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme", "nvme": folder},
        "tiles": {"stage": 3, "tile": 8000}, "bf16 compute": {"stage": 3, "precision": "bf16"},
        "bf16 masters": {"stage": 1, "precision": "bf16", "master_dtype": "bf16"},
    }  # fmt: skip
    if dist.get_world_size() == 4:
        kinds = {
            "HSDP": {"stage": 3, "shard_group": 2},
            "hybrid": {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
        }
    first: dict[float | None, Any] = {}
    for name, recipe in kinds.items():
        for decay in decays if name in ("stage 0", "stage 3") else (DECAY,):
            model: Any = onefold.shard(built(), onefold.Recipe.zero(stall_timeout=20.0, **recipe))
            engine = onefold.engine_of(model)
            ema = onefold.ema.EMA(model, decay)
            held = engine.memory.now().get("averages", 0) + engine.transfers.host.now().get(
                "averages", 0
            )
            numel = sum(
                flat.layout.shard_numel
                for unit in engine.units
                for flat in unit.flats
                if flat.dtypes.master.is_floating_point
            )
            share = 4 * numel  # at most: a frozen layer has no average
            wrong += [f"{name}: {held} bytes for {share}"] * (
                "NVMe" not in name and dist.get_world_size() > 1 and not 0 < held <= share
            )
            steps(model, ema.update)
            weights, state = onefold.full_state_dict(model), ema.state_dict()
            rounded = "bf16" in name
            with ema.applied() as applied:
                loss, inside, whole = (
                    evaluated(applied),
                    ema.state_dict(),
                    onefold.full_state_dict(model),
                )
            want, wants_loss, average = theirs[decay]
            if abs(loss - wants_loss) > (3e-2 if rounded else 1e-4) * abs(wants_loss):
                wrong.append(f"{name}: evaluated to {loss}, AveragedModel to {wants_loss}")
            after = onefold.full_state_dict(model)
            wrong += [f"{name}, afterwards: {line}" for line in unlike(after, weights)]
            if dist.get_rank() == 0:
                # Frozen: in bf16
                both = [
                    {k: v for k, v in s.items() if not rounded or "blocks.1" not in k}
                    for s in (state, want)
                ]
                wrong += [
                    f"{name}: {line}" for line in unlike(*both, tolerance=3e-2 if rounded else 1e-5)
                ]
                wrong += [f"{name}, inside: {line}" for line in unlike(inside, state)]
                if not rounded:
                    named = {
                        key.removeprefix("module."): value
                        for key, value in state.items()
                        if key != "n_averaged"
                    }
                    wrong += [
                        f"{name}, full_state_dict inside: {line}" for line in unlike(whole, named)
                    ]
                if not rounded and "tiles" not in name:  # stages and tiers: the same bits
                    wrong += [
                        f"{name} for the first: {line}"
                        for line in unlike(state, first.setdefault(decay, state))
                    ]
                average.load_state_dict(state)
            elif state or inside:
                wrong.append(f"{name}: rank {dist.get_rank()} has {list(state)[:3]}")
            steps(model, ema.update, 3, 1)
            went_on = ema.state_dict()
            other = onefold.shard(built(1), onefold.Recipe.zero(stall_timeout=20.0, **recipe))
            again = onefold.ema.EMA(other, decay)
            onefold.load_full_state_dict(other, weights)
            again.load_state_dict(state if dist.get_rank() == 0 else None)
            wrong += [f"{name}: {again.updates} updates"] * (again.updates != 3)
            back = again.state_dict()
            wrong += [f"{name}, loaded: {line}" for line in unlike(back, state)]
            steps(other, again.update, 3, 1)
            wrong += [f"{name}, went on: {line}" for line in unlike(again.state_dict(), went_on)]
            again.load_state_dict(want)  # AveragedModel's
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_average_is_averaged_models_at_every_stage_on_every_tier(
    ranks: int, tmp_path: Path
) -> None:
    assert run_ranks(ranks, averages, str(tmp_path), timeout=240) == [[]] * ranks


def refusals() -> list[str]:
    said: list[str] = []

    def refusal(call: Any) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        else:
            said.append("nothing was said")

    model: Any = onefold.shard(built(), onefold.Recipe.zero(2, stall_timeout=20.0)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = onefold.ema.EMA(model, DECAY)
    steps(model, ema.update)
    before = onefold.full_state_dict(model)
    with ema.applied():
        model(features_of(0, 8, 19)).sum().backward()
        refusal(optimizer.step)
        refusal(optimizer.step)
        refusal(ema.update)
        refusal(ema.applied().__enter__)
        optimizer.zero_grad()
    said.append(str(unlike(onefold.full_state_dict(model), before)))
    refusal(lambda: onefold.ema.EMA(model, 1.5))
    refusal(lambda: onefold.ema.EMA(nn.Linear(2, 2)))
    refusal(lambda: ema.load_state_dict(before))
    refusal(
        lambda: ema.load_state_dict(
            {"n_averaged": torch.tensor(1), "module.enter.weight": torch.ones(2)}
        )
    )
    refusal(lambda: AveragedModel(model))
    return said


def test_what_an_average_cannot_do_is_said() -> None:
    expected = [
        "inside ema.applied(), where they are the averages", "inside ema.applied(), where they are the averages",
        "EMA.update() was called inside ema.applied()", "EMA.applied() was entered inside itself", "[]", "decay=1.5: expected a number",
        "was not sharded", "rank 0 was given no state of an average", "has shape (2,), expected (70, 19)", "onefold.ema.EMA(model, decay)",
    ]  # fmt: skip
    for said in run_ranks(2, refusals):
        assert len(said) == len(expected), said
        for text, part in zip(said, expected, strict=True):
            assert part in text, (text, part)


def averaged_on_rank_0_alone() -> None:
    model = onefold.shard(built(), onefold.Recipe.zero(3, stall_timeout=2.0))
    ema = onefold.ema.EMA(model)
    if dist.get_rank() == 0:
        ema.state_dict()
    steps(model, ema.update)


def test_a_state_of_an_average_on_rank_0_alone_is_an_error_that_names_the_call() -> None:
    for outcome in outcomes_of(2, averaged_on_rank_0_alone, timeout=60):
        assert outcome.error == "StallError" and "EMA.state_dict()" in outcome.message, outcome


def torchs_own_average(stage: int) -> list[str]:
    """`AveragedModel` made before shard() is a whole copy; updated from the sharded model it is
    what it is under DDP.
    """
    plain = DistributedDataParallel(built())
    theirs = AveragedModel(plain.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    steps(plain, lambda: theirs.update_parameters(plain.module))
    model: Any = built()
    ours = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0))
    steps(model, lambda: ours.update_parameters(model))
    return unlike(ours.state_dict(), theirs.state_dict(), tolerance=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_averaged_model_made_before_shard_averages_whole_weights(stage: int) -> None:
    assert run_ranks(2, torchs_own_average, stage) == [[], []]
