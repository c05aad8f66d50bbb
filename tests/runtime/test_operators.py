"""What every operation of torch does with one rank's part: the whole's answer, or a sentence.
Nothing falls between.

The samples are torch's own (`op_db`): real arguments for each of its operators. One argument after
the other becomes an interval over two ranks, cut in the middle; the result must be that of the
plain tensor, the part that this rank has of it, or a refusal on both ranks alike.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from onefold.runtime.parameters import schema
from onefold.runtime.parameters.interval import (
    Interval,
    IntervalSpec,
    ShardedParameterError,
    dress,
    local_part,
    spec_of,
    tensors_among,
)
from ranks import run_ranks
from zoo import TinyMLP, features_of

SAMPLES = 1  # of each operator; `--all`: 5
CUT = 1 << 30
PARTS = 8
#: Samples that torch itself refuses, or that compare what is not defined: memory without values,
#: addresses, a decomposition's signs.
NOT_COMPARED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "nn.functional.scaled_dot_product_attention",
}  # fmt: skip
#: A decomposition is one of several: compared by nothing but its shape.
SEVERAL = (
    "linalg.eig",
    "linalg.svd",
    "svd",
    "linalg.eigh",
    "geqrf",
    "linalg.qr",
    "qr",
    "pca_lowrank",
    "svd_lowrank",
    "linalg.lu",
    "lu",
)


class TwoRanks:
    """Owners of the addresses below CUT and from there on; stands for a flat buffer's."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.bounds, self.index = engine, ((0, CUT), (CUT, 2 * CUT)), 3
        self.position, self.alone = engine.rank, False

    def meet(self, subject: str) -> Any:
        return self.engine.group, self.engine.group

    def wait_before_write(self) -> None:
        """Nothing is copying the addresses."""


