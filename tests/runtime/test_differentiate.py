"""torch.autograd.grad, functional_call, gradient penalties and modules that return their weights,
against plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ranks import outcomes_of, run_ranks
from trials import STAGES
from zoo import ResidualBlock, TinyGPT, TinyMLP, features_of, tokens_of

Loss = Callable[[nn.Module, int], torch.Tensor]


def poison_pools() -> None:
    """What goes back to a pool to be used again holds nothing that anybody may read."""
    from onefold.memory import Pool

    give = Pool.give

    def poisoned(self: Any, buffer: torch.Tensor) -> None:
        give(self, buffer)
        for free in self._free.values():
            if any(buffer is b for b in free) and buffer.is_floating_point():
                buffer.fill_(math.nan)

    Pool.give = poisoned  # type: ignore[method-assign]


def sharded(stage: int, model: nn.Module, **options: Any) -> Any:
    import onefold

    return onefold.shard(
        model, onefold.Recipe.zero(stage, stall_timeout=10.0, **options), units=(ResidualBlock,)
    )


def mean_over_ranks(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


def whole_gradient(param: Any) -> torch.Tensor:
    """The reduced gradient of a sharded parameter, put together from all ranks' intervals."""
    if not param.onefold.sharded:
        return param.grad.clone()
    whole = torch.zeros(math.prod(param.onefold.shape))
    a, b = param.onefold.interval
    with torch._C.DisableTorchFunctionSubclass():
        if param.grad is not None:
            whole[a:b] = param.grad
    dist.all_reduce(whole)
    return whole.view(param.onefold.shape)


