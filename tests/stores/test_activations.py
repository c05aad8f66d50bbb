"""Saved tensors go to the host and come back: the same bits, once each, within the budget, and nothing
is left behind.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import looks
import onefold
import virtual
from onefold.device import new_stream, use_stream
from onefold.memory import MemoryLedger
from onefold.offload.activations import ACTIVATIONS_MOVING as MOVING
from onefold.offload.activations import ActivationStore
from reference import differences
from zoo import Checkpointing, TinyGPT, TinyMLP, features_of, tokens_of

MIB = 1 << 20


def store_of(
    budget: int = 16 * MIB,
    device: str = "cpu",
    ahead: int = 4096,
    window: int | None = None,
    resident: Callable[[], Any] = tuple,
    smallest: int = 1,
) -> ActivationStore:
    """A store that takes tensors of any size."""
    engine: Any = SimpleNamespace(
        device=torch.device(device), units=(), memory=MemoryLedger(),
        transfers=SimpleNamespace(host=MemoryLedger(), entered=lambda move, unit, nbytes: None),
        gather=SimpleNamespace(by_storage={}), recipe=SimpleNamespace(offload_activations=budget),
    )  # fmt: skip
    store = ActivationStore(engine)
    store.ahead, store.smallest, store.resident = ahead, smallest, resident  # type: ignore[method-assign]
    if window is not None:
        store.side.window = window
    return store


def on_host(store: ActivationStore) -> dict[str, int]:
    """The most bytes of the host that it had, by category."""
    return store.arena.ledger.peak()


@contextlib.contextmanager
def saving(store: ActivationStore | None) -> Iterator[None]:
    """A forward pass under the store's hooks; None is plain PyTorch."""
    if store is not None:
        store.begin_forward()
    try:
        yield
    finally:
        if store is not None:
            store.end_forward()


@pytest.fixture(autouse=True)
def _quick_collections() -> None:
    """What other tests have loaded is not gone over in each collection."""
    gc.freeze()


def held(store: ActivationStore) -> int:
    """Bytes on the host now, without alignment."""
    return sum(copy.nbytes for copy in store._copies if copy.handles)


def assert_nothing_is_left(*stores: ActivationStore) -> None:
    gc.collect()
    for store in stores:
        store.end_backward()
        assert held(store) == 0 and store.ledger.now() == {}, (held(store), store.ledger.now())
        assert store.arena.ledger.now().keys() <= {"idle slabs"}, store.arena.ledger.now()


def train(
    store: ActivationStore | None, checkpointing: Checkpointing = "none", device: str = "cpu"
) -> dict[str, Tensor]:
    """Losses and weights after three steps of a small GPT with dropout."""
    torch.manual_seed(0)
    model = TinyGPT(dropout=0.1, checkpointing=checkpointing).to(device)
    optimizer, out = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step in range(3):
        optimizer.zero_grad()
        with saving(store):
            loss = model(tokens_of(step, length=12 - step).to(device))
        loss.backward()
        if store is not None:
            store.end_backward()
        out[f"loss {step}"] = loss.detach().cpu()
        optimizer.step()
    return out | {name: p.detach().cpu() for name, p in model.named_parameters()}


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpointing", "budget", "ahead"),
    [
        *(("none", budget, 3000) for budget in (0, 5000, 16 * MIB)),
        *((kind, 16 * MIB, 0) for kind in ("reentrant", "non-reentrant")),
    ],
)
def test_training_gives_the_same_bits_within_any_budget(
    checkpointing: Checkpointing, budget: int, ahead: int
) -> None:
    """What has no room stays on the device."""
    store = store_of(budget, ahead=ahead)
    assert differences(train(None, checkpointing), train(store, checkpointing)) == []
    assert sum(on_host(store).values()) <= budget
    assert (store.down > 0) == (budget >= 512)
    assert_nothing_is_left(store)


