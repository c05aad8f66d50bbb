"""Saved tensors go to the host and come back: the same bits, once each, within the budget, and
nothing is left behind.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_copies import late
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from onefold.offload.activations import ACTIVATIONS_MOVING, ACTIVATIONS_ON_HOST, ActivationStore
from onefold.offload.arena import ALIGNMENT, IDLE_SLABS
from onefold.offload.saved import Copy, Kept, Moved
from zoo import Checkpointing, TinyGPT, features_of, tokens_of

CPU = torch.device("cpu")
MIB = 1 << 20


def store_of(budget: int = 16 * MIB, **options: Any) -> ActivationStore:
    """A store that takes tensors of any size."""
    return ActivationStore(CPU, budget, **{"smallest": 1, "ahead": 1 << 12, **options})


@contextlib.contextmanager
def saving(store: ActivationStore | None) -> Iterator[None]:
    """A forward pass under the store's hooks; None is plain PyTorch."""
    hooks = None
    if store is not None:
        store.begin_forward()
        hooks = store.hooks()
    with hooks or contextlib.nullcontext():
        yield


def assert_nothing_is_left(store: ActivationStore) -> None:
    now = {**store.ledger.now(), **store.arena.ledger.now()}
    assert store.held == store.arena.used == 0, (
        f"{store.held} bytes are held, {store.arena.used} used"
    )
    assert now in ({}, {IDLE_SLABS: store.arena.reserved}), now
    assert not store._found and store._last is None and not store._in_window and not store._risen


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(
    store: ActivationStore | None,
    checkpointing: Checkpointing = "none",
    steps: int = 3,
    **passes: Any,
) -> tuple[list[Tensor], Any]:
    """Losses, and gradients of the last step, of a small GPT with dropout."""
    torch.manual_seed(0)
    model = TinyGPT(dropout=0.1, checkpointing=checkpointing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with saving(store):
            loss = model(tokens_of(step, length=12 - step))
        loss.backward(**passes)
        if passes.get("retain_graph"):
            loss.backward()
        if store is not None:
            store.end_backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, gradients(model)


def differences(expected: Any, found: Any) -> list[str]:
    (losses, grads), (other_losses, other_grads) = expected, found
    out = [
        f"loss {i}: {a} became {b}"
        for i, (a, b) in enumerate(zip(losses, other_losses, strict=True))
        if not torch.equal(a, b)
    ]
    out += [
        name
        for name in grads.keys() | other_grads.keys()
        if not torch.equal(grads[name], other_grads[name])
    ]
    return out


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 3000, MIB])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_training_gives_the_same_bits(checkpointing: Checkpointing, ahead: int) -> None:
    store = store_of(ahead=ahead)
    assert differences(train(None, checkpointing), train(store, checkpointing)) == []
    assert store.down > 0 and store.up > 0
    assert_nothing_is_left(store)


@pytest.mark.parametrize("window", [0, 2000, MIB])
@pytest.mark.parametrize("ahead", [0, 3000, MIB])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_copies_that_run_late_change_no_bit_and_nothing_is_freed_under_them(
    checkpointing: Checkpointing, ahead: int, window: int
) -> None:
    store = store_of(ahead=ahead, window=window)
    side = late(store)
    assert differences(train(None, checkpointing), train(store, checkpointing)) == []
    assert side.problems == []
    assert store.down > 0
    assert_nothing_is_left(store)


@pytest.mark.parametrize("copies", ["at once", "late"])
def test_a_retained_graph_is_read_twice_and_leaves_nothing_on_the_device_in_between(
    copies: str,
) -> None:
    store = store_of(window=1000)
    side = late(store) if copies == "late" else None
    assert differences(train(None, retain_graph=True), train(store, retain_graph=True)) == []
    assert side is None or side.problems == []
    assert_nothing_is_left(store)

    h = torch.randn(50, 50, requires_grad=True) * 2
    with saving(store):
        y = h.sin().cos().tanh().sum()
    del h
    held, up = store.held, store.up
    for passes in (1, 2):
        y.backward(retain_graph=True)
        assert store.held == held, "the graph is retained"
        assert store.up - up <= passes * held, (
            f"{store.up - up} bytes came up in {passes} passes over {held}"
        )
        assert ACTIVATIONS_MOVING not in store.ledger.now()
    assert store.up > up + held, "the second pass read nothing again"