def part_of(x: torch.Tensor, owners: Any) -> Interval:
    """This rank's half of `x`."""
    spec = IntervalSpec(owners, "x", CUT - x.numel() // 2, x.shape)
    return dress(x.detach().reshape(-1)[spec.start : spec.stop].clone(), spec)


def swapped(value: Any, at: list[int], owners: Any) -> Any:
    """`value` with the tensor number `at[0]` of it made an interval; counts down."""
    if isinstance(value, torch.Tensor):
        at[0] -= 1
        return part_of(value, owners) if at[0] == -1 else value.detach().clone()
    if isinstance(value, (list, tuple)):
        parts = [swapped(v, at, owners) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return (
        {k: swapped(v, at, owners) for k, v in value.items()} if isinstance(value, dict) else value
    )


def differ(got: Any, want: Any, several: bool) -> str:
    """Where a result is neither the whole's nor this rank's part of it; "" where it is."""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"{type(got).__name__} instead of a tensor"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
        spec = spec_of(got)
        if several or want.layout is not torch.strided:
            return ""
        expected = (
            want.detach() if spec is None else want.detach().reshape(-1)[spec.start : spec.stop]
        )
        mine, expected = (
            local_part(got).reshape(expected.shape).to(torch.complex128),
            expected.to(torch.complex128),
        )
        same = torch.allclose(mine, expected, 1e-4, 1e-5, equal_nan=True)
        return "" if same else f"{'part' if spec else 'whole'} differs"
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            return f"{type(got).__name__} instead of {len(want)} results"
        return next(
            (said for g, w in zip(got, want, strict=True) if (said := differ(g, w, several))), ""
        )
    same = (
        got == want
        or got is want
        or (isinstance(want, float) and abs(got - want) <= 1e-4 * max(1, abs(want)))
    )
    return "" if same else f"{got!r}, expected {want!r}"


def outcome(call: Any, want: Any, several: bool) -> str:
    """ "part", "whole", "refused", or what is wrong."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            got = call()
    except ShardedParameterError:
        return "refused"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:150]}"
    if said := differ(got, want, several):
        return f"is wrong: {said}"
    first = got[0] if isinstance(got, (list, tuple)) and got else got
    return "part" if isinstance(first, torch.Tensor) and spec_of(first) is not None else "whole"


def every_operator(part: int, samples: int) -> tuple[Counter[str], list[str], list[str]]:
    """(how often what became of a sample, what went wrong, operators that were refused), over every
    `PARTS`-th of torch's operators.
    """
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    import onefold

    engine = onefold.engine_of(onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=20.0)))
    owners = TwoRanks(engine)
    counts: Counter[str] = Counter()
    wrong, refused = [], set()
    for op in op_db[part::PARTS]:
        if (
            op.name in NOT_COMPARED
            or op.name.startswith("sparse.")
            or not op.supports_dtype(torch.float32, "cpu")
        ):
            continue
        torch.manual_seed(0)
        for number, sample in enumerate(op.sample_inputs("cpu", torch.float32)):
            if number == samples:
                break
            given = (sample.input, *sample.args)
            tensors = sum(1 for _ in tensors_among((given, sample.kwargs)))
            for inplace in (False, True):
                function = op.inplace_variant if inplace else op.op
                if function is None:
                    continue
                torch.manual_seed(0)
                plain = swapped((given, sample.kwargs), [1 << 30], owners)
                try:
                    with torch.no_grad():
                        want = function(*plain[0], **plain[1])
                except Exception:
                    continue
                for at in range(min(tensors, 1 if inplace else 3)):
                    args, kwargs = swapped((given, sample.kwargs), [at], owners)
                    if not any(
                        spec_of(t) is not None and t.layout is torch.strided
                        for t in tensors_among((args, kwargs))
                    ):
                        continue
                    what = f"{op.name}{'_' if inplace else ''}, sample {number}, tensor {at}"
                    became = outcome(
                        lambda f=function, a=args, k=kwargs: f(*a, **k), want, op.name in SEVERAL
                    )
                    counts[became if became in ("part", "whole", "refused") else "wrong"] += 1
                    if became == "refused":
                        refused.add(op.name)
                    elif became not in ("part", "whole"):
                        wrong.append(f"{what}: {became}")
    return counts, wrong, sorted(refused)


#: Operators that a part cannot do: views in another order, and memory of another size.
REFUSED = {
    "H", "T", "mH", "mT", "t", "transpose", "permute", "movedim", "swapaxes", "as_strided", "chunk", "unsafe_chunk", "split",
    "split_with_sizes", "unsafe_split", "tensor_split", "dsplit", "hsplit", "vsplit", "diagonal", "linalg.diagonal", "narrow", "select",
    "slice", "squeeze", "unsqueeze", "unbind", "unfold", "view_as_complex", "__getitem__", "resize_", "resize_as_", "to_sparse", "adjoint",
    "squeeze.multiple", "view",
    # It changes running statistics that its schema does not show as written.
    "nn.functional.instance_norm",
    # These change arguments besides, or shapes in place.
    "_native_batch_norm_legit", "_batch_norm_with_update", "addbmm", "linalg.pinv", "svd_lowrank", "pca_lowrank",
}  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_of_torch_is_right_on_a_part_or_refused(
    part: int, request: pytest.FixtureRequest
) -> None:
    ranks = run_ranks(
        2, every_operator, part, 5 if request.config.getoption("--all") else SAMPLES, timeout=600
    )
    for counts, wrong, refused in ranks:
        assert not wrong, "\n".join(wrong)
        assert counts["part"] > 50 and counts["whole"] > 50, counts
        assert set(refused) <= REFUSED, sorted(set(refused) - REFUSED)
    assert ranks[0] == ranks[1]


def face_of(p: torch.Tensor) -> tuple[Any, ...]:
    return p.shape, p.ndim, p.dim(), p.size(), p.numel(), p.nelement(), p.stride(), p.is_complex()


def named(stage: int) -> list[str]:
    """What a parameter of a subclass, and one with marks, is to code before and after."""
    import onefold

    class Marked(nn.Parameter):
        pass

    model = TinyMLP()
    model.enter.bias = Marked(model.enter.bias.detach())
    model.enter.weight.mup_scale = 2.0  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faces = {n: face_of(p) for n, p in model.named_parameters()}
    before = dict(model.named_parameters())
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0))
    problems = []
    for name, p in model.named_parameters():
        if face_of(p) != faces[name]:
            problems.append(f"{name}: {tuple(p.shape)} {p.numel()}, expected {faces[name]}")
        if (
            p is not before[name]
            or (p.dim() and len(p) != faces[name][0][0])
            or p.data.shape != p.shape
            or p.detach().numel() != p.numel()
        ):
            problems.append(f"{name}: another object, or its data has another face")
    if not isinstance(model.enter.bias, Marked) or model.enter.weight.mup_scale != 2.0:
        problems.append("marks are gone")
    seen: list[Any] = []
    model.enter.register_forward_pre_hook(lambda module, _: seen.append(module.weight.mup_scale))
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.enter.weight.shape))
    optimizer.register_step_post_hook(lambda *_: seen.append(model.enter.weight.shape))
    inside: list[Any] = []
    model(features_of(0, 4, 7)).square().mean().backward()
    optimizer.step(lambda: inside.append(model.enter.weight.shape))
    if seen != [2.0, faces["enter.weight"][0], faces["enter.weight"][0]] or inside != [
        faces["enter.weight"][0]
    ]:
        problems.append(f"hooks and closures saw {seen} and {inside}")
    if any(p.grad is None or p.grad.shape != p.shape for p in model.parameters()):
        problems.append("a gradient has another shape, or is missing on a rank")
    return problems


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_parameter_keeps_its_face(stage: int) -> None:
    assert run_ranks(3, named, stage) == [[], [], []]


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.shapes = [p.shape for g in self.param_groups for p in g["params"]]
        self.kinds = {type(p) for g in self.param_groups for p in g["params"]}
        raise ZeroDivisionError


def failing_step(stage: int) -> tuple[bool, bool, bool]:
    """(plain parameters inside the step, of this rank's elements; their face back afterwards)"""
    import onefold

    model = onefold.shard(
        TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=10.0, elementwise_optimizer=True)
    )
    optimizer = Fails(model.parameters(), lr=0.1)
    shapes = [p.shape for p in model.parameters()]
    with contextlib.suppress(ZeroDivisionError):
        optimizer.step()
    inside = [
        tuple(s) == tuple(w) if stage == 0 else len(s) == 1
        for s, w in zip(optimizer.shapes, shapes, strict=True)
    ]
    return (
        optimizer.kinds == {nn.Parameter},
        all(inside),
        [p.shape for p in model.parameters()] == shapes,
    )


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_a_step_that_raises_gives_the_faces_back(stage: int) -> None:
    assert run_ranks(2, failing_step, stage) == [(True, True, True)] * 2


def of_its_kind(stage: int) -> list[Any]:
    """A plain tensor in a parameter's dtype, as SAM scales its gradients (`scale.to(p)`), and parts
    in a plain tensor's.
    """
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage))
    model(features_of(0, 3, 7)).sum().backward()
    weight = next(p for p in model.parameters() if p.ndim == 2)
    grad, before = weight.grad.norm(), weight.norm().item()
    with torch.no_grad():
        scale = torch.tensor(3.0, dtype=torch.float64)
        plain = [scale.to(weight), scale.type_as(weight.grad), torch.ones(2).to(weight.data)]
        weight.add_(weight.grad * scale.to(weight))
        parts = [
            weight.data.to(torch.ones(2, dtype=torch.float64)),
            weight.grad.type_as(torch.ones(2, dtype=torch.float64)),
        ]
    return [
        [(type(t), tuple(t.shape), t.dtype) for t in plain],
        [(spec_of(t) is not None, tuple(t.shape) == tuple(weight.shape), t.dtype) for t in parts],
        weight.norm().item() != before and bool((parts[1].norm() - grad).abs() < 1e-5),
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_tensor_made_of_anothers_kind_keeps_its_own_elements(stage: int) -> None:
    for plain, parts, moved in run_ranks(2, of_its_kind, stage):
        assert plain == [(torch.Tensor, shape, torch.float32) for shape in ((), (), (2,))]
        assert parts == [(True, True, torch.float64)] * 2
        assert moved


def assigned_and_read(stage: int) -> list[float]:
    """Each parameter is assigned and then read with gradients: the read refreshes what is kept
    where the assignment was noticed.
    """
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=20))
    model(features_of(0, 3, 7)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    sums = []
    for p in model.parameters():
        p.data = p.data * 0.5
        sums.append(p.sum().item() - p.data.sum().item())
        p.data = p.data
        sums.append(p.sum().item() - p.data.sum().item())
    return sums


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_notices_assigned_data_also_where_it_owns_nothing_of_it(stage: int) -> None:
    for sums in run_ranks(2, assigned_and_read, stage):
        assert sums == pytest.approx([0.0] * len(sums), abs=1e-5)


def copied_by_new_tensor(stage: int) -> list[bool]:
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=20))
    good = []
    for p in model.parameters():
        whole = p.onefold.gather()  # type: ignore[attr-defined]
        for made in (p.new_tensor(p.data), p.new_tensor(p), p.new_tensor([1.0, 2.0])):
            expected = whole if made.dim() != 1 or made.tolist() != [1.0, 2.0] else made
            good.append(type(made) is torch.Tensor and torch.equal(made, expected))
    return good


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("stage", [1, 3])
def test_new_tensor_of_a_part_is_a_copy_of_the_whole(stage: int) -> None:
    for good in run_ranks(2, copied_by_new_tensor, stage):
        assert all(good) and len(good) >= 6