@virtual.alone
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_late_copies_change_no_bit_and_nothing_is_freed_under_them(
    checkpointing: Checkpointing,
) -> None:
    expected = train(None, checkpointing, "virtual")
    for seed, (window, ahead) in enumerate([(0, MIB), (2000, 0), (2000, 3000), (MIB, 3000)]):
        virtual.start(seed)
        store = store_of(8 * MIB, "virtual", ahead=ahead, window=window)
        assert differences(expected, train(store, checkpointing, "virtual")) == []
        assert [str(v) for v in virtual.violations()] == [] and store.up > 0
        assert_nothing_is_left(store)


def operate(op: int, a: Tensor, b: Tensor, i: int, j: int) -> Tensor:
    """(8, 8), (8, 8) -> (8, 8), bounded"""
    table: list[Callable[[], Tensor]] = [
        lambda: a.sin(),
        lambda: a * b,
        lambda: torch.tanh(a @ b.t()),
        lambda: torch.cat([a[: 1 + j % 8], b[1 + j % 8 :]]).sin(),
        lambda: a.clone().mul_(0.5).tanh_(),
        lambda: torch.where(a > b, a, b * 0.5),
        lambda: a[j % 8].expand(8, 8) * b,
        lambda: torch.softmax(a, i % 2) * b,
        lambda: nn.functional.layer_norm(a, (8,)).tanh(),
        lambda: checkpoint(lambda x, y: (x * y).sin().cos(), a, b, use_reentrant=bool(i % 2)),
    ]
    return table[op % len(table)]()


@given(
    st.lists(st.tuples(*[st.integers(0, 30)] * 3), max_size=25),
    st.sampled_from([1, 600, 4000, MIB]),
    st.sampled_from([0, 1, 700, MIB]),
    st.integers(1, 300),
)
def test_any_graph_gives_the_same_bits(
    program: list[tuple[int, int, int]], budget: int, ahead: int, smallest: int
) -> None:
    """Of views, shared tensors and in-place writes that autograd allows."""
    store, found = store_of(budget, ahead=ahead, smallest=smallest), []
    for used in (None, store, store):
        xs = [features_of(seed, 8, 8).requires_grad_() for seed in range(2)]
        with saving(used):
            pool = [x.sin() for x in xs]
            for op, i, j in program:
                new = operate(op, pool[i % len(pool)], pool[j % len(pool)], i, j)
                if j % 3:
                    pool.append(new)
                else:
                    pool[i % len(pool)] = new  # what stood there may go
            loss = torch.stack(pool).sum()
            del pool
        loss.backward()
        store.end_backward()
        grads = {f"x{i}": x.grad for i, x in enumerate(xs) if x.grad is not None}
        found.append(grads | {"loss": loss.detach()})
    assert differences(found[0], found[1]) == differences(found[0], found[2]) == []
    assert sum(on_host(store).values()) <= budget
    assert_nothing_is_left(store)