def penalised(store: ActivationStore | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Sigmoid(), nn.Linear(20, 1)
    )
    with saving(store):
        loss = model(features_of(1, 9, 6)).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum((g.square().sum() for g in first), loss)
    assert isinstance(penalty, Tensor)
    penalty.backward()
    return gradients(model)


@pytest.mark.parametrize("copies", ["at once", "late"])
def test_gradients_of_gradients_are_the_same_bits(copies: str) -> None:
    store = store_of()
    side = late(store) if copies == "late" else None
    expected, found = penalised(None), penalised(store)
    assert expected.keys() == found.keys() and all(
        torch.equal(expected[name], found[name]) for name in expected
    )
    assert store.down > 0 and (side is None or side.problems == [])
    gc.collect()
    assert_nothing_is_left(store)


OPERATIONS = 14


def operate(op: int, a: Tensor, b: Tensor, i: int, j: int) -> Tensor:
    """(8, 8), (8, 8) -> (8, 8), bounded"""
    table: dict[int, Callable[[], Tensor]] = {
        0: lambda: a.sin(),
        1: lambda: a * b,
        2: lambda: torch.tanh(a @ b.t()),
        3: lambda: (a.t() + 1).cos().t(),
        4: lambda: torch.cat([a[: 1 + j % 8], b[1 + j % 8 :]]).sin(),
        5: lambda: a[:, ::2].repeat_interleave(2, 1).sigmoid(),
        6: lambda: a.clone().mul_(0.5).tanh_(),
        7: lambda: torch.where(a > b, a, b * 0.5),
        8: lambda: a[j % 8].expand(8, 8) * b,
        9: lambda: torch.softmax(a, i % 2) * b,
        10: lambda: a.chunk(2, 1)[j % 2].sin().repeat(1, 2),
        11: lambda: nn.functional.layer_norm(a, (8,)).tanh(),
        12: lambda: a.index_select(0, torch.arange(8).flip(0)) * a.diagonal(),
        13: lambda: checkpoint(lambda x, y: (x * y).sin().cos(), a, b, use_reentrant=bool(i % 2)),
    }
    return table[op]()


def graph_of(program: list[tuple[int, int, int]], xs: list[Tensor]) -> Tensor:
    """A graph of views, shared tensors and in-place writes that autograd allows."""
    pool = [x.sin() for x in xs]
    for op, i, j in program:
        new = operate(op, pool[i % len(pool)], pool[j % len(pool)], i, j)
        if j % 3:
            pool.append(new)
        else:
            pool[i % len(pool)] = new  # what stood there may go
    return torch.stack(pool).sum()


@given(
    st.lists(
        st.tuples(st.integers(0, OPERATIONS - 1), st.integers(0, 30), st.integers(0, 30)),
        max_size=25,
    ),
    st.sampled_from([1, 600, 4000, MIB]),
    st.sampled_from([0, 1, 700, MIB]),
    st.sampled_from([0, 300, MIB]),
    st.integers(1, 300),
    st.booleans(),
)
def test_any_graph_gives_the_same_bits(
    program: list[tuple[int, int, int]],
    budget: int,
    ahead: int,
    window: int,
    smallest: int,
    copies_late: bool,
) -> None:
    store = store_of(budget, ahead=ahead, window=window, smallest=smallest)
    side = late(store) if copies_late else None
    found = []
    for used in (None, store, store):
        xs = [features_of(seed, 8, 8).requires_grad_() for seed in range(2)]
        with saving(used):
            loss = graph_of(program, xs)
        loss.backward()
        store.end_backward()
        found.append((loss.detach(), [x.grad for x in xs]))
        assert store.arena.reserved <= budget
    plain, *others = found
    for loss, grads in others:
        assert torch.equal(plain[0], loss)
        assert all(
            (a is None and b is None) or torch.equal(a, b)
            for a, b in zip(plain[1], grads, strict=True)
        )  # type: ignore[arg-type]
    assert side is None or side.problems == []
    assert_nothing_is_left(store)


# -- once down, once up, as views ------------------------------------------------------------------


