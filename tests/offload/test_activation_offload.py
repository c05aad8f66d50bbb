"""With activations on the host every stage gives the bits it gives without, and what the engine
holds on the device anyway stays there.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from observed_activations import offloaded, top_hooks
from torch import Tensor, nn

import onefold
from onefold.observe import watch_activations
from onefold.offload.activations import ACTIVATIONS_MOVING, ACTIVATIONS_ON_HOST
from ranks import run_ranks
from trials import STAGES, STALL_TIMEOUT, Curve, GPTCase, differences, fresh, train, train_sharded
from zoo import Checkpointing, TinyGPT, TinyMLP, features_of, tokens_of

MIB = 1 << 20


@dataclass
class Run(GPTCase):
    """A GPT with dropout, several micro-batches a step if asked for."""

    checkpointing: Checkpointing = "none"
    micro_batches: int = 1
    precision: str = "fp32"
    steps: int = 3

    def __post_init__(self) -> None:
        super().__init__()
        self.options = {"precision": self.precision}

    def build(self) -> nn.Module:
        return TinyGPT(dropout=0.1, checkpointing=self.checkpointing)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(self.micro_batches):
            loss = (
                self.loss(model, self.batch(rank, step * self.micro_batches + micro))
                / self.micro_batches
            )
            loss.backward()
            total += loss.item()
        onefold.clip_grad_norm_(model, 0.5)
        optimizer.step()
        return total


def train_offloaded(run: Run, stage: int, budget: int) -> tuple[Curve, Any]:
    recipe = onefold.Recipe.zero(
        stage, stall_timeout=STALL_TIMEOUT, offload_activations=budget, **run.options
    )
    model, store = offloaded(fresh(run), recipe)
    return train(run, model, model, lambda: onefold.full_state_dict(model)), store


def assert_none(found: list[list[str]]) -> None:
    problems = [sentence for sentences in found for sentence in sentences]
    assert not problems, "\n".join(problems)


def compare(run: Run, stages: tuple[int, ...] = STAGES) -> list[str]:
    """On one rank: each stage with and without, bit by bit."""
    found = []
    for stage in stages:
        plain = train_sharded(run, stage)
        for budget in (4 * MIB, 20_000):
            curve, store = train_offloaded(run, stage, budget)
            name = f"rank {dist.get_rank()}, stage {stage}, {budget} bytes"
            found += differences(f"{name}, against none", plain, curve, 0.0, 0.0)
            peak = sum(
                n
                for category, n in store.arena.ledger.peak().items()
                if category in (ACTIVATIONS_ON_HOST, "idle slabs")
            )
            if not store.down or store.held or peak > budget:
                found.append(
                    f"{name}: {store.down} went down, {store.held} are left, {peak} at the peak"
                )
            if (store.refused > 0) != (budget == 20_000):
                found.append(f"{name}: {store.refused} bytes had no room")
    return found


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_every_stage_gives_the_same_bits(checkpointing: Checkpointing) -> None:
    found = run_ranks(2, compare_some, Run(checkpointing=checkpointing))
    assert_none(found)


def compare_some(run: Run) -> list[str]:
    # Checkpoints leave little to move: their inputs fit in any budget.
    return [s for s in compare(run) if run.checkpointing == "none" or "had no room" not in s]


def test_micro_batches_give_the_same_bits() -> None:
    found = run_ranks(2, compare, Run(micro_batches=3, steps=2))
    assert_none(found)


def test_16_bits_give_the_same_bits() -> None:
    found = run_ranks(2, compare_16, Run(precision="bf16"))
    assert_none(found)


def compare_16(run: Run) -> list[str]:
    return [s for s in compare(run) if "had no room" not in s]  # half the bytes


# -- one rank --------------------------------------------------------------------------------------


def alone(
    stage: int, precision: str = "fp32", model: nn.Module | None = None, budget: int = 4 * MIB
) -> tuple[nn.Module, Any]:
    """fp32 on one rank divides and casts nothing: the parameters stay where they are."""
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(stage, precision=precision, offload_activations=budget)
    return offloaded(model if model is not None else TinyGPT(), recipe)


CASES = [(stage, precision) for stage in STAGES for precision in ("fp32", "bf16")]


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_one_rank_gives_the_same_bits(stage: int, precision: str) -> None:
    curves = []
    for moving in (False, True):
        torch.manual_seed(0)
        model: Any = TinyGPT(dropout=0.1)
        recipe = onefold.Recipe.zero(stage, precision=precision)  # type: ignore[arg-type]
        store = None
        if moving:
            model, store = alone(stage, precision, model)
        else:
            onefold.shard(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        torch.manual_seed(1)
        losses = []
        for step in range(3):
            loss = model(tokens_of(step))
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        assert store is None or (store.down > 0 and store.held == 0)
        curves.append((losses, onefold.full_state_dict(model)))
    (plain, weights), (found, others) = curves
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), (
        f"{plain} became {found}"
    )
    assert all(torch.equal(weights[name], others[name]) for name in weights)


class WithBuffers(nn.Module):
    """Saves parameters, views of them made without autograd, and a buffer, besides its
    activations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.register_buffer("scale", torch.full((8, 32), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale.to(x.dtype)
            x = x + (x * x) @ block.weight.detach()
        return x.sum()


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_parameters_and_buffers_stay(stage: int, precision: str) -> None:
    model, store = alone(stage, precision, WithBuffers())
    engine = onefold.engine_of(model)
    there = {p.untyped_storage()._cdata for p in model.buffers()}
    for _ in range(2):
        loss = model(features_of(1, 8, 32))
        for unit in engine.units:
            for flat in unit.flats:
                held = [flat.full, *(e.compute for e in flat.entries)]
                there |= {t.untyped_storage()._cdata for t in held if t is not None}
        down = {copy.key[0] for copy in store._found.values()}
        assert down and not down & there
        loss.backward()


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_what_is_watched_and_what_is_on_the_host_are_all_that_is_saved(
    stage: int, precision: str
) -> None:
    torch.manual_seed(0)
    plain = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, precision=precision))  # type: ignore[arg-type]
    with watch_activations(plain) as watched:
        loss = plain(tokens_of(0))
        everything = sum(watched.now().values())
        loss.backward()
    model, store = alone(stage, precision)
    store.smallest = 1000
    with watch_activations(model) as watched:
        loss = model(tokens_of(0))
        rest = sum(watched.now().values())
        assert store.held > 0 and rest > 0
        assert rest + store.held == everything, (
            f"{rest} watched and {store.held} on the host, {everything} without"
        )
        loss.backward()
        assert watched.now() == {} and store.held == 0


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_the_engines_ledgers_say_what_went_where(stage: int, precision: str) -> None:
    model, store = alone(stage, precision)
    engine = onefold.engine_of(model)
    at_rest = engine.memory.now()
    loss = model(tokens_of(0))
    host = engine.transfers.host.now()
    assert host[ACTIVATIONS_ON_HOST] == store.arena.used >= store.held > 0
    loss.backward()
    for p in model.parameters():
        p.grad = None
    now = engine.memory.now()
    assert ACTIVATIONS_MOVING not in now and now.get("master weights") == at_rest.get(
        "master weights"
    )
    assert ACTIVATIONS_ON_HOST not in engine.transfers.host.now()


