"""Gradient hooks on parameters see, and may change, this rank's whole gradient before the
reduction, as under DDP.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from trials import STAGES
from zoo import ResidualBlock, TinyGPT, TinyMLP, features_of, tokens_of

#: What is hooked, in a GPT whose head is its embedding.
HOOKED = ("tokens.weight", "blocks.1.mlp.0.weight", "blocks.2.norm_1.bias", "norm.weight")


def parameter(model: nn.Module, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return model.get_submodule(module)._parameters[attribute]


class Hooks:
    """Both kinds of hooks on some parameters: what they see is written down, half of it is
    changed.
    """

    def __init__(
        self, model: nn.Module, hooked: tuple[str, ...] = HOOKED, change: bool = True
    ) -> None:
        self.model, self.change = model, change
        self.seen: list[tuple[str, str, torch.Tensor]] = []
        self.handles = [parameter(model, name).register_hook(self.before(name)) for name in hooked]
        self.handles += [
            parameter(model, name).register_post_accumulate_grad_hook(self.after(name))
            for name in hooked
        ]

    def before(self, name: str) -> Any:
        def hook(grad: torch.Tensor) -> torch.Tensor | None:
            self.seen.append(("hook", name, grad.detach().clone()))
            return grad.clamp(-0.01, 0.01) if self.change and "blocks" in name else None

        return hook

    def after(self, name: str) -> Any:
        def hook(param: Any) -> None:
            assert param.shape == param.grad.shape, "the parameter is whole while its hook runs"
            self.seen.append(("post", name, param.grad.detach().clone()))
            if self.change and name == "tokens.weight":
                param.grad.mul_(0.5)
            elif self.change and name == "norm.weight":
                # A penalty by hand reads the whole values
                param.grad = param.grad + 0.1 * param.detach()

        return hook


def train(
    stage: int | None, when: str, micro_batches: int = 1, **how: Any
) -> tuple[Any, list[torch.Tensor]]:
    """What hooks saw and the weights after three steps, by DDP (None) or at a stage; hooks are
    registered before or after shard().
    """
    import torch.distributed as dist

    import onefold

    torch.manual_seed(0)
    inner = TinyGPT(tied=True, checkpointing=how.pop("checkpointing", "none"))
    hooks = Hooks(inner) if when == "before" else None
    if stage is None:
        model: nn.Module = DistributedDataParallel(inner, find_unused_parameters=False)
    else:
        model = onefold.shard(inner, onefold.Recipe.zero(stage, stall_timeout=10.0, **how))
    hooks = hooks or Hooks(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with (
                torch.enable_grad()
                if last
                else (model.no_sync() if stage is None else onefold.no_sync(model))
            ):
                (
                    model(tokens_of(100 * step + 10 * micro + dist.get_rank())) / micro_batches
                ).backward()
        optimizer.step()
        if step == 1:
            for handle in hooks.handles:
                handle.remove()
    weights = (
        list(inner.state_dict().values())
        if stage is None
        else list(onefold.full_state_dict(inner).values())
    )
    return hooks.seen, [w.clone() for w in weights] if dist.get_rank() == 0 else []


def differences(
    when: str,
    stages: tuple[int, ...],
    micro_batches: int = 1,
    checkpointing: str = "none",
    **how: Any,
) -> list[str]:
    seen, weights = train(None, when, micro_batches, checkpointing=checkpointing)
    found, first = [], None
    for stage in stages:
        ours, mine = train(stage, when, micro_batches, checkpointing=checkpointing, **how)
        if [s[:2] for s in ours] != [s[:2] for s in seen]:
            found.append(
                f"stage {stage}: {[s[:2] for s in ours]} were called, expected"
                f" {[s[:2] for s in seen]}"
            )
            continue
        for (kind, name, a), (_, _, b) in zip(seen, ours, strict=True):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
                found.append(
                    f"stage {stage}: the {kind} of {name} saw another gradient (by"
                    f" {(a - b).abs().max():.1e})"
                )
        found += [
            f"stage {stage}: weight {i} differs"
            for i, (a, b) in enumerate(zip(weights, mine, strict=True))
            if far(a, b)
        ]
        first = first or mine
        found += [
            f"stage {stage}: weight {i} has other bits"
            for i, (a, b) in enumerate(zip(first, mine, strict=True))
            if not a.equal(b)
        ]
    return found


def far(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_and_change_the_whole_local_gradient_as_under_ddp(when: str) -> None:
    assert run_ranks(2, differences, when, STAGES) == [[], []]


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_hooks_of_a_checkpointed_model_are_called_once_a_backward_pass(checkpointing: str) -> None:
    assert run_ranks(2, differences, "after", (1, 3), 1, checkpointing) == [[], []]


def test_under_no_sync_a_hook_sees_what_has_accumulated() -> None:
    assert run_ranks(2, differences, "after", (0, 1), 3) == [[], []]
    assert run_ranks(2, differences, "after", (2, 3), 3, reduce_at="boundary") == [[], []]


# -- details ---------------------------------------------------------------------------------------


def details() -> list[str]:
    import onefold

    found = []
    for stage in STAGES:
        model = onefold.shard(
            TinyMLP(),
            onefold.Recipe.zero(stage, precision="bf16", stall_timeout=10.0),
            units=(ResidualBlock,),
        )
        weight, frozen = model.blocks[1].up.weight, model.leave.bias.requires_grad_(False)
        kinds: list[Any] = []
        weight.register_hook(
            lambda grad, kinds=kinds: kinds.append(("hook", grad.dtype, tuple(grad.shape)))
        )
        late = weight.register_post_accumulate_grad_hook(
            lambda p, kinds=kinds: kinds.append(("post", p.grad.dtype, tuple(p.grad.shape)))
        )
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", None)
        )
        model(features_of(0, 4, 7)).float().square().mean().backward()
        if kinds != [("hook", torch.bfloat16, (20, 10)), ("post", torch.bfloat16, (20, 10))]:
            found.append(f"stage {stage}: {kinds}")
        if model.blocks[0].up.weight.grad is not None:
            found.append(f"stage {stage}: a gradient that a hook dropped came back")
        late.remove()
        model(features_of(1, 4, 7)).float().square().mean().backward()
        if len(kinds) != 3:
            found.append(f"stage {stage}: a removed hook was called: {kinds}")
        for register in (frozen.register_hook, frozen.register_post_accumulate_grad_hook):
            try:
                register(lambda x: None)
                found.append(
                    f"stage {stage}: {register.__name__} on a frozen parameter was let pass"
                )
            except RuntimeError as error:
                if "doesn't require gradient" not in str(error):
                    found.append(f"stage {stage}: {error}")
    return found


def test_hooks_see_the_compute_dtype_may_drop_a_gradient_and_refuse_frozen_parameters() -> None:
    assert run_ranks(2, details) == [[], []]


def refusals() -> list[str]:
    """What cannot be is refused in a sentence, and the model trains on afterwards."""
    import onefold

    def step_in_hook(model: Any) -> None:
        optimizer = torch.optim.SGD([model.blocks[1].up.weight], lr=0.1)
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())

    def write_in_hook(model: Any) -> None:
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(
            lambda p: p.data.sub_(p.grad, alpha=0.1)
        )

    def write_without_data(model: Any) -> None:
        def hook(p: Any) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)

        model.blocks[1].up.weight.register_post_accumulate_grad_hook(hook)

    found = []
    for stage in STAGES:
        for action in (step_in_hook, write_in_hook, write_without_data):
            model = onefold.shard(
                TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=10.0), units=(ResidualBlock,)
            )
            action(model)
            try:
                model(features_of(0, 4, 7)).square().mean().backward()
                found.append(f"{action.__name__} at stage {stage} was let pass")
            except RuntimeError as error:
                if "step_in_backward" not in str(error) or "ordinary order" not in str(error):
                    found.append(f"{action.__name__} at stage {stage}: {error}")
    tiled = onefold.shard(
        nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 8)), onefold.Recipe.zero(3, tile=1024)
    )
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 8))
    model[0].weight.register_hook(lambda grad: grad)
    for what in (
        lambda: next(p for n, p in tiled.named_parameters() if "tiles" in n).register_hook(
            lambda grad: grad
        ),
        lambda: onefold.shard(model, onefold.Recipe.zero(3, tile=1024)),
    ):
        try:
            what()
            found.append("a hook on a weight in tiles was let pass")
        except ValueError as error:
            if "in tiles" not in str(error) or "larger tile" not in str(error):
                found.append(str(error))
    return found


def test_stepping_in_a_hook_and_hooks_on_tiles_are_refused_in_a_sentence() -> None:
    assert run_ranks(2, refusals) == [[], []]


class HookedInForward(nn.Module):
    """Registers a hook on its own weights in its first forward pass, as transformers does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(width, width)
        self.seen: list[torch.Tensor] = []
        self.hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()

    def install(self) -> None:
        own = self.inner.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            for _, param in self.inner.named_parameters(recurse=False) if not self.hooked else ():
                param.register_post_accumulate_grad_hook(self._double)
            self.hooked = True
            return own(x)

        self.inner.forward = forward

    def _double(self, param: Any) -> None:
        self.seen.append(param.grad.detach().clone())
        param.grad.mul_(2.0)


def hooked_in_forward(stage: int | None) -> tuple[list[torch.Tensor], float]:
    import onefold

    model = HookedInForward(80)  # its gradient is not put aside
    if stage is not None:
        onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0), units=[nn.Linear])
    model.install()
    model(features_of(1, 4, 80)).backward()
    if stage is not None:
        return model.seen, onefold.clip_grad_norm_(model, 1e9).item()
    return model.seen, nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_hook_that_is_registered_in_a_forward_pass_sees_and_changes_the_gradient(
    stage: int,
) -> None:
    expected, norm = hooked_in_forward(None)
    order = sorted(expected, key=torch.Tensor.numel)
    for seen, got in run_ranks(2, hooked_in_forward, stage):
        torch.testing.assert_close(sorted(seen, key=torch.Tensor.numel), order)
        assert got == pytest.approx(norm, rel=1e-5), (got, norm)