def test_what_several_nodes_save_goes_down_once_and_comes_up_once() -> None:
    store = store_of()
    weight = nn.Parameter(features_of(1, 64, 64))
    h = features_of(2, 64, 64).requires_grad_() * 2
    with saving(store):
        loss = (h @ weight).sum() + h.sin().sum() + (h.t() @ weight).sum() + h[1:].cos().sum()
    assert (store.down, store.held) == (
        64 * 64 * 4,
        64 * 64 * 4,
    ), f"{store.down} bytes went down for one tensor of {64 * 64 * 4}"
    assert store.arena.used == 64 * 64 * 4
    del h
    loss.backward()
    assert store.up == 64 * 64 * 4, f"{store.up} bytes came up"
    assert_nothing_is_left(store)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_a_view_comes_back_with_its_bits_sizes_and_strides(
    shape: list[int], random: Any, dtype: torch.dtype, copies_late: bool
) -> None:
    store = store_of(smallest=random.choice([1, 100]))
    side = late(store) if copies_late else None
    base = (
        torch.randint(0, 2, shape).to(dtype)
        if dtype is torch.bool
        else (features_of(3, *shape) * 50).to(dtype)
    )

    def view_of(t: Tensor) -> Tensor:
        for _ in range(random.randint(0, 3)):
            dim = random.randrange(t.dim()) if t.dim() else 0
            kind = random.randrange(5)
            if kind == 0:
                t = t.transpose(dim, random.randrange(t.dim())) if t.dim() else t
            elif kind == 1 and t.dim():
                start = random.randint(0, t.shape[dim] - 1)
                t = t.narrow(dim, start, random.randint(1, t.shape[dim] - start))
            elif kind == 2 and t.dim():
                t = t.select(dim, random.randrange(t.shape[dim]))
            elif kind == 3:
                t = t.unsqueeze(dim).expand(*t.shape[:dim], 3, *t.shape[dim:])
            elif t.dim():
                t = t[tuple(slice(None, None, random.randint(1, 2)) for _ in t.shape)]
        return t

    views = [view_of(base) for _ in range(random.randint(1, 4))]
    expected = [(v.clone(), v.size(), v.stride(), v.dtype) for v in views]
    saved = [store.pack(v) for v in views]
    del views, base
    order = list(range(len(saved)))
    random.shuffle(order)
    found = {}
    for i in order:
        found[i] = store.unpack(saved[i])
        clone, size, stride, its_dtype = expected[i]
        assert (found[i].size(), found[i].stride(), found[i].dtype) == (size, stride, its_dtype)
        assert torch.equal(found[i], clone)
    wholes = [i for i, s in enumerate(saved) if type(s) is Moved and s.copy.key[1] == 0]
    if len({id(saved[i].copy) for i in wholes}) == 1:  # type: ignore[union-attr]
        assert len({found[i].untyped_storage()._cdata for i in wholes}) == 1, (
            "views of one storage came back in several"
        )
    assert side is None or side.problems == []
    saved.clear()
    assert_nothing_is_left(store)


def test_of_a_large_storage_only_the_part_that_is_saved_goes_down() -> None:
    store = store_of()
    data = features_of(1, 1000, 64)
    weight = nn.Parameter(features_of(2, 64, 3))
    with saving(store):
        losses = [(data[i : i + 2] @ weight).sin().sum() for i in (10, 500, 10)]
    parts, outputs = 2 * (2 * 64 * 4), 3 * (2 * 3 * 4)
    assert store.down == parts + outputs, (
        f"{store.down} bytes went down, of which {parts} are parts of the data"
    )
    torch.stack(losses).sum().backward()
    weight_grad, weight.grad = weight.grad, None
    torch.stack([(data[i : i + 2] @ weight).sin().sum() for i in (10, 500, 10)]).sum().backward()
    assert (
        weight_grad is not None
        and weight.grad is not None
        and torch.equal(weight_grad, weight.grad)
    )


def test_what_somebody_still_holds_is_not_copied_up() -> None:
    store = store_of()
    h = features_of(1, 50, 50).requires_grad_() * 2
    with saving(store):
        loss = h.sin().sum()
    assert store.down == 50 * 50 * 4
    loss.backward()
    assert store.up == 0, "the original is alive"
    assert_nothing_is_left(store)


def test_a_custom_function_may_ask_for_its_saved_tensors_twice() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (a,), (b,) = ctx.saved_tensors, ctx.saved_tensors
            return grad * (a + b)

    store = store_of()
    x = features_of(1, 30).requires_grad_()
    with saving(store):
        y = Square.apply(x * 1)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x)
    assert_nothing_is_left(store)


# -- memory ----------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Linear, tanh, linear: autograd saves the input and the output of tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.middle: StorageWeakRef | None = None

    def forward(self, x: Tensor) -> Tensor:
        middle = torch.tanh(self.first(x))
        self.middle = StorageWeakRef(middle.untyped_storage())
        return self.second(middle).sum()


