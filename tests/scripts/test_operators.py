"""What every operation of torch does with one rank's part of a parameter: the whole's answer, the
part of it, or a sentence. Nothing falls between.

The samples are torch's own (`op_db`). One argument after the other becomes a part over two ranks.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import looks
import onefold
from on_ranks import on_ranks
from reference import built
from zoo import TinyMLP, features_of

Refused = onefold.ShardedParameterError
PARTS = 8
#: What is not defined: memory without values.
NOT_COMPARED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "nn.functional.scaled_dot_product_attention",
}  # fmt: skip
#: A decomposition is one of several: compared by its shape only.
SEVERAL = ("linalg.eig", "linalg.svd", "svd", "linalg.eigh", "geqrf", "linalg.qr", "qr",
           "pca_lowrank", "svd_lowrank", "linalg.lu", "lu")  # fmt: skip
#: Operators that a part cannot do: views in another order, memory of another size, statistics that
#: change without being shown as written.
REFUSED = {
    "H", "T", "mH", "mT", "t", "transpose", "permute", "movedim", "swapaxes", "as_strided", "chunk", "unsafe_chunk", "split",
    "split_with_sizes", "unsafe_split", "tensor_split", "dsplit", "hsplit", "vsplit", "diagonal", "linalg.diagonal", "narrow", "select",
    "slice", "squeeze", "unsqueeze", "unbind", "unfold", "view_as_complex", "__getitem__", "resize_", "resize_as_", "to_sparse", "adjoint",
    "squeeze.multiple", "view", "nn.functional.instance_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "addbmm",
    "linalg.pinv", "svd_lowrank", "pca_lowrank",
}  # fmt: skip


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def swapped(value: Any, at: list[int], model: nn.Module) -> Any:
    """A copy of `value` in which the tensor number `at[0]` is a part; counts down."""
    if isinstance(value, Tensor):
        at[0] -= 1
        return looks.part_of(value, model) if at[0] == -1 else value.detach().clone()
    if isinstance(value, (list, tuple)):
        parts = [swapped(v, at, model) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {k: swapped(v, at, model) for k, v in value.items()}
    return value


def same(got: Any, want: Any, several: bool) -> bool:
    """Whether a result is the whole's, or this rank's part of it."""
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
            return False
        if several or want.layout is not torch.strided:
            return True
        mine, start, stop = looks.interval(got) or (got.detach().reshape(-1), 0, want.numel())
        expected = want.detach().reshape(-1)[start:stop]
        wide = torch.complex128
        return torch.allclose(mine.to(wide), expected.to(wide), 1e-4, 1e-5, equal_nan=True)
    if isinstance(want, (list, tuple)):
        alike = isinstance(got, (list, tuple)) and len(got) == len(want)
        return alike and all(same(g, w, several) for g, w in zip(got, want, strict=True))
    near = isinstance(want, float) and abs(got - want) <= 1e-4 * max(1, abs(want))
    return bool(got is want or got == want or near)


def became(call: Callable[[], Any], want: Any, several: bool) -> str:
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            got = call()
    except Refused:
        return "refused"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:150]}"
    if not same(got, want, several):
        return f"is {got!r}, expected {want!r}"
    first = got[0] if isinstance(got, (list, tuple)) and got else got
    return "part" if isinstance(first, Tensor) and looks.interval(first) else "whole"


@on_ranks(2, seconds=600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_of_torch_is_right_on_a_part_or_refused(part: int, every: bool) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3))
    counts: Counter[str] = Counter()
    wrong = []
    for op in op_db[part::PARTS]:
        left_out = op.name in NOT_COMPARED or op.name.startswith("sparse.")
        if left_out or not op.supports_dtype(torch.float32, "cpu"):
            continue
        torch.manual_seed(0)
        samples = zip(
            range(5 if every else 1), op.sample_inputs("cpu", torch.float32), strict=False
        )
        for number, sample in samples:
            given = ((sample.input, *sample.args), sample.kwargs)
            for function in (op.op, op.inplace_variant):
                torch.manual_seed(0)
                args, kwargs = swapped(given, [1 << 30], model)
                try:
                    with torch.no_grad():
                        want = function(*args, **kwargs)
                except Exception:
                    continue  # torch has not got it, or refuses it itself
                most = 3 if function is op.op else 1
                for at in range(min(len(tensors(given)), most)):
                    args, kwargs = swapped(given, [at], model)
                    call = functools.partial(function, *args, **kwargs)
                    outcome = became(call, want, op.name in SEVERAL)
                    counts[outcome if outcome in ("part", "whole", "refused") else "wrong"] += 1
                    known = ("part", "whole", *(["refused"] if op.name in REFUSED else []))
                    if outcome not in known:
                        wrong.append(f"{op.name}, {function}, {number}, tensor {at}: {outcome}")
    assert not wrong, "\n".join(wrong)
    assert counts["part"] > 30 and counts["whole"] > 30, counts
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, counts)
    assert everybodys[0] == everybodys[1]


# -- operators of another library ------------------------------------------------------------------

SEEDED = torch.Tag.nondeterministic_seeded
#: {schema: (its tags, what it computes)}. Only what is tagged pointwise, and writes or returns one
#: tensor, is computed on a part.
THEIRS: dict[str, tuple[tuple[torch.Tag, ...], Any]] = {
    "halved(Tensor x) -> Tensor": ((torch.Tag.pointwise,), lambda x: x * 0.5),
    "halve_(Tensor(a!) x) -> ()": ((torch.Tag.pointwise,), lambda x: (x.mul_(0.5), None)[1]),
    "centered(Tensor x) -> Tensor": ((), lambda x: x - x.mean()),
    "center_(Tensor(a!) x) -> ()": ((), lambda x: (x.sub_(x.mean()), None)[1]),
    "upper(Tensor(a) x) -> Tensor(a)": ((), lambda x: x[:2]),
    "mul(Tensor x) -> Tensor": ((), lambda x: x @ x),
    "normal_(Tensor(a!) x) -> ()": ((SEEDED,), lambda x: (x.cumsum_(0), None)[1]),
}


@on_ranks(2)
def test_another_librarys_operator_is_computed_on_a_part_only_if_its_tag_says_pointwise() -> None:
    library = torch.library.Library("theirs", "DEF")
    for declared, (tags, run) in THEIRS.items():
        library.define(declared, tags=tags)
        library.impl(declared.partition("(")[0], run, "CompositeExplicitAutograd")
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3))
    for name in (declared.partition("(")[0] for declared in THEIRS):
        for function in (getattr(torch.ops.theirs, name), getattr(torch.ops.theirs, name).default):
            x = torch.arange(16.0).view(4, 4)
            part = looks.part_of(x, model)
            mine, start, stop = looks.interval(part) or ()
            if "halve" in name:
                out = function(part)
                mine, *_ = looks.interval(part if out is None else out) or ()
                assert torch.equal(mine, x.view(-1)[start:stop] * 0.5)
            else:
                with pytest.raises(Refused, match=rf"{name} of 'x' .* on a part.*gather\(\)"):
                    function(part)
                assert torch.equal(mine, x.view(-1)[start:stop])


def add(tensor: Tensor) -> Any:
    """A function in Python that is called like one of torch's."""
    return torch.overrides.handle_torch_function(add, (tensor,), tensor)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_reads_writes_and_conversions_of_parameters_are_the_wholes(stage: int) -> None:
    model: Any = onefold.shard(built(TinyMLP), onefold.Recipe.zero(stage, stall_timeout=20.0))
    model(features_of(0, 3, 7)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for p in model.parameters():
        p.data = p.data * 0.5  # noticed also where this rank owns nothing of it
        whole = p.onefold.gather()
        assert torch.allclose(p.sum(), whole.sum(), atol=1e-5)
        for made in (p.new_tensor(p.data), p.new_tensor(p)):
            assert type(made) is Tensor and torch.equal(made, whole)
    weight = model.enter.weight
    double = torch.tensor(3.0, dtype=torch.float64)
    for plain in (double.to(weight), double.type_as(weight.grad), torch.ones(2).to(weight.data)):
        assert type(plain) is Tensor and plain.dtype == torch.float32
    for part in (weight.data.to(double), weight.grad.type_as(double)):
        assert looks.interval(part) and part.shape == weight.shape and part.dtype == double.dtype
    for call, words in (
        (lambda: add(weight.data), "add of 'enter.weight'"),
        (lambda: weight.data.__dlpack__(), "cannot be done on a part"),
    ):
        with pytest.raises(Refused, match=words):
            call()
    torch.atleast_1d(model.enter.bias.data).zero_()
    assert not model.enter.bias.onefold.gather().any()