class Square(torch.autograd.Function):
    """It asks for what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (a,), (b,) = ctx.saved_tensors, ctx.saved_tensors
        return grad * (a + b)


def lstm(x: Tensor) -> Tensor:
    """Its gates share memory, and are tensors of their own for autograd."""
    torch.manual_seed(0)
    layers = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
    return layers(x.view(5, 10, 8))[0].square().sum()


def versions(x: Tensor) -> Tensor:
    h = x * 2
    early = h.sin()  # saves what is written to below
    h.add_(1)
    out = h.cos().sum()
    out.early = early  # type: ignore[attr-defined]  # its graph lives as long
    return out


def allowed_writes(x: Tensor) -> Tensor:
    """relu_ saves what it wrote, sin what relu_ wrote; mul_ writes to what nobody saved."""
    y = (x * 2).relu_().sin().mul_(3)
    z = y.clone()
    z[:, 3] = 0
    return (z.tanh() * y.detach()).sum()


GRAPHS: dict[str, Callable[[Tensor], Tensor]] = {
    "a Function": lambda x: Square.apply(x * 1).sum(),  # type: ignore[no-untyped-call]
    "an LSTM": lstm,
    "versions of a tensor": versions,
    "writes that autograd allows": allowed_writes,
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_odd_graphs_give_the_same_bits_also_twice_and_twice_differentiated(graph: str) -> None:
    store, found = store_of(), []
    for used in (None, store):
        x = features_of(1, 50, 8).requires_grad_()
        with saving(used):
            loss = GRAPHS[graph](x)
        loss.backward(retain_graph=True)
        if graph != "a Function":
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            first.square().sum().backward()
        found.append({"loss": loss.detach(), "x": x.grad.clone()})
        del loss
        first = None
    assert differences(*found) == [] and store.down > 0
    assert_nothing_is_left(store)


@virtual.alone
def test_what_is_read_on_two_streams_keeps_its_memory_until_both_have_read_it() -> None:
    device = torch.device("virtual:0")
    for seed in range(6):
        virtual.start(seed)
        store = store_of(MIB, "virtual", window=0)
        first, second = new_stream(device), new_stream(device)
        with use_stream(first):
            t = torch.full((64, 64), 3.0, device=device)
            saved = [store.pack(t), store.pack(t.t())]
            del t
            one = store.unpack(saved[0]).sum()
        with use_stream(second):
            other = store.unpack(saved[1]).sum()
        saved.clear()
        with use_stream(first):  # takes the memory that was let go of
            again = torch.empty(64, 64, device=device).fill_(5.0)
        virtual.drain()
        assert [str(v) for v in virtual.violations()] == []
        assert float(one) == float(other) == 3.0 * 64 * 64 and float(again[0, 0]) == 5.0


@virtual.alone
def test_slabs_are_given_back_when_copies_have_read_them() -> None:
    for seed in range(5):
        virtual.start(seed)
        store = store_of(MIB, "virtual")
        t = store.unpack(store.pack(torch.full((64, 64), 3.0, device="virtual")))
        store.arena.close()
        assert virtual.cpu_alias(t).eq(3.0).all()


# -- once down, once up ----------------------------------------------------------------------------


def test_what_several_nodes_save_goes_down_once_and_comes_up_once_and_is_freed() -> None:
    store, nbytes = store_of(), 64 * 64 * 4
    weight = nn.Parameter(features_of(1, 64, 64))
    h = features_of(2, 64, 64).requires_grad_() * 2
    memory = StorageWeakRef(h.untyped_storage())
    with saving(store):
        loss = (h @ weight).sum() + h.sin().sum() + (h.t() @ weight).sum() + h[1:].cos().sum()
    assert store.down == held(store) == nbytes
    assert {k: n for k, n in store.arena.ledger.now().items() if k != "idle slabs"} == {
        "activations": nbytes
    }
    del h
    assert memory.expired(), "it still takes memory on the device"
    loss.backward(retain_graph=True)
    assert store.up == held(store) == nbytes and store.ledger.now() == {}
    loss.backward()
    assert store.up == 2 * nbytes
    assert_nothing_is_left(store)


@virtual.alone
def test_the_device_holds_the_window_on_the_way_down_and_what_is_ahead_on_the_way_up() -> None:
    nbytes, lines = 16 * 16 * 4, 3
    store = store_of(MIB, "virtual", window=lines * nbytes, ahead=lines * nbytes)
    y = features_of(1, 16, 16).to("virtual").requires_grad_() * 1
    with saving(store):
        for _ in range(20):
            y = y.sin()
    assert store.ledger.peak()[MOVING] <= (lines + 1) * nbytes, "the window, and one that begins"
    loss = y.sum()
    del y
    store.ledger.reset_peak()
    loss.backward()
    assert store.ledger.peak()[MOVING] <= lines * nbytes


# -- graphs that end otherwise ---------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("on purpose")


@virtual.alone
def test_graphs_that_are_dropped_raise_or_are_read_in_part_give_their_memory_back() -> None:
    store = store_of(ahead=MIB, window=0, device="virtual")
    x = features_of(1, 20, 20).to("virtual").requires_grad_()
    with saving(store):
        dropped = (x * 2).sin().cos().sum()
        raises = Fails.apply((x * 2).sin().cos()).tanh().sum()  # type: ignore[no-untyped-call]
        unread = (x * 3).sin().cos().tanh().sum()
        read = (x * 3).sin().cos().tanh().sum()
    assert held(store) > 0
    del dropped
    with pytest.raises(ValueError, match="on purpose"):
        raises.backward()
    del raises
    read.backward()
    store.end_backward()
    assert store.ledger.now() == {}, "what came up for the other branch is not needed"
    with pytest.raises(RuntimeError, match="second time"):
        read.backward()
    read_first, x.grad = x.grad, None
    unread.backward()
    assert torch.equal(x.grad, read_first)
    del read, unread
    assert_nothing_is_left(store)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda h: h.add_(1),
    "through a detached tensor": lambda h: h.detach().mul_(2),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_tensor_written_to_after_it_was_saved_is_refused_as_without_the_store(write: str) -> None:
    for store in (None, store_of(), store_of(smallest=1 << 30)):
        for survives in (True, False):
            h = features_of(1, 20, 20).requires_grad_() * 2
            with saving(store):
                loss = h.sin().sum()
            WRITES[write](h)
            if not survives:
                del h
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


# -- what stays ------------------------------------------------------------------------------------


class Labelled(Tensor):
    """A subclass as libraries make them."""


WEIGHT = nn.Parameter(torch.ones(20, 20))
STAYS: dict[str, Callable[[], Tensor]] = {
    "a parameter": lambda: WEIGHT,
    "a subclass": lambda: torch.ones(20, 20).as_subclass(Labelled),  # type: ignore[arg-type]
    "a conjugate": lambda: torch.ones(20, 20, dtype=torch.complex64).conj(),
    "a sparse tensor": lambda: torch.eye(20).to_sparse(),
    "a small one": lambda: torch.ones(3),
    "what is resident": lambda: torch.full((20, 20), 7.0),
}


@pytest.mark.parametrize("kind", STAYS)
def test_what_cannot_go_or_need_not_go_stays(kind: str) -> None:
    t = STAYS[kind]()
    store = store_of(smallest=100, resident=lambda: [t] if kind == "what is resident" else [])
    with saving(store):
        pass
    hooks = store._hooks()
    assert hooks is not None
    with torch.no_grad():
        again = hooks.unpack_hook(hooks.pack_hook(t))
    assert store.down == 0 and again.size() == t.size() and type(again) is type(t)
    assert t.is_sparse or torch.equal(again, t)


# -- in an engine ----------------------------------------------------------------------------------


def sharded(stage: int, precision: Any) -> tuple[Any, ActivationStore]:
    """A model and its store, which takes tensors of any size."""
    recipe = onefold.Recipe.zero(stage, precision=precision, offload_activations=4 * MIB)
    model = onefold.shard(TinyMLP(), recipe)
    store = looks.activations(model)
    store.smallest = 1
    return model, store


def test_a_pass_that_raises_leaves_no_hook_and_a_model_that_goes_leaves_no_memory() -> None:
    model, store = sharded(3, "bf16")
    with pytest.raises(RuntimeError, match="shapes"):
        model(features_of(1, 3, 8))
    assert not torch._C._autograd._top_saved_tensors_default_hooks(False)
    gc.collect()
    assert held(store) == 0
    model, store = sharded(0, "fp32")
    x = features_of(1, 4, 7).requires_grad_()
    loss = model(x).square().sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    h = torch.tanh(model.enter(x))  # a part called by itself is a pass, too
    assert held(store) > 0
    del h, model
    gc.collect()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected), "a graph may outlive its model"
    del loss
    assert held(store) == 0 and MOVING not in store.ledger.now()
    assert not {"activations", "idle slabs"} & store.arena.ledger.now().keys()
