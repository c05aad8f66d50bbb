"""`safe_get_*` and `safe_set_*`: gradients, master weights and optimizer states of one parameter, on
two ranks beside plain PyTorch, wherever they are stored.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.integrations.deepspeed.names import access
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks

KEYS = ("exp_avg", "exp_avg_sq")


def build() -> nn.Sequential:
    """A frozen layer between two that are trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model[1].requires_grad_(False)
    return model


def engine_of(stage: int, device: str, folder: str) -> Any:
    zero: dict[str, Any] = {"stage": stage}
    if device != "none":
        zero["offload_optimizer"] = {"device": device}
    if device == "nvme":
        zero["offload_optimizer"]["nvme_path"] = folder
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
    }
    return initialize(model=build(), config=config)[0]


def batch(rank: int, step: int) -> Tensor:
    return torch.arange(12.0).view(2, 6) / 10 + rank + step / 3


class Plain:
    """The same training in one process on both ranks' samples."""

    def __init__(self) -> None:
        self.model = build()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.01)

    def backward(self, step: int) -> None:
        both = torch.cat([batch(0, step), batch(1, step)])
        self.model(both).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def same(mine: Tensor | None, theirs: Tensor) -> None:
    assert mine is not None and mine.shape == theirs.shape and mine.dtype == torch.float32
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def locals_are_parts(param: nn.Parameter, keys: tuple[str, ...], grad: bool) -> None:
    """The local elements of both ranks, in rank order, are the whole."""
    pairs = [(access.safe_get_full_optimizer_state(param, k), access.safe_get_local_optimizer_state(param, k)) for k in keys]  # fmt: skip
    pairs.append((access.safe_get_full_fp32_param(param), access.safe_get_local_fp32_param(param)))
    if grad:
        pairs.append((access.safe_get_full_grad(param), access.safe_get_local_grad(param)))
    for whole, local in pairs:
        assert whole is not None
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, [] if local is None else local.tolist())
        assert local is None or local.dim() == 1
        assert parts[0] + parts[1] == whole.flatten().tolist()


def read_beside_plain(stage: int, device: str, folder: str) -> None:
    engine, plain, rank = engine_of(stage, device, folder), Plain(), dist.get_rank()
    pairs = list(zip(engine.module.parameters(), plain.model.parameters(), strict=True))
    for param, _ in pairs:
        assert access.safe_get_full_grad(param) is None
        assert access.safe_get_local_grad(param) is None
        for key in KEYS:
            assert access.safe_get_full_optimizer_state(param, key) is None
            assert access.safe_get_local_optimizer_state(param, key) is None
    for step in range(2):
        engine.backward(engine(batch(rank, step)).square().mean())
        plain.backward(step)
        for param, theirs in pairs:
            if theirs.requires_grad:
                assert theirs.grad is not None
                same(access.safe_get_full_grad(param), theirs.grad)
            else:
                assert access.safe_get_full_grad(param) is None
                assert access.safe_get_full_fp32_param(param) is None
                assert access.safe_get_local_fp32_param(param) is None
            if stage and theirs.requires_grad:
                locals_are_parts(param, (), grad=True)
        engine.step()
        plain.step()
        for param, theirs in pairs:
            if theirs.requires_grad:
                same(access.safe_get_full_fp32_param(param), theirs.detach())
                for key in KEYS:
                    same(
                        access.safe_get_full_optimizer_state(param, key),
                        plain.optimizer.state[theirs][key],
                    )
                if stage:
                    locals_are_parts(param, KEYS, grad=False)
            else:
                assert access.safe_get_full_optimizer_state(param, KEYS[0]) is None


def written_beside_plain(stage: int, device: str, folder: str, local: bool) -> list[float]:
    """Gradients before a step, and weights and states after it, are replaced; later steps agree."""
    engine, plain, rank = engine_of(stage, device, folder), Plain(), dist.get_rank()
    pairs = [
        (p, q)
        for p, q in zip(engine.module.parameters(), plain.model.parameters(), strict=True)
        if q.requires_grad
    ]

    def random(like: Tensor) -> Tensor:
        torch.manual_seed(like.numel() + int(like.sum() * 100))
        return torch.rand(like.shape)

    def write(call: str, param: Any, value: Tensor, *key: str) -> None:
        if not local:
            getattr(access, f"safe_set_full_{call}")(param, value, *key)
            return
        now = getattr(access, f"safe_get_local_{call}")(param, *key)
        if now is None or not now.numel():
            return
        start = param.onefold.interval[0] if stage else 0
        mine = value.flatten()[start : start + now.numel()]
        getattr(access, f"safe_set_local_{call}")(param, mine, *key)

    losses = []
    for step in range(3):
        loss = engine(batch(rank, step)).square().mean()
        engine.backward(loss)
        losses.append(loss.item())
        plain.backward(step)
        for param, theirs in pairs:
            assert theirs.grad is not None
            theirs.grad.copy_(random(theirs.grad))
            write("grad", param, theirs.grad)
            same(access.safe_get_full_grad(param), theirs.grad)
        engine.step()
        plain.step()
        for param, theirs in pairs:
            with torch.no_grad():
                theirs.copy_(random(theirs))
            write("fp32_param", param, theirs.detach())
            same(access.safe_get_full_fp32_param(param), theirs.detach())
            for key in KEYS:
                state = plain.optimizer.state[theirs][key]
                state.copy_(random(state))
                write("optimizer_state", param, state, key)
                same(access.safe_get_full_optimizer_state(param, key), state)
    assert plain.model(batch(rank, 2)).square().mean().item() != losses[-1]
    return losses


WHERE = [(0, "none"), (1, "none"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "nvme")]


@pytest.mark.parametrize(("stage", "device"), WHERE)
def test_what_is_read_is_plain_pytorchs_and_none_before_there_is_something(
    stage: int, device: str, tmp_path: Any
) -> None:
    run_ranks(2, read_beside_plain, stage, device, str(tmp_path))


@pytest.mark.parametrize(
    ("stage", "device", "local"),
    [(*where, local) for where in WHERE for local in (False, True) if where[0] or not local],
)
def test_what_is_written_is_read_again_and_trained_with(
    stage: int, device: str, local: bool, tmp_path: Any
) -> None:
    seen = run_ranks(2, written_beside_plain, stage, device, str(tmp_path), local)
    # The weights of step 1 and later are those that were written: the same at every stage
    losses = [sum(pair) / 2 for pair in zip(*seen, strict=True)]
    plain = Plain()
    expected = plain.model(torch.cat([batch(0, 0), batch(1, 0)])).square().mean().item()
    assert losses[0] == pytest.approx(expected, rel=1e-6) and losses[1] != losses[0]


def test_a_value_of_another_size_is_refused() -> None:
    engine = engine_of(0, "none", "")
    weight = next(engine.module.parameters())
    with pytest.raises(ValueError, match=r"given shape \(3,\), expected \(5, 6\)"):
        access.safe_set_full_fp32_param(weight, torch.ones(3))
    with pytest.raises(ValueError, match="given 3 elements, expected the 30 that this rank has"):
        access.safe_set_local_fp32_param(weight, torch.ones(3))
    with pytest.raises(ValueError, match="there is no state 'exp_avg' of this parameter"):
        access.safe_set_full_optimizer_state(weight, torch.ones(5, 6), "exp_avg")
