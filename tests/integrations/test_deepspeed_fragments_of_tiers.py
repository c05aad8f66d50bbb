"""`safe_get_*` and `safe_set_*`: gradients, master weights and optimizer states, full and local, at
every stage and on every tier, against one process that trains on the data of both ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onefold.integrations.deepspeed.names import access
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks

STATES = ("exp_avg", "exp_avg_sq")
TIERS = [
    (0, None),
    (1, None),
    (1, "cpu"),
    (2, None),
    (2, "cpu"),
    (3, None),
    (3, "cpu"),
    (3, "nvme"),
]


class Net(nn.Module):
    """Parameters of odd sizes, of which ranks hold all, a part or nothing, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 1), nn.Linear(1, 7), nn.Linear(7, 3)])
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def config(stage: int, tier: str | None, folder: str, precision: str | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if tier:
        zero["offload_optimizer"] = {"device": tier, "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 4},
        "bf16": {"enabled": precision == "bf16"},
    }


def batch(rank: int) -> torch.Tensor:
    return torch.arange(12.0).view(2, 6) / 7 - rank


def joined(local: torch.Tensor) -> torch.Tensor:
    """The elements of both ranks, in order. Collective, and not by the functions under test."""
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, local.tolist())
    return torch.tensor(parts[0] + parts[1])


def whole(kind: str, param: Any, *key: str) -> torch.Tensor:
    """The full value, after a check that the ranks' local values are its elements in order."""
    full = getattr(access, f"safe_get_full_{kind}")(param, *key)
    local = getattr(access, f"safe_get_local_{kind}")(param, *key)
    assert full.dtype == torch.float32 and full.shape == param.shape
    if param.onefold.sharded:
        assert torch.equal(joined(local), full.flatten())
    else:
        assert torch.equal(local, full.flatten())
    return full.clone()


def read_and_write(stage: int, tier: str | None, folder: str, precision: str | None) -> None:
    model, plain = Net(), Net()
    engine, *_ = initialize(model=model, config=config(stage, tier, folder, precision))
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    near: dict[str, Any] = (
        {"rtol": 1e-5, "atol": 1e-7} if precision is None else {"rtol": 0.1, "atol": 0.05}
    )
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    trained = [(mine, theirs) for mine, theirs in pairs if theirs.requires_grad]

    def alike(kind: str, *key: str) -> None:
        for mine, theirs in trained:
            value = {
                "grad": lambda p: engine.cur_scale * p.grad,
                "fp32_param": lambda p: p.detach(),
                "optimizer_state": lambda p: adam.state[p][key[0]],
            }[kind](theirs)
            torch.testing.assert_close(whole(kind, mine, *key), value, **near)

    def pass_and_plain_pass() -> None:
        engine.backward(engine(batch(dist.get_rank())))
        adam.zero_grad()
        for rank in range(2):
            (plain(batch(rank)) / 2).backward()

    for mine, theirs in pairs:
        assert access.safe_get_full_grad(mine) is access.safe_get_local_grad(mine) is None
        for key in STATES:
            assert access.safe_get_full_optimizer_state(mine, key) is None
            assert access.safe_get_local_optimizer_state(mine, key) is None
        if not theirs.requires_grad:
            assert access.safe_get_full_fp32_param(mine) is None
            assert access.safe_get_local_fp32_param(mine) is None
    alike("fp32_param")
    for _ in range(2):
        pass_and_plain_pass()
        alike("grad")
        engine.step()
        adam.step()
        alike("fp32_param")
        for key in STATES:
            alike("optimizer_state", key)

    # What is written is read again, and is what the next step computes with
    pass_and_plain_pass()
    generator = torch.Generator().manual_seed(1)
    for mine, theirs in trained:
        new = torch.rand(theirs.shape, generator=generator)
        held = new.bfloat16().float() if precision else new
        access.safe_set_full_grad(mine, new.bfloat16() if precision else new)
        assert torch.equal(whole("grad", mine), held)
        access.safe_set_local_grad(mine, access.safe_get_local_grad(mine) * 2)
        assert torch.equal(whole("grad", mine), 2 * held)
        theirs.grad = 2 * held / engine.cur_scale
        access.safe_set_full_fp32_param(mine, new + 1)
        assert torch.equal(whole("fp32_param", mine), new + 1)
        part = access.safe_get_local_fp32_param(mine)
        assert stage < 3 or mine.ds_tensor.shape == part.shape
        access.safe_set_local_fp32_param(mine, part * 2)
        assert torch.equal(whole("fp32_param", mine), 2 * (new + 1))
        theirs.data = 2 * (new + 1)
        for at, key in enumerate(STATES):
            access.safe_set_full_optimizer_state(mine, new + at, key)
            assert torch.equal(whole("optimizer_state", mine, key), new + at)
            state = access.safe_get_local_optimizer_state(mine, key)
            access.safe_set_local_optimizer_state(mine, state * 2, key)
            assert torch.equal(whole("optimizer_state", mine, key), 2 * (new + at))
            adam.state[theirs][key] = 2 * (new + at)
        with pytest.raises(ValueError, match=r"expected the \d+ that this rank has"):
            access.safe_set_local_fp32_param(mine, torch.zeros(1000))
    engine.step()
    adam.step()
    alike("fp32_param")
    # A rank may ask for its own elements alone
    if dist.get_rank() == 0:
        for mine, _ in trained:
            access.safe_get_local_fp32_param(mine)
            access.safe_get_local_optimizer_state(mine, "exp_avg")
    pass_and_plain_pass()
    engine.step()


def of_all_tiers(folder: str, precision: str | None) -> None:
    for stage, tier in TIERS:
        try:
            read_and_write(stage, tier, folder, precision)
        except Exception as error:
            error.add_note(f"at stage {stage}, states on {tier or 'the device'}, {precision}")
            raise


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_fragments_are_those_of_one_process_at_every_stage_and_tier(
    tmp_path: Path, precision: str | None
) -> None:
    run_ranks(2, of_all_tiers, str(tmp_path), precision)


def vectorized(folder: str) -> list[Any]:
    out = []
    for stage, tier in TIERS:
        engine, *_ = initialize(model=Net(), config=config(stage, tier, folder, None))
        engine.backward(engine(batch(dist.get_rank())))
        params = list(engine.module.parameters())
        before = [access.safe_get_full_grad(p) for p in params]
        access.safe_update_full_grad_vectorized(params, lambda grad, param: grad * 3)
        after = [access.safe_get_full_grad(p) for p in params]
        for was, now in zip(before, after, strict=True):
            assert (was is None) is (now is None)
            assert was is None or torch.equal(3 * was, now)
        out.append(sum(was is not None for was in before))
    return out


def test_gradients_are_updated_by_a_function_at_every_stage_and_tier(tmp_path: Path) -> None:
    assert run_ranks(2, vectorized, str(tmp_path)) == [[4] * len(TIERS)] * 2