# -- decided by the schema -------------------------------------------------------------------------


class Alone:
    """An engine of rank 0, which sends nothing."""

    rank = 0


#: {schema of another library's operator: (its tags, what it computes)}
THEIRS: dict[str, tuple[tuple[torch.Tag, ...], Any]] = {
    "halved(Tensor x) -> Tensor": ((torch.Tag.pointwise,), lambda x: x * 0.5),
    "halve_(Tensor(a!) x) -> ()": ((torch.Tag.pointwise,), lambda x: (x.mul_(0.5), None)[1]),
    "centered(Tensor x) -> Tensor": ((), lambda x: x - x.mean()),
    "center_(Tensor(a!) x) -> ()": ((), lambda x: (x.sub_(x.mean()), None)[1]),
    "upper(Tensor(a) x) -> Tensor(a)": ((), lambda x: x[:2]),
    "mul(Tensor x, Tensor y) -> Tensor": ((), lambda x, y: x @ y),
    "zeros_like(Tensor x, *, int dtype=0, int layout=0, int device=0) -> Tensor": (
        (),
        lambda x, **_: x.cumsum(0),
    ),
    "normal_(Tensor(a!) x, *, Generator? generator=None) -> ()": (
        (torch.Tag.nondeterministic_seeded,),
        lambda x, generator=None: (x.cumsum_(0), None)[1],
    ),
    "both_(Tensor(a!) x, Tensor(b!) y) -> ()": (
        (torch.Tag.pointwise,),
        lambda x, y: (y.copy_(x), None)[1],
    ),
}


