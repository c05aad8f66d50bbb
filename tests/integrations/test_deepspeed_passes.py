"""What an engine does to the gradients of backward passes, whoever runs them, beside DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.integrations.deepspeed.names import access
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks

WIDTH, RATE = 6, 0.1
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.lift(x)))


class Net(nn.Module):
    """Three blocks; `recomputed` is None, or `use_reentrant` of the checkpoints around them."""

    def __init__(self, seed: int = 0, recomputed: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recomputed is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recomputed)
        return self.head(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def batch(index: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + index))


def made(stage: int, net: Net | None = None, accumulation: int = 1, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        **more,
    }
    return initialize(model=net or Net(), config=config)[0]


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    """Whole gradients of an engine's module or of a plain model, in order; zeros for None."""
    found = []
    for p in model.parameters():
        sharded = isinstance(p, nn.Parameter) and hasattr(p, "onefold")
        grad = access.safe_get_full_grad(p) if sharded else p.grad
        found.append(torch.zeros(p.shape) if grad is None else grad.detach().clone())
    return found


def differ(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, as a share of the largest gradient."""
    largest = max(float(t.abs().max()) for t in theirs)
    assert largest > 0
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True)) / largest


class Ddp:
    """A plain model beside the engine: gradients are averaged over the ranks when asked for."""

    def __init__(self, net: Net | None = None) -> None:
        self.net = net or Net()

    def gradients(self) -> list[Tensor]:
        found = gradients(self.net)
        if dist.is_initialized():
            for grad in found:
                dist.all_reduce(grad)
                grad /= dist.get_world_size()
        return found

    def norm(self) -> float:
        return float(torch.stack([g.norm() for g in self.gradients()]).norm())

    def step(self) -> None:
        with torch.no_grad():
            for p, grad in zip(self.net.parameters(), self.gradients(), strict=True):
                p -= RATE * grad
        self.net.zero_grad()


# -- gradients of earlier steps --------------------------------------------------------------------

#: What a script does in one step, given the module (or the engine) and the number of the step.
STEPS: dict[str, Callable[[Any, int], Tensor]] = {
    "the module itself": lambda model, i: loss_of(model(batch(i))),
    "a method": lambda model, i: loss_of(model.encode(batch(i))),
    "a part": lambda model, i: loss_of(model.blocks[1](batch(i))),
    "no forward pass": lambda model, i: model.head.weight.square().sum() / (1 + i),
}


def norms_of_three_steps(name: str) -> list[tuple[int, list[float], list[float]]]:
    found = []
    for stage in STAGES:
        engine, plain = made(stage), Ddp()
        called, loss = engine if name == "a method" else engine.module, STEPS[name]
        mine, theirs = [], []
        for i in range(3):
            loss(called, i).backward()
            engine.step()
            mine.append(engine.get_global_grad_norm())
            loss(plain.net, i).backward()
            theirs.append(plain.norm())
            plain.step()
        found.append((stage, mine, theirs))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_of_a_step_do_not_pile_up_on_those_of_the_next(name: str, ranks: int) -> None:
    for stage, mine, theirs in run_ranks(ranks, norms_of_three_steps, name)[0]:
        assert mine == pytest.approx(theirs, rel=1e-4), f"stage {stage}: {mine} for {theirs}"


# -- decided once a backward pass ------------------------------------------------------------------


def run_passes(engine: Any, kinds: str) -> Iterator[None]:
    """Run one micro-batch for each letter: b is `engine.backward`, o the loss's own, s a scaled
    one's, w `engine.backward` without the division.
    """
    for i, kind in enumerate(kinds):
        loss = loss_of(engine(batch(i)))
        if kind == "b":
            engine.backward(loss)
        elif kind == "w":
            engine.backward(loss, scale_wrt_gas=False)
        else:
            (engine.scale(loss) if kind == "s" else loss).backward()
        yield


MIXED = ("bo", "ob", "sb", "bs", "oo", "ooo", "bsow")


def mixed_passes(kinds: str) -> list[tuple[int, float, float]]:
    """(stage, difference of the gradients before the step, norm of the step / DDP's)"""
    plain = Ddp()
    for i, kind in enumerate(kinds):
        loss = loss_of(plain.net(batch(i)))
        (loss if kind == "w" else loss / len(kinds)).backward()
    theirs, norm = plain.gradients(), plain.norm()
    found = []
    for stage in STAGES:
        engine = made(stage, accumulation=len(kinds))
        apart = 0.0
        for _ in run_passes(engine, kinds):
            if engine.is_gradient_accumulation_boundary():
                apart = differ(gradients(engine.module), theirs)
            engine.step()
        assert engine.global_steps == 1
        found.append((stage, apart, float(engine.get_global_grad_norm()) / norm))
    return found


def dropped_by(name: str, stage: int) -> list[bool]:
    """Whether each parameter has a gradient, after a step and then a pass; and whether those of the
    head can be asked for, which that pass did not use.
    """
    engine = made(stage)
    engine.backward(loss_of(engine(batch(0))))
    engine.step()
    assert all(p.grad is not None for p in engine.module.parameters())
    if name == "a forward pass":
        engine(batch(1))
    else:
        loss_of(engine.module.encode(batch(1))).backward()
    shown = [p.grad is not None for p in engine.module.parameters()]
    gathered = [access.safe_get_full_grad(p) is not None for p in engine.module.parameters()]
    assert shown == gathered, (shown, gathered)
    return shown


@pytest.mark.parametrize("name", ["a forward pass", "a backward pass"])
@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_see_that_a_pass_has_dropped_the_gradients_of_a_step(
    stage: int, name: str
) -> None:
    """A rank that owns no element of a parameter knows only by a mark that others have its
    gradient.
    """
    seen = run_ranks(2, dropped_by, name, stage)
    assert seen[0] == seen[1], seen
    names = [n for n, _ in Net().named_parameters()]
    used = [n for n, has in zip(names, seen[0], strict=True) if has]
    graded = () if name == "a forward pass" else ("blocks.0.", "blocks.1.")
    assert used == [n for n in names if n.startswith(graded or "none")]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kinds", MIXED)
def test_each_backward_pass_is_divided_by_what_was_done_to_its_own_loss(
    kinds: str, ranks: int
) -> None:
    for stage, apart, norm in run_ranks(ranks, mixed_passes, kinds)[0]:
        assert apart < 1e-5, f"stage {stage}: gradients before the step are {apart:.1e} off"
        assert norm == pytest.approx(1, rel=1e-5), f"stage {stage}: norm {norm} of DDP's"


def refuse_unscaled(stage: int) -> list[float]:
    """In fp16, [norm of a step with scaled losses alone, the same where one that was not scaled was
    refused in between].
    """
    norms = []
    for also in (False, True):
        engine = made(stage, accumulation=2, fp16={"enabled": True, "loss_scale": 128})
        for i in range(2):
            if also:
                other = loss_of(engine(batch(7).half()))
                with pytest.raises(RuntimeError, match="Loss scaling is required in fp16"):
                    other.backward()
                with pytest.raises(AssertionError, match=r"engine\.scale\(loss\)\.backward\(\)"):
                    loss_of(engine(batch(8).half())).backward()
            loss = loss_of(engine(batch(i).half()))
            if i:
                engine.backward(loss)
            else:
                engine.scale(loss).backward()
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


@pytest.mark.parametrize("stage", [0, 3])
def test_in_fp16_an_unscaled_pass_beside_scaled_ones_is_refused_at_once(stage: int) -> None:
    for ranks in (1, 2):
        for alone, beside in run_ranks(ranks, refuse_unscaled, stage):
            assert alone == pytest.approx(beside, rel=1e-6)


def test_a_scale_of_one_needs_no_scaled_loss() -> None:
    engine = made(0, fp16={"enabled": True, "loss_scale": 1})
    loss_of(engine(batch(0).half())).backward()
    engine.step()
    assert engine.was_step_applied()


def test_what_is_no_scalar_with_a_graph_is_refused() -> None:
    engine = made(0)
    for call in (engine.scale, engine.backward):
        for error in (AssertionError, ValueError):
            with pytest.raises(error, match=r"tensor of shape \(4, 3\): expected a scalar loss"):
                call(engine(batch(0)))
            with pytest.raises(error, match="a float: expected a scalar loss with a graph"):
                call(1.5)


# -- several engines, several passes over one graph ------------------------------------------------


def combined_losses() -> list[tuple[str, int, float]]:
    """(who runs the pass, stage, difference) of two steps of losses of three engines together."""
    found = []
    for by in ("the loss", "an engine"):
        for stage in STAGES:
            accumulation = 2 if by == "an engine" else 1
            engines = [made(stage, Net(seed), accumulation) for seed in range(3)]
            plain = [Ddp(Net(seed)) for seed in range(3)]
            apart = 0.0
            for i in range(2 * accumulation):
                loss = sum(loss_of(e(batch(i))) / (k + 1) for k, e in enumerate(engines))
                if by == "the loss":
                    loss.backward()
                else:
                    engines[0].backward(loss)
                theirs = sum(loss_of(d.net(batch(i))) / (k + 1) for k, d in enumerate(plain))
                (theirs / accumulation).backward()
                if engines[0].is_gradient_accumulation_boundary():
                    for engine, ddp in zip(engines, plain, strict=True):
                        apart = max(apart, differ(gradients(engine.module), ddp.gradients()))
                        ddp.step()
                for engine in engines:
                    engine.step()
            found.append((by, stage, apart))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_of_several_engines_gives_each_its_gradients(ranks: int) -> None:
    for by, stage, apart in run_ranks(ranks, combined_losses)[0]:
        assert apart < 1e-5, f"stage {stage}, backward of {by}: {apart:.1e} off"


def passes_over_one_graph() -> list[tuple[bool | None, int, float, float, float]]:
    """(checkpoints, stage, differences of: the first of two losses, the second after zero_grad,
    both without zero_grad in between).
    """
    found = []
    for recomputed in (None, False, True):
        for stage in STAGES:
            plain, engine = Ddp(Net(0, recomputed)), made(stage, Net(0, recomputed), accumulation=1)
            apart = []
            for clears in (True, False):
                x, y = batch(0).requires_grad_(), batch(0).requires_grad_()
                output, theirs = engine(x), plain.net(y)
                for model in (engine, plain.net):
                    model.zero_grad()
                for k, retain in enumerate((True, False)):
                    if clears:
                        engine.zero_grad()
                        plain.net.zero_grad()
                    loss_of(output[k:]).backward(retain_graph=retain)
                    loss_of(theirs[k:]).backward(retain_graph=retain)
                    if clears or k:
                        apart.append(differ(gradients(engine.module), plain.gradients()))
            found.append((recomputed, stage, *apart))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_backward_passes_over_one_graph_add_up_or_replace_each_other(ranks: int) -> None:
    for recomputed, stage, *apart in run_ranks(ranks, passes_over_one_graph)[0]:
        assert max(apart) < 1e-5, f"use_reentrant={recomputed}, stage {stage}: {apart}"


def returned_gradients() -> list[float]:
    found = []
    for stage in STAGES:
        engine, plain = made(stage, accumulation=4), Ddp()
        x, y = batch(0).requires_grad_(), batch(0).requires_grad_()
        mine = torch.autograd.grad(loss_of(engine(x)), [x, *engine.module.parameters()])
        theirs = torch.autograd.grad(loss_of(plain.net(y)), [y, *plain.net.parameters()])
        found.append(differ(list(mine), list(theirs)))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_autograd_grad_returns_are_not_divided(ranks: int) -> None:
    assert max(run_ranks(ranks, returned_gradients)[0]) < 1e-5


# -- other ways of a pass --------------------------------------------------------------------------


def hooks_beside_plain(stage: int) -> list[tuple[list[float], list[float], float]]:
    """What hooks of both kinds see of a weight's gradient, and how far the gradients are off whose
    hooks change them.
    """
    found = []
    for kinds in ("oo", "bo", "ooo"):
        engine, plain = made(stage, accumulation=len(kinds)), Ddp()
        seen: tuple[list[float], list[float]] = ([], [])
        for to, net in zip(seen, (engine.module, plain.net), strict=True):
            first, other = net.head.weight, net.blocks[0].lift.weight
            first.register_hook(lambda g, to=to: to.append(float(g.norm())))
            first.register_hook(lambda g: g.clamp(-0.02, 0.02))
            other.register_hook(lambda g: 3 * g)
            other.register_post_accumulate_grad_hook(
                lambda p, to=to: to.append(float(p.grad.norm()))
            )
        for i, kind in enumerate(kinds):
            loss = loss_of(engine(batch(i)))
            if kind == "b":
                engine.backward(loss)
            else:
                loss.backward()
            (loss_of(plain.net(batch(i))) / len(kinds)).backward()
            if i + 1 < len(kinds):
                engine.step()
        found.append((*seen, differ(gradients(engine.module), plain.gradients())))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_hooks_of_a_script_see_and_change_gradients_that_are_divided(
    stage: int, ranks: int
) -> None:
    for mine, theirs, apart in run_ranks(ranks, hooks_beside_plain, stage)[0]:
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert apart < 1e-5


def frozen_and_thawed() -> list[float]:
    """Own backward passes with accumulation after a part of the model was unfrozen."""
    found = []
    for stage in STAGES:
        net, plain = Net(), Ddp()
        net.blocks[0].requires_grad_(False)
        engine = made(stage, net, accumulation=2)
        engine.module.blocks[0].requires_grad_(True)
        for i in range(2):
            loss_of(engine.module(batch(i))).backward()
            (loss_of(plain.net(batch(i))) / 2).backward()
            if not i:
                engine.step()
        found.append(differ(gradients(engine.module), plain.gradients()))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_that_were_unfrozen_later_are_divided_too(ranks: int) -> None:
    assert max(run_ranks(ranks, frozen_and_thawed)[0]) < 1e-5


def after_unsharded() -> list[tuple[float, list[float]]]:
    found = []
    for stage in STAGES:
        engine, plain = made(stage, accumulation=2), Ddp()
        with onefold.unsharded(engine.module):
            pass
        norms = []
        for step in range(2):
            for i in range(2):
                loss_of(engine.module(batch(2 * step + i))).backward()
                (loss_of(plain.net(batch(2 * step + i))) / 2).backward()
                engine.step()
            norms.append(engine.get_global_grad_norm() / plain.norm())
            plain.step()
        found.append((stage, norms))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_follows_its_module_through_unsharded(ranks: int) -> None:
    for stage, norms in run_ranks(ranks, after_unsharded)[0]:
        assert norms == pytest.approx([1, 1], rel=1e-5), f"stage {stage}: {norms}"


def gradients_before_the_boundary() -> list[tuple[int, float]]:
    """How far `safe_get_full_grad` is from this rank's own gradient, where nothing is reduced."""
    found = []
    for stage in (0, 1):
        engine, plain = made(stage, accumulation=4), Ddp()
        loss_of(engine(batch(0))).backward()
        (loss_of(plain.net(batch(0))) / 4).backward()
        found.append((stage, differ(gradients(engine.module), gradients(plain.net))))
    return found


def test_before_the_boundary_a_full_gradient_is_the_ranks_own() -> None:
    for rank in run_ranks(2, gradients_before_the_boundary):
        for stage, apart in rank:
            assert apart < 1e-5, f"stage {stage}: {apart}"


def destroyed() -> bool:
    engine = made(2, accumulation=2)
    engine.destroy()
    plain = Ddp()
    loss_of(engine.module(batch(0))).backward()
    loss_of(plain.net(batch(0))).backward()
    return differ(gradients(engine.module), plain.gradients()) < 1e-5


def test_a_destroyed_engine_leaves_its_module_alone() -> None:
    assert run_ranks(1, destroyed) == [True] and run_ranks(2, destroyed) == [True, True]
