"""Stage 3 under torch.autocast over fp32 parameters: the bits of DDP, and no copy of the weights in
16 bits between the passes.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import onefold
from onefold.runtime.saved_tensors import cached_casts
from ranks import run_ranks
from trials import Case, GPTCase, MLPCase, assert_trains_as_ddp
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

WIDTH = 24


class Experts(nn.Module):
    """Weights that are cast as views of a parameter, and a product that saves the cast itself."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(0.1 * torch.randn(3, 2 * WIDTH, WIDTH))
        self.fused = nn.Parameter(0.1 * torch.randn(WIDTH + 2, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = sum(F.linear(x, self.experts[e]) for e in range(2))
        last = self.experts.unbind()[2]
        wide = wide + F.linear(x, last) + x @ self.experts[2].t()
        return x + F.linear(torch.tanh(wide), self.fused.split([WIDTH, 2])[0])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.image = nn.Conv1d(3, WIDTH, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.image(x.expand(3, 3, *x.shape[-1:])).float()


MODELS: dict[str, tuple[Any, Any]] = {
    "MLP": (TinyMLP, lambda: features_of(1, 4, 7)),
    "experts": (Mixture, lambda: features_of(1, 3, 7)),
}


def sharded(model: nn.Module, stage: int = 3) -> nn.Module:
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
    return onefold.shard(model, recipe, units=[*{type(b) for b in model.blocks}])


def bytes_held(name: str, stage: int) -> tuple[int, int]:
    """(bytes of 16-bit casts of weights that autograd holds besides handles when the backward pass
    could begin, bytes of all weights in 16 bits)
    """
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model = build()
    weights = {p.numel() for p in model.parameters() if p.dim() > 1}
    weights |= {block.experts[0].numel() for block in model.blocks if hasattr(block, "experts")}
    model = sharded(model, stage)
    held: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        base = t if t._base is None else t._base
        if t.dtype == torch.bfloat16 and base.numel() in weights:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    for _ in range(3):  # in the first pass no unit is kept for the backward pass
        held.clear()
        with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            loss = model(batch()).square().mean()
        loss.backward()
    return sum(held.values()), 2 * sum(weights)


@pytest.mark.parametrize("name", list(MODELS))
def test_autograd_holds_no_casts_of_the_weights_of_stage_3(name: str) -> None:
    for held, _ in run_ranks(2, bytes_held, name, 3):
        assert held == 0, f"autograd holds {held} bytes of casts"
    held, all_of_them = run_ranks(2, bytes_held, name, 2)[0]
    assert held >= all_of_them, f"the count misses casts: {held} of {all_of_them} bytes at stage 2"


def bytes_cached(checkpointing: str) -> list[int]:
    """The bytes of the casts in autocast's cache of units that are not gathered, after a forward
    pass.
    """
    torch.manual_seed(0)
    model = onefold.shard(
        TinyGPT(checkpointing=checkpointing),  # type: ignore[arg-type]
        onefold.Recipe.zero(3, stall_timeout=30.0),
    )
    engine = onefold.engine_of(model)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens_of(0))
        for unit in engine.units:
            leaves = [e.compute for flat in unit.flats for e in flat.entries if unit.ungathered]
            for cast in cached_casts(leaf for leaf in leaves if leaf.dim() > 1):
                if cast is not None:
                    found.append(cast.untyped_storage().nbytes())
        loss.backward()
    return found


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_autocasts_cache_holds_no_memory_of_units_that_are_released(checkpointing: str) -> None:
    found = run_ranks(2, bytes_cached, checkpointing)[0]
    assert len(found) >= 3 * 4, f"casts in the cache: {found}"
    assert set(found) == {2}, f"bytes of casts in the cache: {found}"


# -- the bits of DDP -------------------------------------------------------------------------------


class UnderAutocast(Case):
    rtol = atol = 0.0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch)
        return out if out.dim() == 0 else out.square().mean()


class GPT(UnderAutocast, GPTCase):
    pass


class Tied(UnderAutocast, GPTCase):
    def build(self) -> nn.Module:
        return TinyGPT(tied=True)


class Recomputed(UnderAutocast, GPTCase):
    def build(self) -> nn.Module:
        return TinyGPT(checkpointing="non-reentrant")


class RecomputedReentrant(UnderAutocast, GPTCase):
    ddp_options = {"static_graph": True}

    def build(self) -> nn.Module:
        return TinyGPT(checkpointing="reentrant")


class BackwardInside(UnderAutocast, GPTCase):
    """Two micro-batches in one autocast: all four passes share the casts in its cache."""

    rtol, atol = 1e-5, 1e-6  # each micro-batch is reduced by itself; DDP adds them up first

    def build(self) -> nn.Module:
        return TinyGPT(checkpointing="non-reentrant")

    def step(self, model: nn.Module, optimizer: Any, rank: int, step: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            for micro in range(2):
                loss = model(tokens_of(10 * step + 5 * micro + rank))
                loss.backward()
        optimizer.step()
        return loss.item()


class CalledAgain(nn.Module):
    """Units whose weights are used in turns: DDP adds the gradients of the uses in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyMLP(width=WIDTH, features=WIDTH, classes=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.inner(x)
        return x


class UsedSeveralTimes(UnderAutocast):
    def build(self) -> nn.Module:
        return CalledAgain()

    def batch(self, rank: int, step: int) -> Any:
        return features_of(10 * step + rank, 4, WIDTH)


class OfExperts(UnderAutocast, MLPCase):
    units = (Experts,)

    def build(self) -> nn.Module:
        return Mixture()

    def batch(self, rank: int, step: int) -> Any:
        return features_of(10 * step + rank, 3, 7)


class Frozen(UnderAutocast, GPTCase):
    def build(self) -> nn.Module:
        model = TinyGPT()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "mlp" not in name
        return model


class ItsOwnHooks(UnderAutocast, MLPCase):
    """Hooks of the model's own keep the casts themselves."""

    units = (Experts,)

    def build(self) -> nn.Module:
        return Mixture()

    def batch(self, rank: int, step: int) -> Any:
        return features_of(10 * step + rank, 3, 7)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        kept = [
            module.register_forward_pre_hook(_keep_saved) for module in model.modules()
            if isinstance(module, Experts)
        ] + [
            module.register_forward_hook(_keep_no_more, always_call=True) for module in model.modules()
            if isinstance(module, Experts)
        ]  # fmt: skip
        out = super().loss(model, batch)
        for handle in kept:
            handle.remove()
        return out


_hooks: list[saved_tensors_hooks] = []


def _keep_saved(*_: Any) -> None:
    _hooks.append(saved_tensors_hooks(lambda t: t, lambda t: t))
    _hooks[-1].__enter__()


def _keep_no_more(*_: Any) -> None:
    _hooks.pop().__exit__(None, None, None)


CASES = [
    GPT, Tied, Recomputed, RecomputedReentrant, BackwardInside, UsedSeveralTimes, OfExperts, Frozen, ItsOwnHooks,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_stages_have_the_bits_of_ddp_under_autocast(case: type[Case]) -> None:
    assert_trains_as_ddp(case, stages=(2, 3))


def wrote_to_a_cast() -> tuple[float, float]:
    """(the gradient of an input through a cast of the model's own that it has written to, what it
    should be)
    """

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2, 2), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.to(torch.bfloat16)
            with torch.no_grad():
                weight.mul_(2.0)
            return F.linear(x, weight)

    model = onefold.shard(Doubled(), onefold.Recipe.zero(3, stall_timeout=30.0))
    x = torch.ones(1, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    assert x.grad is not None
    return x.grad[0, 0].item(), 12.0


def test_a_cast_that_the_model_has_written_to_is_kept() -> None:
    for got, expected in run_ranks(2, wrote_to_a_cast):
        assert got == expected


def warnings_of_frozen() -> list[str]:
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("onefold").addHandler(Kept())
    model = Frozen().build()
    model = onefold.shard(model, onefold.Recipe.zero(3, stall_timeout=30.0))
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens_of(step)).backward()
    return [text for text in said if "is frozen" in text]


def test_a_frozen_weight_that_autocast_copies_is_named_once() -> None:
    (said,) = run_ranks(2, warnings_of_frozen)[0]
    assert "'blocks.0.mlp.0.weight' is frozen" in said and "torch.bfloat16" in said