@functools.cache
def theirs() -> Any:
    """The operators of another library, which is kept with them."""
    library = torch.library.Library("theirs", "DEF")
    for declared, (tags, run) in THEIRS.items():
        library.define(declared, tags=tags)
        library.impl(declared.partition("(")[0], run, "CompositeExplicitAutograd")
    torch.ops.theirs.library = library
    return torch.ops.theirs


def interval_of(x: torch.Tensor) -> Interval:
    return part_of(x, TwoRanks(Alone()))


def test_another_librarys_pointwise_operator_is_computed_on_the_part() -> None:
    x = torch.arange(12.0).view(4, 3)
    for halved in (theirs().halved, theirs().halved.default):
        out = halved(interval_of(x))
        assert spec_of(out) is not None and out.shape == x.shape
        assert torch.equal(local_part(out), torch.arange(6.0) * 0.5)
    written = interval_of(x)
    theirs().halve_(written)
    assert torch.equal(local_part(written), torch.arange(6.0) * 0.5)


@pytest.mark.parametrize(
    "name", ["centered", "center_", "upper", "mul", "zeros_like", "normal_", "both_"]
)
def test_another_librarys_operator_without_the_tag_is_refused(name: str) -> None:
    """Also where it writes, returns a view, draws or is called like an operator of torch."""
    x = torch.arange(16.0).view(4, 4)
    part, other = interval_of(x), torch.ones(4, 4)
    given = (part, other) if name in ("mul", "both_") else (part,)
    for function in (getattr(theirs(), name), getattr(theirs(), name).default):
        with pytest.raises(ShardedParameterError, match=rf"{name} of 'x' .* on a part.*gather\(\)"):
            function(*given)
    assert torch.equal(local_part(part), torch.arange(8.0)) and other.sum() == 16


