"""Backward passes, steps and reads that come late: what plain PyTorch refuses is refused, all else
is as in plain PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import looks
import onefold
from on_ranks import on_ranks
from reference import built
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STAGES = (0, 1, 2, 3)
REFUSED = r"ran before optimizer.step\(\)"


def sharded(stage: int, build: Any = TinyMLP, **options: Any) -> Any:
    return onefold.shard(built(build), onefold.Recipe.zero(stage, stall_timeout=60.0, **options))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(features_of(seed, 4, 7)).float().square().mean()


def late(model: Any, loss: Callable[[int], Tensor]) -> Tensor:
    """A loss whose parameters have been stepped since its forward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss(0).backward()
    found = loss(1)
    optimizer.step()
    optimizer.zero_grad()
    return found


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_between_forward_and_backward_is_an_error_that_names_a_parameter(stage: int) -> None:
    model = sharded(stage)
    for _ in range(2):  # and the model trains on between the errors
        with pytest.raises(RuntimeError, match=REFUSED) as error:
            late(model, lambda seed: loss_of(model, seed)).backward()
        assert "'blocks.0.down.bias' and 15 others" in str(error.value)
        model.zero_grad()
        loss_of(model, 2).backward()
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
    gpt = sharded(stage, lambda: TinyGPT(checkpointing="non-reentrant"))
    with pytest.raises(RuntimeError, match=REFUSED):
        late(gpt, lambda seed: gpt(tokens_of(seed))).backward()
    inside: list[Tensor] = []  # the loss hangs on an activation inside; the output is not used
    model = sharded(stage)
    model.blocks[1].register_forward_hook(lambda module, args, out: inside.append(out))
    late(model, lambda seed: loss_of(model, seed))
    if stage == 3:
        with pytest.raises(RuntimeError, match=REFUSED):
            inside[1].square().mean().backward()
    plain = TinyMLP()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late(plain, lambda seed: loss_of(plain, seed)).backward()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_writing_or_loading_parameters_in_between_is_an_error_and_reading_is_none(stage: int) -> None:  # fmt: skip
    def write(model: Any) -> None:
        with onefold.full_params(model, write=True):
            model.enter.weight.mul_(2)

    def load(model: Any) -> None:
        onefold.load_full_state_dict(model, onefold.full_state_dict(model) or None)

    for change in (write, load):
        loss = loss_of(model := sharded(stage), 0)
        change(model)
        with pytest.raises(RuntimeError, match="another write to the parameters"):
            loss.backward()
    loss = loss_of(model := sharded(stage), 0)
    with onefold.full_params(model):
        pass
    loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_copies_in_sixteen_bits_serve_a_late_backward_until_they_are_refreshed(stage: int) -> None:
    def gradients(stepped: bool) -> Any:
        model = sharded(stage, precision="bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss_of(model, 0).backward()
        loss = loss_of(model, 1)
        if stepped:
            optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        return [p.grad.norm().item() for p in model.parameters()]

    if stage == 3:  # gathered anew: they cannot serve it
        with pytest.raises(RuntimeError, match=REFUSED):
            gradients(True)
    else:
        assert gradients(True) == gradients(False)
    model = sharded(stage, precision="bf16")
    loss = late(model, lambda seed: loss_of(model, seed))
    with torch.no_grad():
        loss_of(model, 2)
    with pytest.raises(RuntimeError, match=REFUSED):
        loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_several_forwards_and_recomputation_are_told_nothing(stage: int) -> None:
    model = sharded(stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def forwards_then_backwards() -> None:
        for loss in [loss_of(model, seed) for seed in (0, 1)]:
            loss.backward()

    def accumulation() -> None:
        with onefold.no_sync(model):
            loss_of(model, 0).backward()
        with torch.no_grad():
            loss_of(model, 5)
        loss_of(model, 1).backward()

    def dropped_loss() -> None:
        loss_of(model, 0)
        loss_of(model, 1).backward()

    for loop in (forwards_then_backwards, accumulation, dropped_loss) * 2:
        loop()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, 9)


# -- models that are gone, and models in threads ---------------------------------------------------


def clones(stage: int, rate: float = 0.1, **options: Any) -> dict[str, Tensor]:
    """What a model leaves behind after a step; "whole" is a weight that was read as a whole."""
    model = sharded(stage, lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), **options)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model(torch.ones(2, 5) + dist.get_rank()).square().sum().backward()
    found = {f"{n}.grad": p.grad.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    found |= {n: p.detach().float().cpu().clone() for n, p in model.named_parameters()}
    found["whole"] = model[0].weight.onefold.gather()
    engine = weakref.ref(looks.engine(model))
    del model, optimizer
    assert engine() is None
    return found


def compared(stage: int, **options: Any) -> None:
    a, b, c = (clones(stage, rate, **options) for rate in (0.1, 0.1, 0.3))
    names = [name for name in a if name != "whole"]
    assert all((a[n] - b[n]).abs().max().item() == 0 for n in names)
    assert (a["0.weight"] - c["0.weight"]).abs().max().item() > 0
    assert c["0.weight"].sub(c["whole"]).abs().max().item() == 0
    assert a["0.weight"].tolist() == a["whole"].tolist()
    norms = [nn.utils.get_total_norm([x[n] for n in names]).item() for x in (a, b)]
    assert norms[0] == norms[1]


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_clones_of_a_model_that_is_gone_are_compared_and_made_whole(stage: int) -> None:
    compared(stage)


@on_ranks(4)
def test_clones_meet_on_the_ranks_of_their_model() -> None:
    compared(3, shard_group=2)


class ReadsWeights(TinyMLP):
    """Reads a weight of a block, whose module does not, in its forward pass."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.blocks[0].up.weight.float().mean()  # type: ignore[union-attr]


@on_ranks(2, fresh=True)
def test_models_that_threads_train_at_once_train_as_alone() -> None:
    import sys

    stages = (3, 2, 3, 0)
    # Each model has communicators of its own over the ranks: threads come to theirs in any order
    groups = [dist.new_group() for _ in stages]
    found: dict[int, Any] = {}

    def losses(seed: int) -> list[float]:
        model: Any = ReadsWeights()
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(features_of(100 * seed + number, *p.shape) / 4)
        recipe = onefold.Recipe.zero(stages[seed], precision="bf16", stall_timeout=60.0)
        onefold.shard(model, recipe, group=groups[seed])
        optimizer, out = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for step in range(6):
            loss = loss_of(model, seed + step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out += [loss.item(), model.blocks[1].up.weight.norm().item()]
        return out

    def work(seed: int) -> None:
        found[seed] = losses(seed)

    alone = {seed: losses(seed) for seed in range(4)}
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone
    del threads
    gc.collect()


# -- ranks that ask for different numbers ----------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(40, 8)), nn.Parameter(torch.randn(40, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.a) * (x @ self.b)).sum()


#: {name: (what rank 0 asks for, what the others ask for)}, of the model and its optimizer
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "norms": (lambda m, _: m.a.data.norm(), lambda m, _: m.b.data.norm()),
    "1-norms": (lambda m, _: m.a.data.norm(1), lambda m, _: m.a.data.norm()),
    "a sum and a mean": (lambda m, _: m.a.data.sum(), lambda m, _: m.a.data.mean()),
    "maxima": (lambda m, _: m.a.data.max(), lambda m, _: m.b.data.max()),
    "any": (lambda m, _: (m.a.data > 9).any(), lambda m, _: (m.b.data > 0).any()),
    "equal": (lambda m, _: torch.equal(m.a.data, m.a.data.clone()), lambda m, _: torch.equal(m.b.data, m.b.data + 1)),
    "a gradient and its parameter": (lambda m, _: m.a.grad.norm(), lambda m, _: m.a.data.norm()),
    "moments": (lambda m, o: o.state[m.a]["exp_avg"].norm(), lambda m, o: o.state[m.b]["exp_avg"].norm()),
    "rows": (lambda m, _: m.a.data[1].norm(), lambda m, _: m.a.data[2].norm()),
    "long lists": (lambda m, _: torch._foreach_norm([m.a.data, m.b.data] * 4), lambda m, _: torch._foreach_norm([m.b.data, m.a.data] * 4)),
    "a list and one": (lambda m, _: torch._foreach_norm([m.a.data, m.b.data] * 4), lambda m, _: m.a.data.norm()),
    "clipping of parts": (lambda m, _: nn.utils.clip_grad_norm_([m.a], 1.0), lambda m, _: nn.utils.clip_grad_norm_([m.b], 1.0)),
}  # fmt: skip


def asked(stage: int, group: Any = None) -> None:
    model: Any = onefold.shard(built(Two), onefold.Recipe.zero(stage, stall_timeout=10.0), group=group)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 40)).backward()
    optimizer.step()
    for name, (one, others) in DIFFERENT.items():
        with pytest.raises(RuntimeError) as error:
            print(name, (one if dist.get_rank() == 0 else others)(model, optimizer))
        assert "every rank must call the same, in the same order." in str(error.value), name
        assert f"rank {dist.get_rank()} called" in str(error.value)
        with onefold.full_params(model):  # the same question is answered afterwards
            whole = model.a.detach().norm()
        torch.testing.assert_close(model.a.data.norm(), whole)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_ask_for_different_numbers_are_told_so(stage: int) -> None:
    asked(stage)


@on_ranks(3)
def test_three_ranks_are_told_both_names() -> None:
    asked(3)
    model = onefold.shard(built(Two), onefold.Recipe.zero(3, stall_timeout=10.0))
    mine, theirs = ("a", "b") if dist.get_rank() == 0 else ("b", "a")
    with pytest.raises(RuntimeError, match=f"called the norm of '{mine}' while .* of '{theirs}'"):
        (model.a if dist.get_rank() == 0 else model.b).data.norm()


@on_ranks(2)
def test_they_are_told_on_a_backend_that_computes_on_the_device() -> None:
    import standin

    asked(3, standin.new_group())


@on_ranks(2, fresh=True)
def test_reads_of_different_wholes_are_never_taken_for_each_other() -> None:
    model = onefold.shard(built(Two), onefold.Recipe.zero(3, stall_timeout=2.0))
    with pytest.raises(onefold.StallError, match="which every rank must call"):
        (model.a if dist.get_rank() == 0 else model.b).data.tolist()


@on_ranks(2, fresh=True)
def test_ranks_that_differentiate_otherwise_are_told_and_do_not_hang(folder: Path) -> None:
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=2.0))
    loss, said = loss_of(model, 0), "nothing"
    try:
        if dist.get_rank() == 0:
            torch.autograd.grad(loss, list(model.parameters()))
        else:
            loss.backward()
    except onefold.StallError as error:
        said = str(error)
    (folder / str(dist.get_rank())).write_text(said)
    other, until = folder / str(1 - dist.get_rank()), time.monotonic() + 60
    while not (other.exists() and other.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    assert {said, other.read_text()} != {"nothing"}


# -- gradients that wait for the boundary ----------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}), (1, {}), (2, {"reduce_at": "boundary"}), (3, {"reduce_at": "boundary"}),
        (1, {"precision": "bf16"}), (1, {"offload_optimizer": "cpu"}), (3, {"shard_group": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_reduced_after_the_passes_are_those_of_the_boundarys_pass(stage: int, options: Any) -> None:  # fmt: skip
    found = []
    for later in (False, True):
        model = sharded(stage, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            with onefold.no_sync(model):
                loss_of(model, 100 * step + dist.get_rank()).backward()
                loss = loss_of(model, 100 * step + 50 + dist.get_rank())
                if later:
                    loss.backward()
                    looks.engine(model).reduce_pending()  # goes on waiting
            if not later:
                loss.backward()
            looks.engine(model).reduce_pending()
            optimizer.step()
        found.append(onefold.full_state_dict(model))
    assert all(torch.equal(t, found[1][n]) for n, t in found[0].items())


# -- buffers and groups ----------------------------------------------------------------------------


@on_ranks(2)
def test_buffers_are_one_message_a_pass_that_rank_0_sends() -> None:
    for which in (True, "norms", False):
        model = sharded(3, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), sync_buffers=which)  # fmt: skip
        model.register_buffer("other", torch.zeros(3))
        sent = []
        for k in range(4):
            looks.watch(model)
            with onefold.no_sync(model) if k in (1, 2) else contextlib.nullcontext():
                model(torch.randn(4, 8)).sum().backward()
            sent.append([m[3] for m in looks.moves(model) if m[2] == "buffers"])
        norms = sum(b.nbytes for b in model[1].buffers())
        nbytes = {True: norms + 12, "norms": norms, False: 0}[which] * (dist.get_rank() == 0)
        # The first pass, and that behind it; those behind a pass under no_sync begin without
        assert sent == ([[nbytes], [nbytes], [], []] if which else [[], [], [], []])


@on_ranks(3, fresh=True)
def test_groups_that_a_script_makes_before_and_after_shard_meet() -> None:
    """Ranks 0 and 1 shard over a subset, and make one more group among themselves."""
    recipe = onefold.Recipe.zero(3, stall_timeout=60.0)
    pair, sums = dist.new_group([0, 1]), []
    if dist.get_rank() < 2:
        onefold.shard(TinyMLP(), recipe, group=pair)
        own = dist.new_group([0, 1], use_local_synchronization=True)
        dist.all_reduce(both := torch.ones(()), group=own)
        sums.append(float(both))
    model = onefold.shard(TinyMLP(), recipe)
    model(torch.ones(2, 7)).sum().backward()
    if dist.get_rank() == 2:
        # Some versions of torch count each rank's groups, and need as many on each
        dist.new_group([2], use_local_synchronization=True)
    for members in ([0, 1, 2], [1, 2]):
        group, one = dist.new_group(members), torch.ones(())
        if dist.get_rank() in members:
            dist.all_reduce(one, group=group)
        sums.append(float(one))
    assert sums == [[2, 3, 1], [2, 3, 2], [3, 2]][dist.get_rank()]
