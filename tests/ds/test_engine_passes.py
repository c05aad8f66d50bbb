"""What an engine does to gradients, whoever runs the backward passes and whenever it reduces them,
beside a plain model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from ds.engines import (
    HOST,
    STAGES,
    Make,
    Plain,
    apart,
    batch,
    loss_of,
    made,
    masters,
    served,
    some,
    train,
    whole_gradients,
)
from on_ranks import on_ranks
from reference import built
from zoo import TinyGPT, TinyMLP, tokens_of


def small_gpt() -> nn.Module:
    return TinyGPT(vocabulary=11, width=8, depth=2, length=6)


@dataclass(frozen=True)
class Row:
    """Two steps of a script.

    Attributes:
        passes: one letter a micro-batch. b: `engine.backward(loss)`; o: the loss's own `backward`;
            s: that of `engine.scale(loss)`; w: `engine.backward(loss, scale_wrt_gas=False)`.
        loss: (model or engine, index of the micro-batch) -> loss.
        after: done to the engine's module once it is made.
        around: what the script has around the passes of a step, given the engine.
        json: more of the configuration; "gradient_accumulation_steps" is the number of passes if
            it is not here.
        times: what the plain model's gradients are multiplied with.
        near: how far gradients may be apart, as a share of the largest.
    """

    passes: str = "b"
    loss: Callable[[Any, int], Tensor] = lambda model, i: loss_of(model(batch(i)))
    make: Make = TinyMLP
    frozen: bool = False
    after: Callable[[nn.Module], Any] = lambda model: None
    around: Callable[[Any], Any] = lambda engine: contextlib.nullcontext()
    json: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = STAGES
    times: float = 1.0
    near: float = 1e-5


def with_hooks(model: Any) -> None:
    model.leave.weight.register_hook(lambda g: g.clamp(-0.02, 0.02))
    model.blocks[0].up.weight.register_hook(lambda g: 3 * g)


def half_loss(model: Any, i: int) -> Tensor:
    return loss_of(model(batch(i).half()) if hasattr(model, "global_steps") else model(batch(i)))


ONCE = {"gradient_accumulation_steps": 1}
COALESCED = {
    "passes": "bbb", "around": lambda e: e.coalesce_grad_reduction(), "times": 3.0, "stages": (1, 2, 3),
}  # fmt: skip
ROWS = {
    "by the engine": Row("bbb"),
    "by the loss": Row("ooo"),
    "by the engine, then the loss": Row("bo"),
    "all four": Row("bsow"),
    "of the module": Row("oo", loss=lambda m, i: loss_of(getattr(m, "module", m)(batch(i)))),
    "of a method": Row("o", loss=lambda m, i: m.logits(tokens_of(i, 2, 6, 11)).square().mean(),
                       make=small_gpt),
    "of a part": Row("oo", loss=lambda m, i: m.blocks[1](batch(i) @ torch.ones(7, 10)).mean()),
    "without a forward pass": Row("o", loss=lambda m, i: m.leave.weight.square().sum() / (1 + i)),
    "with hooks of the script": Row("bb", after=with_hooks, stages=(0, 1)),
    "thawed later": Row("oo", frozen=True, after=lambda m: m.blocks.requires_grad_(True)),
    "summed over ranks": Row("bo", json={"gradient_allreduce_op": "sum"}, times=-1.0),
    "summed, bf16": Row("b", json={"gradient_allreduce_op": "sum", "bf16": {"enabled": True}},
                        loss=lambda m, i: loss_of(m(batch(i).to(next(m.parameters()).dtype))),
                        times=-1.0, near=5e-2),
    "clipped": Row("bb", json={"gradient_clipping": 0.05}),
    "offloaded": Row("bo", json={"zero": HOST}, stages=(1, 2, 3)),
    "one reduction": Row(json=ONCE, **COALESCED),
    "one reduction, offloaded": Row(json={**ONCE, "zero": HOST}, **COALESCED),
    "one reduction, fp16": Row(json={**ONCE, "fp16": {"enabled": True, "loss_scale": 8}},
                               loss=half_loss, near=5e-3, **COALESCED),
    "under no_sync": Row("bb", json=ONCE, around=lambda e: e.no_sync(), times=2.0, stages=(0, 1)),
    "under onefold.no_sync": Row("oo", around=lambda e: onefold.no_sync(e.module), json=ONCE,
                                 times=2.0, stages=(2, 3)),
}  # fmt: skip


def train_beside_a_plain_model(row: Row, stage: int) -> None:
    ranks = torch.distributed.get_world_size()
    count = len(row.passes)
    model, plain = built(row.make), Plain(built(row.make))
    if row.frozen:
        model.blocks[0].requires_grad_(False)
    engine = made(stage, model, **{"gradient_accumulation_steps": count, **row.json})
    row.after(engine.module)
    if row.after is with_hooks:
        row.after(plain.model)
    scale, clip = engine.cur_scale, row.json.get("gradient_clipping", 0.0)
    for step in range(1 if row.frozen else 2):
        with row.around(engine):
            for at, letter in enumerate(row.passes):
                loss = row.loss(engine, count * step + at)
                if letter in "os":
                    (engine.scale(loss) if letter == "s" else loss).backward()
                else:
                    engine.backward(loss, **({"scale_wrt_gas": False} if letter == "w" else {}))
                theirs = row.loss(plain.model, count * step + at)
                times = ranks if row.times < 0 else row.times
                (theirs * times / (1 if letter == "w" else count)).backward()
                if at + 1 < count and "gradient_accumulation_steps" not in row.json:
                    assert not engine.is_gradient_accumulation_boundary()
                    engine.step()
        if row.around is Row.around:
            mine = [grad / scale for grad in whole_gradients(engine)]
            assert apart(mine, plain.gradients()) < row.near
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == step + 1
        norm = plain.step(clip)
        assert norm > clip, "clipping acts"
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=row.near)
    if not row.frozen:  # else the optimizer does not have what was thawed
        assert apart(masters(engine), plain.weights()) < row.near


@on_ranks(2)
@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_those_of_a_plain_model(name: str, every: bool) -> None:
    for stage in some(ROWS[name].stages, every, list(ROWS).index(name)):
        train_beside_a_plain_model(ROWS[name], stage)


# -- before the boundary ---------------------------------------------------------------------------


@on_ranks(2)
def test_before_the_boundary_a_full_gradient_is_the_ranks_own() -> None:
    for stage, json in ((0, {}), (1, {"gradient_accumulation_steps": 4})):
        engine, plain = made(stage, **json), Plain()
        with contextlib.nullcontext() if json else engine.no_sync():
            loss_of(engine(batch(0))).backward()
            (loss_of(plain.model(batch(0))) / (4 if json else 1)).backward()
        assert apart(whole_gradients(engine), plain.own_gradients()) < 1e-5
        weight = engine.enter.weight
        with pytest.raises(RuntimeError, match="after the last micro-batch"):
            served().utils.safe_set_full_grad(weight, torch.zeros(weight.shape))


@on_ranks(2)
def test_a_step_without_a_pass_applies_no_gradient_again() -> None:
    for stage, clip in ((0, 0.0), (3, 0.05)):
        engine = made(stage, gradient_clipping=clip)
        train(engine, range(1))
        before = masters(engine)
        assert any(grad.any() for grad in whole_gradients(engine)), "they stay until then"
        engine.step()
        assert all(map(torch.equal, before, masters(engine)))


@on_ranks(2)
def test_without_management_every_step_applies_what_has_accumulated() -> None:
    """Steps of 3, 1 and 2 micro-batches under a configuration that says 2."""
    json = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    for stage in STAGES:
        engine, plain, index = made(stage, zero=HOST if stage else None, **json), Plain(), 0
        for step, count in enumerate((3, 1, 2)):
            for i in range(index, index + count):
                loss = loss_of(engine(batch(i))) / count
                if i % 2:
                    engine.backward(loss, scale_wrt_gas=False)
                else:
                    (loss * 2).backward()  # divided by the 2 of the configuration
                (loss_of(plain.model(batch(i))) / count).backward()
            engine.step()
            plain.step()
            index += count
            assert engine.was_step_applied() and engine.global_steps == step + 1
        assert engine.global_samples == 48
        assert apart(masters(engine), plain.weights()) < 1e-5


# -- several losses, engines and graphs ------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_backward_passes_over_one_graph_add_up_or_replace_each_other(stage: int) -> None:
    engine, plain = made(stage, built(small_gpt)), Plain(built(small_gpt))
    tokens = tokens_of(torch.distributed.get_rank(), 2, 6, 11)
    for clears in (True, False):
        sides = [(engine, engine.logits(tokens)), (plain.model, plain.model.logits(tokens))]
        for model, _ in sides:
            model.zero_grad()
        for part, retain in enumerate((True, False)):
            for model, output in sides:
                if clears:
                    model.zero_grad()
                loss_of(output[part:]).backward(retain_graph=retain)
            if clears or part:
                assert apart(whole_gradients(engine), plain.gradients()) < 1e-5


# -- what is refused -------------------------------------------------------------------------------


@on_ranks(2)
def test_in_fp16_a_pass_that_nothing_scaled_is_refused_at_once() -> None:
    fp16 = {"enabled": True, "loss_scale": 128}
    for stage in (0, 3):
        norms = []
        for also in (False, True):
            engine = made(stage, fp16=fp16)
            if also:
                with pytest.raises(RuntimeError, match=r"Loss scaling is required in fp16"):
                    loss_of(engine(batch(7).half())).backward()
            engine.scale(loss_of(engine(batch(0).half()))).backward()
            engine.step()
            norms.append(engine.get_global_grad_norm())
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@on_ranks(2)
def test_unused_parameters_are_named_if_the_configuration_does_not_ignore_them() -> None:
    for stage, ignored in ((1, True), (1, False), (2, False)):
        model = built(TinyMLP)
        model.unused = nn.Linear(2, 2)
        engine = made(stage, model, {"ignore_unused_parameters": ignored})
        engine.backward(loss_of(engine(batch(0))))
        if ignored:
            engine.step()
            continue
        with pytest.raises(AssertionError, match=r"since the last step: unused\.weight"):
            engine.step()