def add(tensor: torch.Tensor) -> Any:
    """A function in Python that is called like one of torch's."""
    return torch.overrides.handle_torch_function(add, (tensor,), tensor)


def test_a_function_in_python_that_is_called_like_one_of_torch_is_refused() -> None:
    with pytest.raises(ShardedParameterError, match="add of 'x'"):
        add(interval_of(torch.ones(4)))


@pytest.mark.parametrize(
    ("call", "does"),
    [
        (lambda x: torch.max(x, x), "POINTWISE"),
        (lambda x: torch.max(x), "REDUCE"),
        (lambda x: torch.max(x, 1), "REDUCE"),  # which gathers where a dimension is given
        (lambda x: torch.where(x > 0, x, x), "POINTWISE"),
        (lambda x: torch.where(x > 0), "READ"),
        (lambda x: x.bernoulli_(0.5), "DRAW"),
        (lambda x: x.bernoulli_(torch.ones(3)), "WRITE"),
        (lambda x: 1 - x, "POINTWISE"),
        (lambda x: x.masked_fill(x > 0, 1.0), "POINTWISE"),
    ],
)
def test_overloads_that_differ_are_told_apart_by_their_arguments(call: Any, does: str) -> None:
    seen = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            op = schema.operator_of(func)
            if op.does is schema.Does.PYTHON:
                return func.__wrapped__(*args, **(kwargs or {}))
            seen.append(op.does_with(args, kwargs or {}).name)
            return super().__torch_function__(func, types, args, kwargs or {})

    call(torch.ones(3, 3).as_subclass(Seen))
    assert seen[-1] == does


def test_the_exceptions_are_few_and_the_schemas_would_decide_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = {
        name: getattr(torch.Tensor, name, None) or getattr(torch, name)
        for name in schema.EXCEPTIONS
        if name != "data__set__"
    }
    assert len(schema.EXCEPTIONS) <= 25
    decided = dict(schema.EXCEPTIONS)
    monkeypatch.setattr(schema, "EXCEPTIONS", {})
    needless = [n for n, f in functions.items() if schema._decided(f).does is decided[n]]
    assert not needless


def test_what_a_function_does_is_decided_once() -> None:
    assert schema.operator_of(torch.Tensor.add_) is schema.operator_of(torch.Tensor.add_)
    assert schema.operator_of(torch.Tensor.shape.__get__) is schema.operator_of(
        torch.Tensor.shape.__get__
    )


def read_from_a_copy(stage: int) -> list[str]:
    """What is wrong with functions that show by their results that they are not reads."""
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(nn.BatchNorm1d(6), onefold.Recipe.zero(stage, stall_timeout=20))
    before = model.weight.onefold.gather()
    refused: dict[str, Any] = {
        # It writes to the statistics, which its schema does not show
        "instance_norm": lambda: nn.functional.instance_norm(
            torch.randn(2, 6, 4), model.weight.data, model.bias.data
        ),
        "dlpack": lambda: model.weight.data.__dlpack__(),
    }
    wrong = []
    for name, call in refused.items():
        try:
            call()
            wrong.append(f"{name} was let pass")
        except onefold.ShardedParameterError as error:
            if "cannot be done on a part" not in str(error):
                wrong.append(f"{name}: {error}")
    if not torch.equal(model.weight.onefold.gather(), before):
        wrong.append("the parameter was written to")
    torch.atleast_1d(model.weight.data).zero_()
    if model.weight.onefold.gather().any():
        wrong.append("a write to what atleast_1d returned was lost")
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_a_read_that_writes_or_returns_its_argument_is_noticed_by_its_result(stage: int) -> None:
    assert run_ranks(2, read_from_a_copy, stage) == [[], []]