@pytest.mark.parametrize("moving", [False, True])
def test_the_memory_of_what_went_down_is_free(moving: bool) -> None:
    store, model = store_of(), Chain()
    with saving(store if moving else None):
        loss = model(features_of(1, 5, 8))
    assert model.middle is not None and model.middle.expired() == moving
    loss.backward()


def test_the_ledgers_say_what_is_on_the_host_to_the_byte() -> None:
    store, model = store_of(), Chain()
    with saving(store):
        loss = model(features_of(1, 5, 8))
    blocks = ALIGNMENT * (math.ceil(5 * 8 * 4 / ALIGNMENT) + math.ceil(5 * 16 * 4 / ALIGNMENT))
    assert store.held == (5 * 8 + 5 * 16) * 4
    assert store.arena.ledger.now() == {
        ACTIVATIONS_ON_HOST: blocks,
        IDLE_SLABS: store.arena.reserved - blocks,
    }
    assert store.ledger.now() == {}
    loss.backward()
    assert store.arena.ledger.now() == {IDLE_SLABS: store.arena.reserved}
    store.close()
    assert store.arena.ledger.now() == {}


@pytest.mark.parametrize("budget", [0, 511, 512, 5000, 20_000, 60_000])
def test_the_budget_is_never_exceeded_and_what_has_no_room_stays(budget: int) -> None:
    store = store_of(budget)
    assert differences(train(None), train(store)) == []
    peak = sum(store.arena.ledger.peak().values())
    assert peak <= budget, f"{peak} bytes on the host with a budget of {budget}"
    assert store.refused > 0
    assert (store.down > 0) == (budget >= ALIGNMENT)
    assert_nothing_is_left(store)


def test_small_tensors_stay() -> None:
    store = store_of(smallest=5 * 16 * 4)
    with saving(store):
        loss = Chain()(features_of(1, 5, 8))
    assert store.held == 5 * 16 * 4
    loss.backward()


@pytest.mark.parametrize("window", [0, 3000, 10_000])
def test_on_the_way_down_the_device_holds_the_window_at_most(window: int) -> None:
    store = store_of(window=window)
    late(store)
    x = features_of(1, 16, 16).requires_grad_()
    with saving(store):
        y = x
        for _ in range(20):
            y = y.sin()
            held = store.ledger.now().get(ACTIVATIONS_MOVING, 0)
            assert held <= window, f"{held} bytes are kept on the device, with a window of {window}"
    y.sum().backward()


def test_a_tensor_larger_than_the_window_goes_down_while_the_forward_pass_goes_on() -> None:
    store = store_of(window=1000)
    side = late(store)
    x = features_of(1, 16, 16).requires_grad_()
    with saving(store):
        y = x
        for i in range(20):
            y = y.sin()  # saves 1,024 bytes
            held = store.ledger.now().get(ACTIVATIONS_MOVING, 0)
            assert len(side.late) > 0, f"tensor {i}: the copy just begun was waited for"
            assert held <= 2 * 1024, f"tensor {i}: {held} bytes are held for copies of 1,024"
    y.sum().backward()
    assert side.problems == []