def local_gradients(stage: int | None, x: torch.Tensor, **options: Any) -> Any:
    """autograd.grad with respect to parameters and inputs, then what an ordinary step leaves, and
    what the engine counts.
    """
    import onefold

    torch.manual_seed(0)
    model: Any = TinyMLP() if stage is None else sharded(stage, TinyMLP(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = x.clone().requires_grad_()
    out: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        out += torch.autograd.grad(loss, [*model.parameters(), x], retain_graph=True)
        out += torch.autograd.grad(loss, model.blocks[1].up.weight, retain_graph=True)
        out += torch.autograd.grad(loss, (p for p in model.leave.parameters()), retain_graph=True)
        if stage is not None and any(p.grad is not None for p in model.parameters()):
            return "torch.autograd.grad left a gradient"
        if stage is not None and (engine := onefold.engine_of(model)).progress.backward_open:
            return "the pass is still open"
        x.grad = None
        loss.backward(inputs=[model.leave.weight, x], retain_graph=True)
        out.append(
            mean_over_ranks(model.leave.weight.grad)
            if stage is None
            else whole_gradient(model.leave.weight)
        )
        if [name for name, p in model.named_parameters() if p.grad is not None] not in (
            ["leave.weight"],
            [],
        ):
            return "backward(inputs=...) reached other parameters"
        optimizer.zero_grad()
        x.grad = None
        loss.backward()
        out.append(x.grad)  # type: ignore[arg-type]
        if stage is None:
            for p in model.parameters():
                p.grad = mean_over_ranks(p.grad)
        optimizer.step()
    if stage is not None:
        counted = (
            engine.progress.open_graphs,
            engine.progress.root_graphs,
            engine.step_count,
            sum(u.leases.saved for u in engine.units),
        )
        if counted != (0, 0, 6, 0):
            return f"open graphs, of the root, steps, handles: {counted}"
        weights = list(onefold.full_state_dict(model).values())
    else:
        weights = [p.detach().clone() for p in model.parameters()]
    return [t.detach().clone() for t in (*out, *(weights if dist.get_rank() == 0 else []))]


def compare(
    function: Callable[..., Any], *args: Any, stages: tuple[int, ...] = STAGES, **options: Any
) -> list[str]:
    """`function(stage, *args)` gives tensors: those of each stage against plain PyTorch's, and of
    each stage against the first's bits.
    """
    poison_pools()
    plain, first, found = function(None, *args), None, []
    for stage in stages:
        ours = function(stage, *args, **options)
        if isinstance(ours, str):
            found.append(f"stage {stage}: {ours}")
            continue
        if len(ours) != len(plain):
            found.append(f"stage {stage}: {len(ours)} tensors, expected {len(plain)}")
        for i, (a, b) in enumerate(zip(plain, ours, strict=False)):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
                found.append(
                    f"stage {stage}: tensor {i} of {tuple(a.shape)} is off: {b.flatten()[:3]} for"
                    f" {a.flatten()[:3]}"
                )
        first = first or ours
        found += [
            f"stage {stage}: tensor {i} has other bits"
            for i, (a, b) in enumerate(zip(first, ours, strict=False))
            if not a.equal(b)
        ]
    return found


def compare_local_gradients() -> list[str]:
    return compare(local_gradients, features_of(dist.get_rank(), 4, 7))


def test_autograd_grad_gives_local_gradients_and_later_steps_are_as_without() -> None:
    assert run_ranks(2, compare_local_gradients) == [[], []]


# -- penalties -------------------------------------------------------------------------------------


def penalize(stage: int | None, wanted: str, **options: Any) -> Any:
    """Three steps on a loss with the square of the gradient norm in it, with respect to inputs or
    to parameters.
    """
    import onefold

    torch.manual_seed(0)
    model: Any = TinyMLP() if stage is None else sharded(stage, TinyMLP(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        x = features_of(10 * step + dist.get_rank(), 4, 7).requires_grad_()
        loss = model(x).square().mean()
        about = [x] if wanted == "inputs" else list(model.parameters())
        grads = torch.autograd.grad(loss, about, create_graph=True)
        # A pass in between, whose gathers use buffers again
        other = model(features_of(100 + step, 4, 7)).square().mean()
        (loss + other + sum(g.square().sum() for g in grads)).backward()
        seen += [loss.detach().clone(), *(g.detach().clone() for g in grads)]
        if stage is None:
            for p in model.parameters():
                p.grad = mean_over_ranks(p.grad)
        optimizer.step()
    if stage is not None and (counted := onefold.engine_of(model).progress.open_graphs):
        return f"{counted} graphs are open"
    state = model.state_dict() if stage is None else onefold.full_state_dict(model)
    return [t.clone() for t in (*seen, *(state.values() if dist.get_rank() == 0 else []))]


def compare_penalties(**options: Any) -> list[str]:
    return [
        f"{what}: {said}"
        for what in ("inputs", "parameters")
        for said in compare(penalize, what, **options)
    ]


def test_gradient_penalties_train_as_in_plain_pytorch_at_every_stage() -> None:
    assert run_ranks(2, compare_penalties) == [[], []]


class Forces(nn.Module):
    """An energy and its gradient with respect to positions, taken inside the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = TinyMLP(classes=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return torch.cat([force.flatten(), energy[None]])


def fit_forces(stage: int | None, **options: Any) -> Any:
    import onefold

    torch.manual_seed(0)
    model: Any = Forces() if stage is None else sharded(stage, Forces(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(features_of(10 * step + dist.get_rank(), 4, 7)).square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        if stage is None:
            for p in model.parameters():
                p.grad = mean_over_ranks(torch.zeros_like(p) if p.grad is None else p.grad)
        optimizer.step()
    state = model.state_dict() if stage is None else onefold.full_state_dict(model)
    return [t.clone() for t in (*losses, *(state.values() if dist.get_rank() == 0 else []))]


def compare_forces() -> list[str]:
    return compare(fit_forces) + compare(fit_forces, stages=(3,), reshard_after_forward=False)


def test_a_gradient_taken_inside_the_forward_pass_trains_at_every_stage() -> None:
    assert run_ranks(2, compare_forces) == [[], []]


# -- functional_call -------------------------------------------------------------------------------


def call_with_others(stage: int | None, **options: Any) -> Any:
    """functional_call with some tensors of the caller's, whose gradients are the caller's; then an
    ordinary step.
    """
    import onefold

    torch.manual_seed(0)
    model: Any = TinyMLP() if stage is None else sharded(stage, TinyMLP(), **options)
    x = features_of(dist.get_rank(), 4, 7)
    others = {
        "blocks.1.up.weight": features_of(7, 20, 10).requires_grad_(),
        "leave.bias": nn.Parameter(features_of(8, 5)),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        loss = (
            functional_call(model, others, (x,)).square().mean()
            + functional_call(model, dict(model.named_parameters()), (x,)).mean()
        )
        loss.backward()
        seen += [
            loss.detach().clone(),
            *(t.grad.clone() for t in others.values() if t.grad is not None),
        ]
        if stage is None:
            for p in model.parameters():
                p.grad = mean_over_ranks(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    everything = {
        name: features_of(i, *p.shape).requires_grad_()
        for i, (name, p) in enumerate(TinyMLP().named_parameters())
    }
    grads = torch.autograd.grad(
        functional_call(model, everything, (x,)).square().mean(), list(everything.values())
    )
    state = model.state_dict() if stage is None else onefold.full_state_dict(model)
    return [t.clone() for t in (*seen, *grads, *(state.values() if dist.get_rank() == 0 else []))]


def compare_calls() -> list[str]:
    return compare(call_with_others)


def test_functional_call_computes_with_the_tensors_it_is_given_at_every_stage() -> None:
    assert run_ranks(2, compare_calls) == [[], []]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def refusals() -> list[str]:
    import onefold

    found = []

    def told(what: str, function: Callable[[], Any], *words: str) -> None:
        try:
            function()
            found.append(f"{what} was let pass")
        except (RuntimeError, ValueError) as error:
            found.extend(
                f"{what} does not say {word!r}: {type(error).__name__}: {error}"
                for word in words
                if word not in str(error)
            )

    x = features_of(0, 4, 7)
    for stage in STAGES:
        model = sharded(stage, TinyMLP())
        shape = {"blocks.1.up.weight": torch.zeros(10, 20)}
        told(
            f"a wrong shape at stage {stage}",
            lambda m=model, s=shape: functional_call(m, s, (x,)),
            "(20, 10)",
            "blocks.1.up.weight",
        )
        model(x).square().mean().backward()
    for stage in (1, 2, 3):
        model = sharded(stage, TinyMLP())

        def loss_of(params: Any, m: Any = model) -> torch.Tensor:
            return functional_call(m, params, (x,)).square().mean()

        own = dict(model.named_parameters())
        told(
            f"torch.func.grad at stage {stage}",
            lambda f=loss_of, p=own: torch.func.grad(f)(p),
            "full_params(model)",
        )
        loss = model(x).square().mean()
        local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        with onefold.full_params(model):
            wholes = {name: p.detach().clone() for name, p in model.named_parameters()}
            found += [
                name
                for (name, g), mine in zip(
                    torch.func.grad(loss_of)(wholes).items(), local, strict=True
                )
                if not close(g, mine)
            ]
        loss.backward()
    return found


def test_wrong_shapes_and_transforms_are_refused_in_a_sentence_that_names_a_way() -> None:
    assert run_ranks(2, refusals) == [[], []]


def only_rank_0_differentiates() -> None:
    import onefold

    model = onefold.shard(
        TinyMLP(), onefold.Recipe.zero(3, stall_timeout=2.0), units=(ResidualBlock,)
    )
    loss = model(features_of(0, 4, 7)).square().mean()
    if dist.get_rank() == 0:
        torch.autograd.grad(loss, list(model.parameters()))
    else:
        loss.backward()


def test_ranks_that_differentiate_otherwise_at_stage_3_are_told_and_do_not_hang() -> None:
    outcomes = outcomes_of(2, only_rank_0_differentiates, timeout=60.0)
    assert {o.error for o in outcomes} <= {"StallError", ""} and any(
        o.error == "StallError" for o in outcomes
    ), outcomes


def adapt(stage: int | None, second_order: bool, **options: Any) -> Any:
    """MAML: an inner step on one task by autograd.grad, the loss of another through
    functional_call, an outer step.
    """
    import onefold

    torch.manual_seed(0)
    model: Any = TinyMLP() if stage is None else sharded(stage, TinyMLP(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        inner = model(features_of(10 * step + dist.get_rank(), 4, 7)).square().mean()
        grads = torch.autograd.grad(inner, list(model.parameters()), create_graph=second_order)
        fast = {
            name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), grads, strict=True)
        }
        outer = (
            functional_call(model, fast, (features_of(50 + dist.get_rank(), 4, 7),)).square().mean()
        )
        outer.backward()
        seen += [
            inner.detach().clone(),
            outer.detach().clone(),
            *(g.detach().clone() for g in grads),
        ]
        if stage is None:
            for p in model.parameters():
                p.grad = mean_over_ranks(p.grad)
        optimizer.step()
    state = model.state_dict() if stage is None else onefold.full_state_dict(model)
    return [t.clone() for t in (*seen, *(state.values() if dist.get_rank() == 0 else []))]


def compare_adapted() -> list[str]:
    return [said for second_order in (True, False) for said in compare(adapt, second_order)]


def test_an_inner_step_of_maml_trains_as_in_plain_pytorch_at_every_stage() -> None:
    assert run_ranks(2, compare_adapted) == [[], []]


# -- modules that return their weights -------------------------------------------------------------


class Table(nn.Module):
    """A part of a model that hands out its weight, whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(features_of(3, 6, 5))

    def forward(self) -> Any:
        return self.weight


class Hands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Table() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        first, second, third = (table() for table in self.tables)
        return {"y": x @ first, "weight": second, "view": [third[1:3], third.t()]}


def use_returned(stage: int | None, **options: Any) -> Any:
    import onefold

    torch.manual_seed(0)
    model: Any = Hands()
    if stage is not None:
        onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        out = model(features_of(10 * step + dist.get_rank(), 4, 6))
        with torch.no_grad():
            again = model(features_of(step, 4, 6))  # its gathers use buffers again
        part = model.tables[1]()
        view, turned = out["view"]
        loss = (
            out["y"].square().mean()
            + out["weight"].square().sum()
            + (view @ turned[:, :2]).sum()
            + part.sum()
        )
        seen += [
            t.detach().clone()
            for t in (loss, out["weight"], view, turned, part, again["weight"], *again["view"])
        ]
        loss.backward()
        if stage is None:
            for p in model.parameters():
                p.grad = mean_over_ranks(p.grad)
        optimizer.step()
    state = model.state_dict() if stage is None else onefold.full_state_dict(model)
    return [t.clone() for t in (*seen, *(state.values() if dist.get_rank() == 0 else []))]


def compare_returned() -> list[str]:
    return compare(use_returned) + compare(use_returned, stages=(3,), reshard_after_forward=False)


def test_a_module_may_return_its_weight_or_a_view_of_it() -> None:
    assert run_ranks(2, compare_returned) == [[], []]


class Recomputed(nn.Module):
    """All parameters inside one re-entrant checkpoint: the outer backward pass does not know that
    any will get a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)


def recompute(stage: int | None, **options: Any) -> Any:
    import onefold

    torch.manual_seed(0)
    model: Any = Recomputed() if stage is None else sharded(stage, Recomputed(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(features_of(10 * step + dist.get_rank(), 4, 7)).square().mean()
        loss.backward()
        seen.append(loss.detach().clone())
        if stage is None:
            for p in model.parameters():
                p.grad = mean_over_ranks(p.grad)
        optimizer.step()
    state = model.state_dict() if stage is None else onefold.full_state_dict(model)
    return [t.clone() for t in (*seen, *(state.values() if dist.get_rank() == 0 else []))]


def compare_recomputed() -> list[str]:
    return compare(recompute)


def test_gradients_that_only_a_reentrant_checkpoint_brings_are_reduced() -> None:
    assert run_ranks(2, compare_recomputed) == [[], []]


# -- recomputation ---------------------------------------------------------------------------------


def differentiate_a_checkpointed_gpt(stage: int | None, **options: Any) -> Any:
    import onefold

    torch.manual_seed(0)
    model: Any = TinyGPT(checkpointing="non-reentrant", tied=True)
    if stage is not None:
        onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for step in range(2):
        loss = model(tokens_of(10 * step + dist.get_rank()))
        seen += torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        if stage is None:
            for p in model.parameters():
                p.grad = mean_over_ranks(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if stage is None else onefold.full_state_dict(model)
    return [t.detach().clone() for t in (*seen, *(state.values() if dist.get_rank() == 0 else []))]


def compare_checkpointed() -> list[str]:
    return compare(differentiate_a_checkpointed_gpt)


def test_autograd_grad_goes_through_checkpoints_and_tied_weights() -> None:
    assert run_ranks(2, compare_checkpointed) == [[], []]


def test_penalties_with_activations_on_the_host() -> None:
    assert run_ranks(2, compare_penalties, stages=(3,), offload_activations=10**9) == [[], []]
