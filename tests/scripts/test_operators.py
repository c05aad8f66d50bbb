"""What every operation of torch does with one rank's part: the whole's answer, or a sentence.
Nothing falls between.

The samples are torch's own (`op_db`): real arguments for each of its operators. One argument after
the other becomes an interval over two ranks, cut in the middle; the result must be that of the
plain tensor, the part that this rank has of it, or a refusal on both ranks alike.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from looks import engine, part_of_two, part_within, tensors_among
from on_ranks import on_ranks
from zoo import TinyMLP

#: Samples that compare what is not defined: memory without values.
NOT_COMPARED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "nn.functional.scaled_dot_product_attention",
}  # fmt: skip
#: A decomposition is one of several: compared by nothing but its shape.
SEVERAL = {
    "linalg.eig", "linalg.svd", "svd", "linalg.eigh", "geqrf", "linalg.qr", "qr", "pca_lowrank", "svd_lowrank", "linalg.lu", "lu",
}  # fmt: skip
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


def swapped(value: Any, at: list[int], of: Any) -> Any:
    """`value` with the tensor number `at[0]` of it made a part; counts down."""
    if isinstance(value, torch.Tensor):
        at[0] -= 1
        return part_of_two(value, of) if at[0] == -1 else value.detach().clone()
    if isinstance(value, (list, tuple)):
        parts = [swapped(v, at, of) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return {k: swapped(v, at, of) for k, v in value.items()} if isinstance(value, dict) else value


def differ(got: Any, want: Any, several: bool) -> str:
    """Where a result is neither the whole's nor this rank's part of it; "" where it is."""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"{type(got).__name__} instead of a tensor"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
        if several or want.layout is not torch.strided:
            return ""
        within, mine = part_within(got)
        expected = want.detach().reshape(-1)
        expected = expected if within is None else expected[within[0] : within[1]]
        mine, expected = (t.reshape(-1).to(torch.complex128) for t in (mine, expected))
        same = torch.allclose(mine, expected, 1e-4, 1e-5, equal_nan=True)
        return "" if same else f"{'part' if within else 'whole'} differs"
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            return f"{type(got).__name__} instead of {len(want)} results"
        both = zip(got, want, strict=True)
        return next((said for g, w in both if (said := differ(g, w, several))), "")
    near = isinstance(want, float) and abs(got - want) <= 1e-4 * max(1, abs(want))
    return "" if got == want or got is want or near else f"{got!r}, expected {want!r}"


def outcome(call: Any, want: Any, several: bool) -> str:
    """ "part", "whole", "refused", or what is wrong."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            got = call()
    except onefold.ShardedParameterError:
        return "refused"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:150]}"
    if said := differ(got, want, several):
        return f"is wrong: {said}"
    first = got[0] if isinstance(got, (list, tuple)) and got else got
    part = isinstance(first, torch.Tensor) and part_within(first)[0] is not None
    return "part" if part else "whole"


@on_ranks(2, seconds=600)
def test_every_operator_of_torch_is_right_on_a_part_or_refused(every: bool) -> None:
    """A sample of every eighth operator; `--all`: five of each."""
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    of = engine(onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=20.0)))
    counts: Counter[str] = Counter()
    wrong, refused = [], set()
    operators = op_db[:: 1 if every else 8]
    for op in operators:
        dense = op.name not in NOT_COMPARED and not op.name.startswith("sparse.")
        if not dense or not op.supports_dtype(torch.float32, "cpu"):
            continue
        torch.manual_seed(0)
        for number, sample in enumerate(op.sample_inputs("cpu", torch.float32)):
            if number == (5 if every else 1):
                break
            given = ((sample.input, *sample.args), sample.kwargs)
            tensors = sum(1 for _ in tensors_among(given))
            for inplace, function in enumerate((op.op, op.inplace_variant)):
                if function is None:
                    continue
                torch.manual_seed(0)
                args, kwargs = swapped(given, [1 << 30], of)
                try:
                    with torch.no_grad():
                        want = function(*args, **kwargs)
                except Exception:
                    continue
                for at in range(min(tensors, 1 if inplace else 3)):
                    args, kwargs = swapped(given, [at], of)
                    parts = [part_within(t)[0] for t in tensors_among((args, kwargs))]
                    if not any(parts):
                        continue
                    call = functools.partial(function, *args, **kwargs)
                    became = outcome(call, want, op.name in SEVERAL)
                    known = became in ("part", "whole", "refused")
                    counts[became if known else "wrong"] += 1
                    if became == "refused":
                        refused.add(op.name)
                    elif not known:
                        wrong.append(f"{op.name}{'_' * inplace}, {number}, tensor {at}: {became}")
    assert not wrong, "\n".join(wrong)
    assert min(counts["part"], counts["whole"]) > len(operators) // 2, counts
    assert refused <= REFUSED, sorted(refused - REFUSED)
    seen: list[Any] = [None] * 2
    dist.all_gather_object(seen, (counts, sorted(refused)))
    assert seen[0] == seen[1]


# -- operators of other libraries ------------------------------------------------------------------

#: {schema: (its tags, what it computes)}
THEIRS: dict[str, tuple[tuple[torch.Tag, ...], Any]] = {
    "halved(Tensor x) -> Tensor": ((torch.Tag.pointwise,), lambda x: x * 0.5),
    "halve_(Tensor(a!) x) -> ()": ((torch.Tag.pointwise,), lambda x: (x.mul_(0.5), None)[1]),
    "centered(Tensor x) -> Tensor": ((), lambda x: x - x.mean()),
    "center_(Tensor(a!) x) -> ()": ((), lambda x: (x.sub_(x.mean()), None)[1]),
    "normal_(Tensor(a!) x, *, Generator? generator=None) -> ()": (
        (torch.Tag.nondeterministic_seeded,), lambda x, generator=None: (x.cumsum_(0), None)[1],
    ),
}  # fmt: skip


def add(tensor: torch.Tensor) -> Any:
    """A function in Python that is called like one of torch's."""
    return torch.overrides.handle_torch_function(add, (tensor,), tensor)


@on_ranks(2)
def test_another_librarys_operator_runs_on_the_part_if_it_is_pointwise_and_is_refused_else() -> None:  # fmt: skip
    library = torch.library.Library("theirs", "DEF")
    for declared, (tags, run) in THEIRS.items():
        library.define(declared, tags=tags)
        library.impl(declared.partition("(")[0], run, "CompositeExplicitAutograd")
    of = engine(onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=20.0)))
    x, theirs = torch.arange(16.0).view(4, 4), torch.ops.theirs
    mine = torch.arange(16.0)[8 * dist.get_rank() :][:8]
    within, found = part_within(theirs.halved(part_of_two(x, of)))
    assert within and torch.equal(found, mine * 0.5)
    theirs.halve_(written := part_of_two(x, of))
    assert torch.equal(part_within(written)[1], mine * 0.5)
    for name in ("centered", "center_", "normal_"):
        part = part_of_two(x, of)
        with pytest.raises(onefold.ShardedParameterError, match=rf"{name} of 'x' .* on a part"):
            getattr(theirs, name)(part)
        assert torch.equal(part_within(part)[1], mine)
    with pytest.raises(onefold.ShardedParameterError, match="add of 'x'"):
        add(part_of_two(x, of))