def test_what_is_read_first_stays_where_it_is_from_the_second_pass_on() -> None:
    store = store_of(window=2 * 1024)
    side = late(store)
    downs = []
    for length in (16, 16, 24, 16):
        x = features_of(1, 16, 16).requires_grad_()
        before = store.down
        with saving(store):
            y = x
            for _ in range(length):
                y = y.sin()
        y.sum().backward()
        downs.append((store.down - before) // 1024)
    # At most an eighth of the last pass: two of 16 tensors, then two in the middle of a longer
    # pass, three of the 24 that do not come.
    assert downs == [16, 14, 22, 16]
    assert side.problems == []


class Recording(ActivationStore):
    """Notes in which order copies go down and come up."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[Copy] = []
        self.brought: list[tuple[Copy, bool]] = []
        self.read = False

    def _send(self, copy: Copy, source: Tensor) -> None:
        self.sent.append(copy)
        super()._send(copy, source)

    def _bring(self, copy: Copy) -> None:
        self.brought.append((copy, self.read))
        super()._bring(copy)

    def _look_ahead(self, copy: Copy) -> None:
        self.read = True
        super()._look_ahead(copy)
        self.read = False


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_copies_come_up_in_reverse_order_before_they_are_read(ahead: int) -> None:
    nbytes = 16 * 16 * 4
    store = Recording(CPU, MIB, smallest=1, ahead=ahead * nbytes, window=0)
    side = late(store)
    y = features_of(1, 16, 16).requires_grad_() * 1
    with saving(store):
        for _ in range(10):
            y = y.sin()
    loss = y.sum()
    del y
    store.ledger.reset_peak()
    loss.backward()
    assert [copy for copy, _ in store.brought] == store.sent[::-1]
    assert [early for _, early in store.brought] == [False] + [ahead > 0] * 9, (
        "all but the first come before they are asked for"
    )
    assert store.ledger.peak()[ACTIVATIONS_MOVING] == max(1, ahead) * nbytes
    assert side.problems == []


def test_sequences_of_any_length_share_the_same_host_memory() -> None:
    store = store_of(256 * 1024)
    model = TinyGPT(length=64)
    reserved = set()
    for step in range(30):
        with saving(store):
            loss = model(tokens_of(step, length=2 + step * 7 % 62))
        loss.backward()
        reserved.add(store.arena.reserved)
    assert max(reserved) <= 256 * 1024 and len(reserved) == 1, f"slabs were taken anew: {reserved}"
    assert_nothing_is_left(store)


# -- graphs that end otherwise ---------------------------------------------------------------------


@pytest.mark.parametrize("copies", ["at once", "late"])
def test_a_graph_that_is_dropped_gives_its_memory_back(copies: str) -> None:
    store = store_of(window=500)
    side = late(store) if copies == "late" else None
    model = TinyGPT()
    with saving(store):
        loss = model(tokens_of(0))
    assert store.held > 0
    del loss
    assert side is None or side.problems == []
    assert_nothing_is_left(store)


@pytest.mark.parametrize("copies", ["at once", "late"])
def test_what_came_up_for_a_branch_that_is_not_read_goes_at_the_end(copies: str) -> None:
    store = store_of(ahead=MIB, window=0)
    side = late(store) if copies == "late" else None
    x = features_of(1, 20, 20).requires_grad_()
    with saving(store):
        one = (x * 2).sin().cos().tanh().sum()
        other = (x * 3).sin().cos().tanh().sum()
    other.backward()
    assert store.ledger.now()[ACTIVATIONS_MOVING] > 0, "nothing of the first branch came up ahead"
    store.end_backward()
    assert store.ledger.now() == {}
    grad, x.grad = x.grad, None
    one.backward()
    (x * 3).sin().cos().tanh().sum().backward()
    both = x.grad
    x.grad = grad
    (x * 2).sin().cos().tanh().sum().backward()
    assert both is not None and x.grad is not None and torch.allclose(both, x.grad)
    assert side is None or side.problems == []
    store.end_backward()
    assert_nothing_is_left(store)


def test_an_error_in_the_backward_pass_leaves_nothing_behind() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise ValueError("on purpose")

    store = store_of()
    x = features_of(1, 20, 20).requires_grad_()
    with saving(store):
        loss = Fails.apply((x * 2).sin().cos()).tanh().sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    del loss
    gc.collect()
    store.end_backward()
    assert_nothing_is_left(store)


def test_a_closed_store_takes_nothing_more_and_keeps_what_graphs_need() -> None:
    store, model = store_of(), Chain()
    with saving(store):
        loss = model(features_of(1, 5, 8))
    expected = torch.autograd.grad(model(features_of(1, 5, 8)), model.first.weight)[0]
    store.close()
    assert store.arena.reserved > 0
    down = store.down
    with saving(store):
        model(features_of(2, 5, 8)).backward()
    assert store.down == down, "a closed store took something"
    model.zero_grad()
    loss.backward()
    assert model.first.weight.grad is not None and torch.equal(model.first.weight.grad, expected)
    assert (store.arena.reserved, store.arena.ledger.now()) == (0, {})


def test_the_collector_may_drop_graphs_in_the_middle_of_anything() -> None:
    store = store_of()
    model = TinyGPT()

    def leave_a_cycle() -> None:
        with saving(store):
            cycle: list[Any] = [model(tokens_of(0))]
        cycle.append(cycle)

    take = store.arena.take

    def collect_first(nbytes: int) -> Any:
        gc.collect()  # with the store's lock held
        return take(nbytes)

    gc.collect()
    gc.disable()
    gc.freeze()  # what is there already need not be gone over in each collection
    try:
        leave_a_cycle()
        held = store.held
        leave_a_cycle()
        assert store.held == 2 * held
        store.arena.take = collect_first  # type: ignore[method-assign]
        with saving(store):
            loss = model(tokens_of(0))
    finally:
        gc.unfreeze()
        gc.enable()
    assert store.held == held, f"{store.held} bytes are held, a pass takes {held}"
    loss.backward()
    assert_nothing_is_left(store)


def test_threads_may_share_a_store() -> None:
    store = store_of(64 * 1024)
    expected = train(None)[1]
    problems: list[str] = []

    def work(seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(5):
            x = features_of(seed, 16, 16).requires_grad_()
            y = x * 1
            with store.hooks() or contextlib.nullcontext():
                for _ in range(12):
                    y = y.sin() * y
            y.sum().backward()
            plain = x.detach().clone().requires_grad_()
            z = plain * 1
            for _ in range(12):
                z = z.sin() * z
            z.sum().backward()
            if x.grad is None or plain.grad is None or not torch.equal(x.grad, plain.grad):
                problems.append(f"thread {seed}: other gradients")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and expected
    store.end_backward()
    assert_nothing_is_left(store)


def test_memory_that_belongs_to_another_stream_is_read_through_a_clone() -> None:
    """As in a forward pass that computed on a stream of its own, which autograd goes back to in the
    backward pass.
    """
    store = store_of(window=0)
    side = late(store)
    first, second = features_of(1, 10, 10), features_of(2, 10, 10)
    expected = first.clone(), second.clone()
    saved = [store.pack(first), store.pack(first.t()), store.pack(second)]
    del first, second
    side.computing = type(side.computing)("one")
    a = store.unpack(saved[0])
    side.computing = type(side.computing)("two")
    b = store.unpack(saved[1])
    assert torch.equal(a, expected[0]) and torch.equal(b, expected[0].t())
    assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
    assert side.problems == []


# -- writes in place -------------------------------------------------------------------------------


WRITES = {
    "in place": lambda h: h.add_(1),
    "through a view": lambda h: h[0].zero_(),
    "through a detached tensor": lambda h: h.detach().mul_(2),
    "by out=": lambda h: torch.ones(20, 20, out=h.detach()),
}


@pytest.mark.parametrize("smallest", [1, 1 << 30], ids=["moved", "kept"])
@pytest.mark.parametrize("write", list(WRITES))
def test_a_tensor_written_to_after_it_was_saved_is_refused_as_without_the_store(
    write: str, smallest: int
) -> None:
    for store in (None, store_of(smallest=smallest)):
        for survives in (True, False):
            h = features_of(1, 20, 20).requires_grad_() * 2
            with saving(store):
                loss = h.sin().sum()
            WRITES[write](h)
            if not survives:
                del h
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_writes_that_autograd_allows_are_allowed() -> None:
    def run(store: ActivationStore | None) -> Tensor:
        x = features_of(1, 20, 20).requires_grad_()
        with saving(store):
            # relu_ saves what it wrote, sin what relu_ wrote; mul_ writes to what nobody saved
            y = (x * 2).relu_().sin().mul_(3)
            z = y.clone()
            z[:, 3] = 0
            loss = (z.tanh() * y.detach()).sum()
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(None), run(store_of()))


def test_each_version_of_a_tensor_has_its_own_copy() -> None:
    grads = []
    for store in (None, store_of()):
        x = features_of(1, 20, 20).requires_grad_()
        h = x * 2
        with saving(store):
            early = h.sin()
            h.add_(1)
            late_ = h.cos()
        del h
        grads.append(torch.autograd.grad(late_.sum(), x)[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(early.sum(), x)
    assert torch.equal(*grads)


def test_tensors_that_share_memory_and_no_version_do_not_share_a_copy() -> None:
    """As the gates of torch.lstm: parts of one storage that autograd takes for tensors of their
    own, each written to in its turn.
    """

    def run(store: ActivationStore | None, sizes: list[int]) -> Tensor:
        x = features_of(1, 40, 8).requires_grad_()
        with saving(store):
            parts = [part.sigmoid_() for part in (x * 2).unsafe_split_with_sizes(sizes)]
            loss = sum((part.square().sum() for part in parts), torch.zeros(()))
        assert isinstance(loss, Tensor)
        del parts
        loss.backward()
        assert x.grad is not None
        return x.grad

    for sizes in ([10] * 4, [25, 15], [38, 1, 1]):
        assert torch.equal(run(None, sizes), run(store_of(), sizes)), f"parts of {sizes} rows"

    torch.manual_seed(0)
    lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
    grads = []
    for store in (None, store_of()):
        lstm.zero_grad()
        with saving(store):
            loss = lstm(features_of(1, 4, 5, 8).requires_grad_())[0].square().sum()
        loss.backward()
        grads.append(gradients(lstm))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_an_intermediate_that_never_was_in_python_goes_down_once() -> None:
    """Attention in plain operations: the softmax saves what it computed, and so does the product
    that reads it.
    """
    store = store_of()
    q, k, v = (features_of(seed, 1, 2, 30, 4).requires_grad_() for seed in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), saving(store):
        loss = nn.functional.scaled_dot_product_attention(q, k, v).sum()
    scores = 2 * 30 * 30 * 4
    assert scores <= store.down < 2 * scores, (
        f"{store.down} bytes went down, of which {scores} are the scores"
    )
    loss.backward()


def test_going_backward_twice_without_retaining_says_so() -> None:
    with saving(store_of()):
        loss = (features_of(1, 9, 9).requires_grad_() * 2).sin().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# -- checkpoints and other hooks -------------------------------------------------------------------


@pytest.mark.parametrize("around_backward", [False, True], ids=["forward only", "backward too"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_of_checkpointed_blocks_the_inputs_go_down_and_recomputed_tensors_do_not(
    use_reentrant: bool, around_backward: bool
) -> None:
    store = store_of()
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()) for _ in range(3)
    )

    def forward() -> Tensor:
        x = features_of(1, 10, 16).requires_grad_() * 1
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x.sum()

    forward().backward()
    expected = gradients(blocks)
    blocks.zero_grad()
    with contextlib.ExitStack() as stack:
        stack.enter_context(saving(store))
        loss = forward()
        assert store.down == 3 * 10 * 16 * 4, (
            f"{store.down} bytes went down, the inputs of three blocks are {3 * 10 * 16 * 4}"
        )
        if not around_backward:
            stack.close()
        loss.backward()
    assert store.down == 3 * 10 * 16 * 4, (
        f"recomputation took {store.down - 3 * 10 * 16 * 4} bytes down"
    )
    found = gradients(blocks)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert_nothing_is_left(store)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_a_checkpoint_inside_a_checkpoint_gives_the_same_bits(outer: bool, inner: bool) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)

    def both(x: Tensor) -> Tensor:
        x = checkpoint(lambda y: torch.tanh(first(y)).sin(), x, use_reentrant=inner)
        return checkpoint(lambda y: torch.tanh(second(y)).cos(), x, use_reentrant=inner)

    found = []
    store = store_of()
    for used in (None, store):
        x = features_of(1, 10, 16).requires_grad_()
        with saving(used):
            loss = checkpoint(both, x * 1, use_reentrant=outer).sum()
        loss.backward()
        found.append(x.grad)
    assert found[0] is not None and found[1] is not None and torch.equal(found[0], found[1])
    assert store.down == 10 * 16 * 4
    assert_nothing_is_left(store)


def test_inside_a_checkpoint_the_store_stands_back() -> None:
    store = store_of()
    model = TinyGPT(dropout=0.1)

    def run(used: ActivationStore | None) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model.zero_grad()

        def forward(tokens: Tensor) -> Tensor:
            with saving(used):
                return model(tokens)

        checkpoint(forward, tokens_of(0), use_reentrant=False).backward()
        return gradients(model)

    expected, found = run(None), run(store)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert store.down == 0


def test_hooks_that_were_there_before_get_what_stays() -> None:
    seen: list[int] = []
    store, model = store_of(smallest=5 * 16 * 4), Chain()
    model(features_of(1, 5, 8)).backward()
    expected = gradients(model)
    model.zero_grad()

    def pack(t: Tensor) -> tuple[str, Tensor]:
        seen.append(t.numel())
        return "packed", t.clone()

    with saved_tensors_hooks(pack, lambda packed: packed[1]), saving(store):
        loss = model(features_of(1, 5, 8))
    assert 5 * 8 in seen and 5 * 16 not in seen
    assert store.held == 5 * 16 * 4
    loss.backward()
    found = gradients(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_two_stores_do_not_touch_each_other() -> None:
    outer, inner = store_of(), store_of(smallest=5 * 16 * 4)
    model = Chain()
    model(features_of(1, 5, 8)).backward()
    expected = gradients(model)
    model.zero_grad()
    with saving(outer), saving(inner):
        loss = model(features_of(1, 5, 8))
    assert (outer.held, inner.held) == (5 * 8 * 4, 5 * 16 * 4)
    loss.backward()
    found = gradients(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert_nothing_is_left(outer)
    assert_nothing_is_left(inner)


# -- what stays ------------------------------------------------------------------------------------


class Labelled(Tensor):
    """A subclass as libraries make them."""


WEIGHT = nn.Parameter(torch.ones(20, 20))

STAYS = {
    "a parameter": lambda: WEIGHT,
    "a view of a parameter": lambda: WEIGHT.t(),
    "a subclass": lambda: torch.ones(20, 20).as_subclass(Labelled),  # type: ignore[arg-type]
    "a conjugate": lambda: torch.ones(20, 20, dtype=torch.complex64).conj(),
    "a negated part": lambda: torch.ones(20, 20, dtype=torch.complex64).conj().imag,
    "a sparse tensor": lambda: torch.eye(20).to_sparse(),
    "another device's": lambda: torch.ones(20, 20, device="meta"),
    "an empty one": lambda: torch.ones(0, 20),
    "what is skipped": lambda: torch.full((20, 20), 7.0),
}


@pytest.mark.parametrize("kind", list(STAYS))
def test_what_cannot_go_or_need_not_go_stays(kind: str) -> None:
    t = STAYS[kind]()
    store = store_of(
        skip=lambda t: t.device.type == "cpu" and t.dtype is torch.float32 and bool((t == 7).all())
    )
    with torch.no_grad():
        saved = store.pack(t)
    assert type(saved) is Kept and store.down == 0
    again = store.unpack(saved)
    assert again.size() == t.size() and type(again) is type(t)
    assert t.is_meta or t.is_sparse or torch.equal(again, t)


def test_complex_numbers_and_conjugates_give_the_same_bits() -> None:
    def run(store: ActivationStore | None) -> Tensor:
        x = torch.view_as_complex(features_of(1, 8, 8, 2)).requires_grad_()
        with saving(store):
            y = x * 2
            loss = (y.conj() * y.sin()).real.sum() + (y.imag * y.real).sum()
        loss.backward()
        assert x.grad is not None
        return x.grad

    store = store_of()
    assert torch.equal(run(None), run(store))
    assert store.down > 0


# -- on a GPU --------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def deep(width: int = 1024, depth: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    ).cuda()


@cuda
@pytest.mark.parametrize("near", [0, 16 * MIB, 64 * MIB])
def test_on_a_gpu_bits_are_the_same_and_the_peak_is_lower(near: int) -> None:
    model, x = deep(), features_of(1, 4096, 1024).cuda()  # 16 MiB for each saved tensor
    results = []
    for store in (None, ActivationStore(torch.device("cuda", 0), 4 << 30, window=near, ahead=near)):
        for _ in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begun = torch.cuda.memory_allocated()
            with saving(store):
                loss = model(x).square().mean()
            loss.backward()
            if store is not None:
                store.end_backward()
            del loss
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - begun
        results.append((gradients(model), peak))
        if store is not None:
            assert_nothing_is_left(store)
            assert all(slab.memory.is_pinned() for slab in store.arena.slabs)
            store.close()
            assert store.arena.reserved == 0
    (plain, high), (moved, low) = results
    assert all(torch.equal(plain[name], moved[name]) for name in plain)
    grads = sum(g.numel() * 4 for g in plain.values())
    assert low < grads + 2 * near + 10 * 16 * MIB < high, (
        f"{low / MIB:.0f} MiB with the store, {high / MIB:.0f} without"
    )


@cuda
def test_on_a_gpu_dropped_graphs_and_other_streams_are_safe() -> None:
    model, x = deep(512, 8), features_of(1, 2048, 512).cuda()
    store = ActivationStore(torch.device("cuda", 0), 1 << 30, smallest=1, window=0, ahead=64 * MIB)
    model(x).square().mean().backward()
    expected = gradients(model)
    other = torch.cuda.Stream()
    for round_ in range(6):
        model.zero_grad()
        with saving(store):
            dropped = model(x)
        del dropped
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other if round_ % 2 else torch.cuda.current_stream()), saving(store):
            loss = model(x).square().mean()
        torch.cuda.current_stream().wait_stream(other)
        loss.backward()
        store.end_backward()
        torch.cuda.synchronize()
        found = gradients(model)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert_nothing_is_left(store)