def test_without_bytes_in_the_recipe_there_are_no_hooks() -> None:
    seen: list[Any] = []

    class Looks(TinyMLP):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(top_hooks())
            return super().forward(x)

    model = onefold.shard(Looks(), onefold.Recipe.zero(2, precision="bf16"))
    model(features_of(1, 3, 7)).sum().backward()
    assert seen == [None] and not hasattr(onefold.engine_of(model).activations, "store")
    other, _ = alone(2, "bf16", Looks())
    with torch.no_grad():
        other(features_of(1, 3, 7))
    assert seen == [None, None], "a pass without gradients saves nothing"
    other(features_of(1, 3, 7)).sum().backward()
    assert seen[2] is not None


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_an_error_in_the_forward_pass_leaves_no_hook_and_no_memory(
    stage: int, precision: str
) -> None:
    model, store = alone(stage, precision, TinyMLP())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            model(features_of(1, 3, 8))
        assert top_hooks() is None
        gc.collect()
        assert store.held == 0
    model(features_of(1, 3, 7)).sum().backward()
    assert store.down > 0 and store.held == 0 and top_hooks() is None


class WritesInPlace(TinyMLP):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.enter(x))
        z = y.sin()
        y.add_(1)
        return self.leave(z)


@pytest.mark.parametrize("smallest", [1, 1 << 30], ids=["moved", "kept"])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_a_write_to_a_saved_tensor_is_refused(stage: int, precision: str, smallest: int) -> None:
    model, store = alone(stage, precision, WritesInPlace())
    store.smallest = smallest
    loss = model(features_of(1, 3, 7)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_a_deleted_model_gives_its_host_memory_back(stage: int, precision: str) -> None:
    model, store = alone(stage, precision)
    loss = model(tokens_of(0))
    loss.backward()
    assert store.arena.reserved > 0
    del loss
    ledger = store.arena.ledger
    del model
    gc.collect()
    assert store.arena.reserved == 0 and ledger.now().get("idle slabs", 0) == 0


def test_a_graph_that_outlives_its_model_can_still_be_read() -> None:
    model, store = alone(0, "fp32", TinyMLP())
    x = features_of(1, 4, 7).requires_grad_()
    loss = model(x).square().sum()
    expected = torch.autograd.grad(loss, x, retain_graph=True)[0]
    del model
    gc.collect()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    del loss
    assert (store.held, store.arena.reserved) == (0, 0)


def test_parts_called_by_themselves_are_passes_too() -> None:
    model, store = alone(3, "bf16", TinyMLP())
    x: Any = features_of(1, 4, 7)
    h = torch.tanh(model.enter(x))  # type: ignore[operator, union-attr]
    for block in model.blocks:  # type: ignore[union-attr]
        h = block(h)
    assert store.down > 0
    model.leave(h).sum().backward()  # type: ignore[operator, union-attr]
    grads = [p.grad for p in model.parameters()]
    torch.manual_seed(0)
    plain = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, precision="bf16"))
    onefold.load_full_state_dict(plain, onefold.full_state_dict(model))
    h = torch.tanh(plain.enter(x))  # type: ignore[operator]
    for block in plain.blocks:  # type: ignore[union-attr]
        h = block(h)
    plain.leave(h).sum().backward()  # type: ignore[operator]
    for grad, p in zip(grads, plain.parameters(), strict=True):
        assert grad is not None and p.grad is not None and torch.equal(grad, p.grad)


def test_a_second_model_inside_the_loop_is_not_touched() -> None:
    teacher, teachers = alone(3, "bf16", TinyMLP(), budget=2 * MIB)
    student, students = alone(0, "fp32", TinyMLP())
    x = features_of(1, 4, 7).requires_grad_()
    grads = []
    for offloaded_ in (True, False):
        teachers.smallest = students.smallest = 1 if offloaded_ else 1 << 30
        loss = (student(x) - teacher(x)).square().sum()
        assert (teachers.held > 0) == (students.held > 0) == offloaded_
        grads.append(torch.autograd.grad(loss, x)[0])
        del loss
        assert teachers.held == students.held == 0
    assert torch.equal(*grads)
