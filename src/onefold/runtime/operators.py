"""What an operation does that is given an interval (runtime/interval.py), or a sharded parameter
outside a forward pass without gradients.

| operation                                            | what happens                                                      | traffic       |
|------------------------------------------------------|-------------------------------------------------------------------|---------------|
| shape, numel, dtype and the like                     | the whole's                                                       | none          |
| element-wise, in place or not: add_, clamp, copy_    | on this rank's elements; of another tensor its slice is taken     | none          |
| the same as lists: _foreach_lerp_                    | the same                                                          | none          |
| zeros_like; randn_like, normal_, nn.init             | this rank's slice of what would be made, or drawn, whole          | none          |
| view(-1), flatten, [i], [a:b] on the first dimension | an interval: the elements keep their order                        | none          |
| norm, sum, mean, max, any without a dimension        | the whole's, from one number of every rank                        | 8 bytes       |
| other reading: matmul, sum(dim), [mask], tolist      | on the gathered whole; the result is an ordinary tensor           | the parameter |
| other writing in place: w[:, 3] = 0, tril_           | on the gathered whole, of which this rank keeps its slice         | the parameter |
| views in another order: t(), [:, 3], chunk(2, 1)     | `ShardedParameterError`: a copy would lose what is written to it  |               |
| memory of its own: set_, resize_, DLPack             | `ShardedParameterError`                                           |               |

What has traffic is a collective: every rank must come to it. Names not in these tables are looked
up in torch's own schemas: what writes to nothing and returns no view is reading, and everything
else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch

from onefold.runtime.interval import (
    IntervalSpec,
    ShardedParameterError,
    disable_torch_function,
    dress,
    lend,
    spec_of,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _words("""
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2
    atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max
    clamp_min clip clone conj conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1
    fake_quantize_per_tensor_affine fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu greater greater_equal
    gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf
    isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative
    nextafter not_equal polygamma positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign
    signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide
    trunc where xlogy special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv
    special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_i0e special_i1
    special_i1e special_log1p special_log_ndtr special_logit special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma
    special_psi special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_sinc
    special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta to type type_as float double half bfloat16 int long
    short char byte bool cfloat cdouble chalf cpu cuda xpu contiguous detach alias resolve_conj resolve_neg
    """)
# Of a second tensor they ask the dtype and the device, never the elements: `scale.to(p)`.
OF_ANOTHERS_KIND = _words("to type_as")
_DUNDERS = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__rsub__": "rsub", "__isub__": "sub_", "__mul__": "mul",
    "__rmul__": "mul", "__imul__": "mul_", "__truediv__": "div", "__rtruediv__": "div", "__itruediv__": "div_", "__div__": "div",
    "__rdiv__": "div", "__idiv__": "div_", "__floordiv__": "floor_divide", "__rfloordiv__": "floor_divide",
    "__ifloordiv__": "floor_divide_", "__mod__": "remainder", "__rmod__": "remainder", "__imod__": "remainder_", "__pow__": "pow",
    "__rpow__": "pow", "__ipow__": "pow_", "__neg__": "neg", "__pos__": "positive", "__abs__": "abs", "__invert__": "bitwise_not",
    "__and__": "bitwise_and", "__rand__": "bitwise_and", "__iand__": "bitwise_and_", "__or__": "bitwise_or", "__ror__": "bitwise_or",
    "__ior__": "bitwise_or_", "__xor__": "bitwise_xor", "__rxor__": "bitwise_xor", "__ixor__": "bitwise_xor_",
    "__lshift__": "bitwise_left_shift", "__rlshift__": "bitwise_left_shift", "__ilshift__": "bitwise_left_shift_",
    "__rshift__": "bitwise_right_shift", "__rrshift__": "bitwise_right_shift", "__irshift__": "bitwise_right_shift_", "__eq__": "eq",
    "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__matmul__": "matmul", "__rmatmul__": "matmul",
}  # fmt: skip
_WRITTEN = _words("""
    copy_ fill_ zero_ masked_fill_ apply_
    """) | {
    name + "_"
    for name in _ELEMENTWISE
    if name not in ("to", "type", "detach", "contiguous", "clone")
}
_DRAWN = _words("""
    normal_ uniform_ exponential_ geometric_ log_normal_ cauchy_ random_ bernoulli_
    """)
_LIKE = _words("""
    zeros_like ones_like empty_like full_like
    """)
_DRAWN_LIKE = _words("""
    rand_like randn_like randint_like
    """)
_FRESH = _words("""
    new_zeros new_ones new_empty new_full new_tensor new new_empty_strided result_type
    """)
_REDUCED = _words("""
    sum mean prod norm linalg_vector_norm linalg_norm max min amax amin any all count_nonzero equal
    """)
_VIEWS = _words("""
    view reshape flatten ravel view_as reshape_as unflatten squeeze unsqueeze select narrow unbind chunk split split_with_sizes
    tensor_split hsplit vsplit dsplit swapaxes swapdims moveaxis movedim transpose permute t adjoint T mT H mH real imag numpy_T
    matrix_H diagonal unfold as_strided view_as_real view_as_complex detach_copy atleast_1d atleast_2d atleast_3d unsafe_chunk
    unsafe_split
    """)
# Views whose elements repeat, to which nobody may write: a view of the gathered copy is as good.
# Where none repeats they are views.
_READ_VIEWS = _words("""
    expand expand_as broadcast_to broadcast_tensors meshgrid
    """)
_READ = _words("""
    unique unique_consecutive pca_lowrank svd_lowrank lu stft istft cov corrcoef einsum block_diag cartesian_prod
    """)
_NUMBERS = _words("""
    item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __contains__
    """)
_REFUSED = _words("""
    set_ resize_ resize resize_as resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_ share_memory_ __dlpack__
    __dlpack_device__ __cuda_array_interface__ to_sparse to_mkldnn t_ transpose_ squeeze_ unsqueeze_ swapdims_ swapaxes_
    as_strided_ map_ map2_ module_load backward storage typed_storage register_hook register_post_accumulate_grad_hook rename_
    refine_names align_to align_as embedding_renorm_ requires_grad_true __setstate__ __array_wrap__
    """)
# Asked of the memory that is here: identity, place, bookkeeping.
_LOCAL = _words("""
    data_ptr untyped_storage storage_type _typed_storage is_shared is_pinned pin_memory get_device is_set_to device dtype layout
    requires_grad is_leaf grad_fn _version is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_mps
    is_mtia is_xpu is_xla is_ipu is_maia is_vulkan is_floating_point is_complex is_signed is_conj is_neg is_inference element_size
    itemsize names has_names output_nr _base _cdata _backward_hooks _post_accumulate_grad_hooks retains_grad volatile name
    requires_grad_ detach_ retain_grad __hash__ _is_view is_coalesced is_distributed _has_compatible_shallow_copy_type _grad_fn
    grad_dtype is_inference can_cast as_subclass cudnn_is_acceptable record_stream _is_zerotensor _is_any_true _is_all_true
    get_default_dtype grad _grad ndim_local __repr__ is_tensor is_storage is_nonzero_local
    """)


_LEAF = "a leaf Variable that requires grad is being used in an in-place operation."


class Stepping:
    """How many optimizer steps are under way: inside one, plain tensors of a rank's own elements
    meet intervals (states made outside).
    """

    depth = 0


_names: dict[Any, str] = {}


def name_of(func: Any) -> str:
    """The name by which the tables know `func`: "add_", "sum", "shape", or "init" for functions of
    torch.nn.init.
    """
    known = _names.get(func)
    if known is None:
        known = getattr(func, "__name__", str(func))
        if known in ("__get__", "__set__", "__delete__"):
            known = func.__self__.__name__ + ("" if known == "__get__" else known)
        elif getattr(func, "__module__", "") == "torch.nn.init":
            known = "init"
        elif isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            known = known.partition(".")[0]
        _names[func] = known = _DUNDERS.get(known, known)
    return known


def writes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `func` changes its first argument, or `out`."""
    name = name_of(func)
    written = name.endswith("_") and not name.endswith("__")
    return (
        written
        or name in ("init", "__setitem__")
        or kwargs.get("out") is not None
        or kwargs.get("inplace") is True
    )


def is_about_itself(func: Any) -> bool:
    """Whether `func` asks for what needs no elements (a shape, a dtype), or makes a tensor like
    another.
    """
    name = name_of(func)
    return (
        name in META
        or name in _LOCAL
        or name in _LIKE
        or name in _DRAWN_LIKE
        or name in _FRESH
        or name in _REFUSED
        or name == "detach"
    )


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """See the table of this module. `args` hold at least one interval, or sharded parameter that is
    to be taken for one.

    Raises:
        ShardedParameterError: there is no way to do it on a part; the message says what to write
            instead.
    """
    name = name_of(func)
    with disable_torch_function():
        meta = META.get(name)
        if meta is not None and (spec := spec_of(args[0])) is not None:
            return meta(spec, *args, **kwargs)
        if name == "data":
            return _lent(dress(func(args[0]), spec_of(args[0])), args[0])  # type: ignore[arg-type]
        if name in _LOCAL:
            return _asked(func, name, args, kwargs)
        tensors = _tensors((args, kwargs))
        kept = next(
            (spec for t in tensors if (spec := spec_of(t)) is not None and spec.unreduced), None
        )
        if kept is not None and name not in ("zero_", "_foreach_zero_"):
            raise ShardedParameterError(
                f"{name} was given the gradient of {kept.name!r} under onefold.no_sync, where"
                " `.grad` shows this rank's unreduced part only. Look at gradients, and change"
                " them, after the last micro-batch. Dropping them is fine: optimizer.zero_grad(),"
                " or `.grad = None`."
            )
        if name == "data__set__" and spec_of(args[0]) is not None:
            return _give(*args)
        if name in _REFUSED:
            raise _refusal(func, name, args, kwargs)
        if name.startswith(("_foreach_", "_fused_")):
            return _foreach(func, name, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(func, *args)
        if (
            kwargs.get("requires_grad")
            and (name in _LIKE or name in _DRAWN_LIKE)
            and any(map(spec_of, tensors))
        ):
            raise ShardedParameterError(
                f"{name}({_subject(args, kwargs)}, requires_grad=True) would be one rank's part,"
                " and gradients of it would be lost. Make a whole: torch.zeros(p.shape,"
                " device=p.device, requires_grad=True)."
            )
        if name in _LIKE:
            return _on_locals(func, args, kwargs)
        if name in _DRAWN_LIKE:
            return _drawn_like(func, args, kwargs)
        if name in _FRESH:
            return func(*args, **kwargs)
        if name == "init" or (
            name in _DRAWN and spec_of(args[0]) and not any(map(spec_of, tensors[1:]))
        ):
            return _drawn(func, args, kwargs)
        if (
            kwargs.get("out") is not None or kwargs.get("inplace") is True
        ) and name in _ELEMENTWISE:
            return _write(func, name, args, kwargs)
        if name in ("to", "type_as") and isinstance(
            like := args[1] if len(args) > 1 else kwargs.get("other"), torch.Tensor
        ):
            return _like_another(like, args, kwargs)
        if name == "where" and len(args) + len(kwargs) == 1:  # indices, as nonzero() has them
            return _read(func, name, args, kwargs)
        if (
            name in _ELEMENTWISE
            or name in _WRITTEN
            or (name in ("max", "min") and len(args) == 2 and isinstance(args[1], torch.Tensor))
        ):
            return _elementwise(func, name, args, kwargs)
        if name == "__getitem__":
            return _getitem(func, args, kwargs)
        if name == "__setitem__":
            return _setitem(func, *args)
        if name == "__iter__":
            return iter(_view(torch.Tensor.unbind, "unbind", args, kwargs))
        if name in _VIEWS:
            return _view(func, name, args, kwargs)
        if name in _READ_VIEWS:
            return _expanded(func, name, args, kwargs)
        if name in _REDUCED and (answer := _reduced(name, args, kwargs)) is not None:
            return answer
        if name in _NUMBERS:
            return _number(func, name, args, kwargs)
        if name == "__format__":
            return (
                _number(func, name, args, kwargs) if not spec_of(args[0]).shape else repr(args[0])  # type: ignore[union-attr]
            )
        if writes_in_place(func, kwargs):
            return _write(func, name, args, kwargs)
        if _only_reads(func, name):
            return _read(func, name, args, kwargs)
        raise _refusal(func, name, args, kwargs)


# -- what is asked of a tensor without its elements ------------------------------------------------


def _size(spec: IntervalSpec, _: Any, dim: int | None = None) -> Any:
    return spec.shape if dim is None else spec.shape[dim]


def _stride(spec: IntervalSpec, _: Any, dim: int | None = None) -> Any:
    strides, step = [], 1
    for n in reversed(spec.shape):
        strides.append(step)
        step *= max(n, 1)
    strides.reverse()
    return tuple(strides) if dim is None else strides[dim]


def _len(spec: IntervalSpec, _: Any) -> int:
    if not spec.shape:
        raise TypeError("len() of a 0-d tensor")
    return spec.shape[0]


#: What is asked of a tensor without its elements, and the answer: from the whole's spec and the
#: tensor.
META: dict[str, Callable[..., Any]] = {
    "shape": lambda spec, _: spec.shape,
    "size": _size,
    "dim": lambda spec, _: len(spec.shape),
    "ndim": lambda spec, _: len(spec.shape),
    "ndimension": lambda spec, _: len(spec.shape),
    "numel": lambda spec, *_, **__: spec.numel,
    "nelement": lambda spec, _: spec.numel,
    "__len__": _len,
    "stride": _stride,
    "storage_offset": lambda spec, _: 0,
    "is_contiguous": lambda spec, *_, **__: True,
    "is_non_overlapping_and_dense": lambda spec, *_: True,
    "dim_order": lambda spec, *_, **__: tuple(range(len(spec.shape))),
    "nbytes": lambda spec, t: spec.numel * t.element_size(),
    "is_same_size": (
        lambda spec, _, other: (
            spec.shape == (found.shape if (found := spec_of(other)) is not None else other.shape)
        )
    ),
}


#: Names of what a tensor says of itself.
METADATA = frozenset(META) | _words(
    "dtype device is_leaf requires_grad layout is_cuda is_cpu is_meta itemsize is_floating_point"
    " is_complex element_size"
)


def _asked(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "requires_grad_" and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
        raise ShardedParameterError(
            f"requires_grad_() on one rank's part of {_subject(args, kwargs)}: gradients of it"
            " would be of a part. Use the parameter itself, which is gathered where gradients are"
            " needed, or a whole copy: parameter.onefold.gather() (on every rank)."
        )
    out = func(*args, **kwargs)
    spec = spec_of(args[0]) if name in ("pin_memory", "detach_") else None
    return (
        out
        if spec is None or not isinstance(out, torch.Tensor) or spec_of(out)
        else dress(out, spec)
    )


# -- on this rank's elements -----------------------------------------------------------------------


def _elementwise(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "type" and len(args) == 1 and not kwargs:
        return func(*args)  # the name of its type
    if name in OF_ANOTHERS_KIND:
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
        out, spec = func(*args, **kwargs), spec_of(args[0])
        return out if spec is None else _dressed(out, spec, args)
    # It wants a number
    if name in ("masked_fill", "masked_fill_") and any(
        spec_of(v) for v in (*args[2:], kwargs.get("value"))
    ):
        args, kwargs = (
            (*args[:2], *_whole(args[2:], name)),
            {k: _whole(v, name) if k == "value" else v for k, v in kwargs.items()},
        )
    # one-dimensional memory knows one order
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    tensors = _tensors((args, kwargs))
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors if spec_of(t) is None)
    if graded and not (name in _WRITTEN and spec_of(args[0])):
        return _read(func, name, args, kwargs)  # its gradient is wanted whole
    if name in _WRITTEN:
        base = spec_of(args[0])
        if base is None:
            return (
                func(*args, **kwargs)
                if _all_local(args[0], tensors[1:])
                else _read(func, name, args, kwargs)
            )
        shape = _together(tensors[1:])
        fits = shape is not None and _broadcast(base.shape, shape) == base.shape
        if not fits and not any(_is_local(t, base) for t in tensors[1:]):
            raise _mismatch(name, base, tensors[1:])
    else:
        found = _together(tensors)
        base = next(
            (s for t in tensors if (s := spec_of(t)) is not None and s.shape == found), None
        )
        if base is None:
            base = next(
                (
                    s
                    for t in tensors
                    if (s := spec_of(t)) is not None and any(_is_local(u, s) for u in tensors)
                ),
                None,
            )
            if base is None:
                return _read(func, name, args, kwargs)
    out = _dressed(func(*_replaced(args, base, name), **_replaced(kwargs, base, name)), base, args)
    return _lent(out, args[0]) if name in ("detach", "alias") else out


def _like_another(like: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """`x.to(like)`: of `like` it takes no more than dtype and device, whatever its shape is."""
    kwargs = {k: v for k, v in kwargs.items() if k != "other"}
    changed = (args[0], like.device, like.dtype, *args[2:])
    if spec_of(args[0]) is None:
        return torch.Tensor.to(*changed, **kwargs)
    return _elementwise(torch.Tensor.to, "to", changed, kwargs)


def _lent(view: Any, source: torch.Tensor) -> Any:
    lend(view, source)
    return view


def _give(target: torch.Tensor, value: torch.Tensor) -> None:
    """`interval.data = value`: the values are taken over, the memory stays."""
    spec, theirs = spec_of(target), spec_of(value)
    assert spec is not None
    if (
        value.dtype != target.dtype
        or (theirs.shape if theirs is not None else value.shape) != spec.shape
    ):
        raise _mismatch(".data =", spec, [value])
    with torch.no_grad():
        target.copy_(_part(value, spec, ".data ="))


def _on_locals(func: Any, args: Any, kwargs: Any) -> Any:
    spec = spec_of(args[0] if args else kwargs["input"])
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return _dressed(func(*args, **kwargs), spec, args)  # type: ignore[arg-type]


def _replaced(value: Any, base: IntervalSpec, what: str) -> Any:
    """`value` with each tensor of it replaced by its elements where `base` has this rank's."""
    if isinstance(value, torch.Tensor):
        return _part(value, base, what)
    if isinstance(value, (list, tuple)):
        parts = [_replaced(v, base, what) for v in value]
        return parts if isinstance(value, list) else tuple(parts)
    return (
        {k: _replaced(v, base, what) for k, v in value.items()}
        if isinstance(value, dict)
        else value
    )


def _part(t: torch.Tensor, base: IntervalSpec, what: str) -> torch.Tensor:
    spec = spec_of(t)
    if spec is not None:
        if spec.same_cut(base) and spec.shape == base.shape:
            return t
        t = spec.gather(t, what)
    elif t.dim() == 0 or _is_local(t, base):
        return t
    if t.requires_grad:
        t = t.detach()
    return slice_of(t, base)


def slice_of(t: torch.Tensor, spec: IntervalSpec) -> torch.Tensor:
    """This rank's elements, [stop - start], of the plain tensor `t`, which broadcasts to
    `spec.shape`.
    """
    if t.numel() == 1:
        return t.reshape(1) if t.dim() else t
    t = t.expand(spec.shape)
    if t.is_contiguous():
        return t.reshape(-1)[spec.start : spec.stop]
    if spec.start == spec.stop:
        return t.new_empty(0)
    row = spec.numel // spec.shape[0]  # whole rows are copied at most, not the whole
    first, last = spec.start // row, -(-spec.stop // row)
    return t[first:last].reshape(-1)[spec.start - first * row : spec.stop - first * row]


def _is_local(t: torch.Tensor, base: IntervalSpec) -> bool:
    """Whether a plain tensor holds this rank's elements alone: inside an optimizer's step its
    parameters, gradients and states do.
    """
    return (
        Stepping.depth > 0
        and spec_of(t) is None
        and tuple(t.shape) == (base.stop - base.start,)
        and t.shape != base.shape
    )


def _all_local(target: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    specs = [s for t in others if (s := spec_of(t)) is not None]
    return bool(specs) and all(_is_local(target, s) for s in specs)


def _dressed(out: Any, spec: IntervalSpec, args: Any = ()) -> Any:
    if isinstance(out, torch.Tensor):
        return out if spec_of(out) is not None else dress(out, spec)
    if isinstance(out, (list, tuple)):
        return (
            type(out)(*(_dressed(o, spec) for o in out))
            if hasattr(out, "_fields")
            else type(out)(_dressed(o, spec) for o in out)
        )
    return out


def _together(tensors: Sequence[torch.Tensor]) -> torch.Size | None:
    """The shape of all of them broadcast; None where they do not fit."""
    try:
        return torch.broadcast_shapes(
            *((s.shape if (s := spec_of(t)) is not None else t.shape) for t in tensors)
        )
    except RuntimeError:
        return None


def _broadcast(a: Any, b: Any) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(a, b)
    except RuntimeError:
        return None


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """What fills a tensor from nothing but numbers: it fills one of the whole's shape, of which
    this rank takes its slice.

    With equal seeds ranks draw the same whole; without, each rank's slice is of a draw of its own.
    """
    target = args[0] if args else kwargs["tensor"]
    spec = spec_of(target)
    assert spec is not None
    with torch.no_grad():
        whole = torch.empty(spec.shape, dtype=target.dtype, device=target.device)
        func(*(whole, *args[1:]), **kwargs) if args else func(**{**kwargs, "tensor": whole})
        target.copy_(whole.reshape(-1)[spec.start : spec.stop])
    return target


def _drawn_like(func: Any, args: Any, kwargs: Any) -> Any:
    spec = spec_of(args[0])
    if spec is None:
        return func(*args, **kwargs)
    whole = func(
        torch.empty(spec.shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs
    )
    return dress(whole.reshape(-1)[spec.start : spec.stop].clone(), spec)


# -- lists -----------------------------------------------------------------------------------------


def _foreach(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The element-wise work of `_foreach_` and `_fused_` functions, list item by list item."""
    if name == "_foreach_norm":
        return norms_of(args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2))
    lists = [
        a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)
    ]
    writes = name.endswith("_")
    if name in ("_foreach_max",) or any(len(a) != len(lists[0]) for a in lists):
        return _read(func, name, args, kwargs)
    bases: list[IntervalSpec | None] = []
    columns = list(zip(*lists, strict=True))
    for column in columns:
        first = spec_of(column[0])
        if writes:
            bases.append(first)
        else:
            shape = _together(column)
            bases.append(
                next(
                    (s for t in column if (s := spec_of(t)) is not None and s.shape == shape), None
                )
            )
    given = []
    for a in args:
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            a = [
                _part(t, base, name) if base is not None else _whole(t, name)
                for t, base in zip(a, bases, strict=True)
            ]
        elif isinstance(a, torch.Tensor):
            a = _whole(a, name)  # a number for all of them
        given.append(a)
    out = func(*given, **_whole(kwargs, name))
    if out is None:
        return None
    return [
        _dressed(o, base) if base is not None else o for o, base in zip(out, bases, strict=True)
    ]


def norms_of(tensors: Sequence[torch.Tensor], p: Any) -> list[torch.Tensor]:
    """The p-norms of whole tensors, each 0-dim, from one exchange of numbers for each group of
    ranks.
    """
    p = float(p)
    local = [_norm_here(t, p) for t in tensors]
    apart: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if (spec := spec_of(t)) is not None:
            apart.setdefault(spec.owners.meet(spec.name)[1], []).append(i)
    out = list(local)
    for indices in apart.values():
        spec = spec_of(tensors[indices[0]])
        assert spec is not None
        parts = torch.stack([local[i].to(local[indices[0]].device, torch.float64) for i in indices])
        mine = parts if math.isinf(p) else parts.pow(p) if p else parts
        every = spec.exchange(mine, "the norm").to(parts.device)
        most = every.amax(0) if p > 0 else every.amin(0)
        total = most if math.isinf(p) else every.sum(0).pow(1.0 / p) if p else every.sum(0)
        for i, value in zip(indices, total, strict=True):
            out[i] = value.to(_real(tensors[i].dtype))
    return out


def _norm_here(t: torch.Tensor, p: float) -> torch.Tensor:
    """The norm of a plain tensor, or of this rank's part: that of 16 bits in fp32, since it is
    rounded when all parts are added.
    """
    if spec_of(t) is None:
        return torch._foreach_norm([t], p)[0]
    if not t.numel():  # adds nothing to the others'
        return torch.full((), math.inf if p < 0 else 0.0, dtype=_real(t.dtype), device=t.device)
    wide = torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else None
    return torch._foreach_norm([t], p, dtype=wide)[0]


def _unscale(func: Any, grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """torch.amp.GradScaler's look at gradients: an infinity that one rank finds is found by all,
    without waiting on the host.
    """
    func(grads, found_inf, inv_scale)
    agreed: set[int] = set()
    for t in grads:
        if (spec := spec_of(t)) is not None:
            engine, _ = spec.owners.meet(spec.name)
            if id(engine) not in agreed:
                agreed.add(id(engine))
                engine.agree_on_overflow(found_inf)


# -- views -----------------------------------------------------------------------------------------


def _view(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A view whose elements keep their order is an interval: it is made of a tensor without memory
    to see where its elements are.
    """
    spec = spec_of(args[0])
    meta = [_meta(a) for a in args]
    if spec is None:
        if name not in ("view_as", "reshape_as"):  # numbers in an interval
            return func(*_whole(args, name), **_whole(kwargs, name))
        return func(args[0], *meta[1:], **{k: _meta(v) for k, v in kwargs.items()})
    if any(map(spec_of, (*args[1:], *kwargs.values()))) and name not in ("view_as", "reshape_as"):
        args, kwargs = (args[0], *_whole(args[1:], name)), _whole(kwargs, name)
        meta = [meta[0], *args[1:]]
    return _cut_as(
        func(*meta, **{k: _meta(v) for k, v in kwargs.items()}),
        args[0],
        spec,
        func,
        name,
        args,
        kwargs,
    )


def _expanded(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "broadcast_tensors":
        tensors = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        shape = _together(tensors)
        if shape is not None:
            return tuple(_expanded(torch.Tensor.expand, "expand", (t, shape), {}) for t in tensors)
    spec = spec_of(args[0]) if args else None
    if spec is not None and name != "meshgrid":
        seen = func(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
        if seen.numel() == spec.numel:  # no element twice: whoever writes to it means the parameter
            return _cut_as(seen, args[0], spec, func, name, args, kwargs)
    return _read(func, name, args, kwargs)


def _meta(value: Any) -> Any:
    spec = spec_of(value)
    return value if spec is None else torch.empty(spec.shape, dtype=value.dtype, device="meta")


def _cut_as(
    seen: Any, local: torch.Tensor, spec: IntervalSpec, func: Any, name: str, args: Any, kwargs: Any
) -> Any:
    if isinstance(seen, (list, tuple)):
        return type(seen)(_cut_as(s, local, spec, func, name, args, kwargs) for s in seen)
    if not seen.is_contiguous() or seen.dtype != local.dtype:
        raise _refusal(func, name, args, kwargs)
    into = (
        spec.within(seen.storage_offset(), seen.shape)
        if seen.numel()
        else spec.within(0, seen.shape)
    )
    first = into.first - spec.first + into.start - spec.start if into.stop > into.start else 0
    return _lent(dress(local.detach()[first : first + into.stop - into.start], into), local)


def _plain_index(index: Any) -> Any:
    """An index with an int for each number in it: numpy's and 0-dim tensors make views, as ints
    do.
    """
    if isinstance(index, tuple):
        return tuple(map(_plain_index, index))
    if isinstance(index, torch.Tensor):
        number = index.dim() == 0 and spec_of(index) is None and index.dtype in _INTEGERS
        return int(index) if number else index
    return int(index) if isinstance(index, Integral) and not isinstance(index, bool) else index


_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def _is_basic(index: Any) -> bool:
    """Whether an index makes a view: integers, slices, None and Ellipsis."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        i is None
        or i is Ellipsis
        or isinstance(i, slice)
        or (isinstance(i, int) and not isinstance(i, bool))
        for i in parts
    )


def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    args = (args[0], _plain_index(args[1]))
    if spec_of(args[0]) is None or not _is_basic(args[1]):
        return _read(func, "[...]", args, kwargs)
    return _view(func, "[...]", args, kwargs)


def _setitem(func: Any, target: torch.Tensor, index: Any, value: Any) -> None:
    spec = spec_of(target)
    if spec is None:
        _read(func, "[...] =", (target, index, value), {})
        return
    if target.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(_LEAF)
    index = _plain_index(index)
    if _is_basic(index):
        seen = torch.empty(spec.shape, dtype=target.dtype, device="meta")[index]
        if seen.is_contiguous():
            into = _cut_as(seen, target, spec, func, "[...] =", (target,), {})
            given = (
                value
                if isinstance(value, torch.Tensor)
                else torch.as_tensor(value, dtype=target.dtype, device=target.device)
            )
            # As torch does
            while spec_of(given) is None and given.dim() > seen.dim() and given.shape[0] == 1:
                given = given[0]
            with torch.no_grad():
                _elementwise(torch.Tensor.copy_, "copy_", (into, given), {})
            return
    mask = spec_of(index)
    number = isinstance(value, (int, float)) or (
        isinstance(value, torch.Tensor) and value.dim() == 0 and spec_of(value) is None
    )
    if (
        mask is not None
        and index.dtype == torch.bool
        and mask.same_cut(spec)
        and mask.shape == spec.shape
        and number
    ):
        target.masked_fill_(index, value)
        return
    _write(func, "[...] =", (target, index, value), {})


# -- the whole -------------------------------------------------------------------------------------


def _whole(value: Any, what: str) -> Any:
    """`value` with each interval of it gathered. Collective."""
    if isinstance(value, torch.Tensor):
        spec = spec_of(value)
        if spec is None:
            return value
        # A parameter is read in the dtype that it shows; its masters may be in another.
        return spec.gather(value.detach(), what).to(
            value.__dict__.get("_onefold_declared", value.dtype)
        )
    if isinstance(value, (list, tuple)):
        parts = [_whole(v, what) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return {k: _whole(v, what) for k, v in value.items()} if isinstance(value, dict) else value


def _read(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    return func(*_whole(args, name), **_whole(kwargs, name))


def _write(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """On the whole; of what has been written each rank keeps its slice."""
    out = kwargs.get("out")
    target = out if out is not None else args[0] if args else kwargs["input"]
    spec = spec_of(target)
    if spec is None:
        return _read(func, name, args, kwargs)
    if target.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(_LEAF)
    with torch.no_grad():
        whole = spec.gather(target, name)
        if out is not None:
            func(
                *_whole(args, name),
                **{**_whole({k: v for k, v in kwargs.items() if k != "out"}, name), "out": whole},
            )
        else:
            rest = (whole, *_whole(args[1:], name)) if args else ()
            named = _whole({k: v for k, v in kwargs.items() if args or k != "input"}, name)
            func(*rest, **(named if args else {**named, "input": whole}))
        if whole.shape != spec.shape:
            raise _refusal(func, name, args, kwargs)
        target.copy_(whole.reshape(-1)[spec.start : spec.stop])
    return target


def _number(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    got = _read(func, name, args, kwargs)
    if name in ("numpy", "__array__"):
        got.setflags(write=False)  # a copy: what is written to it would be lost
    return got


def _only_reads(func: Any, name: str) -> bool:
    """Whether `func` writes to nothing and returns no view, as far as torch says."""
    if name in _READ or name in _READ_VIEWS:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None:
        schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
        schemas = [s for s in schemas if not s.is_mutable]
        return bool(schemas) and not any(
            r.alias_info is not None for s in schemas for r in s.returns
        )
    module = getattr(func, "__module__", "") or ""
    return module in (
        "torch.functional",
        "torch.nn.functional",
        "torch._jit_internal",
        "torch._linalg_utils",
    )


# -- reductions ------------------------------------------------------------------------------------


def _reduced(name: str, args: Any, kwargs: Any) -> torch.Tensor | bool | None:
    """The whole's answer from one number of every rank; None where that takes more (a dimension,
    another order).
    """
    x = args[0] if args else kwargs.get("input")
    spec = spec_of(x)
    if spec is None or not spec.numel:
        return None
    if name == "equal":
        return _equal(spec, x, args[1] if len(args) > 1 else kwargs["other"])
    dtype = kwargs.get("dtype")
    if name in ("norm", "linalg_vector_norm", "linalg_norm"):
        return _norm(name, spec, args, kwargs)
    if (
        len(args) > 1
        or set(kwargs) - {"dtype", "input"}
        or (dtype is not None and name not in ("sum", "mean", "prod"))
    ):
        return None
    if name in ("any", "all"):
        seen = x.any() if name == "any" else x.all()
        every = spec.exchange(seen.reshape(1).to(torch.uint8), name)
        return (every.amax() if name == "any" else every.amin()).to(
            x.device, torch.uint8 if x.dtype == torch.uint8 else torch.bool
        )
    if name == "count_nonzero":
        return spec.exchange(x.count_nonzero().reshape(1), name).sum().to(x.device)
    if x.is_complex():
        return None
    if name in ("max", "min", "amax", "amin"):
        return _extreme(name, spec, x)
    inexact = x.is_floating_point()
    if name == "mean" and not inexact and dtype is None:
        return None
    kind = dtype or (x.dtype if inexact else torch.int64)
    wide = torch.float64 if kind.is_floating_point else torch.int64
    low = {"dtype": torch.float32} if x.dtype in (torch.float16, torch.bfloat16) else {}
    mine = (x.prod(**low) if name == "prod" else x.sum(**low)).to(wide).reshape(1)
    every = spec.exchange(mine, name)
    total = every.prod() if name == "prod" else every.sum()
    return (total / spec.numel if name == "mean" else total).to(x.device, kind)


def _extreme(name: str, spec: IntervalSpec, x: torch.Tensor) -> torch.Tensor:
    least = name.endswith("min")
    if x.is_floating_point():
        nothing = math.inf if least else -math.inf
    elif x.dtype == torch.bool:
        nothing = least
    else:
        nothing = torch.iinfo(x.dtype).max if least else torch.iinfo(x.dtype).min
    mine = (
        (x.min() if least else x.max())
        if x.numel()
        else torch.tensor(nothing, dtype=x.dtype, device=x.device)
    )
    wide = torch.float64 if x.is_floating_point() else torch.int64
    every = spec.exchange(mine.to(wide).reshape(1), name)
    return (every.min() if least else every.max()).to(x.device, x.dtype)


def _norm(name: str, spec: IntervalSpec, args: Any, kwargs: Any) -> torch.Tensor | None:
    order = {"norm": "p", "linalg_vector_norm": "ord", "linalg_norm": "ord"}[name]
    p = (
        args[1]
        if len(args) > 1
        else kwargs.get(
            order, "fro" if name == "norm" else 2 if name == "linalg_vector_norm" else None
        )
    )
    known = (order, "input", "keepdim", "x", "A")
    if (
        len(args) > 2
        or kwargs.get("keepdim")
        or any(kwargs.get(k) is not None for k in kwargs if k not in known)
    ):
        return None
    if name == "linalg_norm" and not (p is None or len(spec.shape) == 1):
        return None
    p = 2.0 if p in (None, "fro") else p
    if (
        not isinstance(p, (int, float))
        or not (args[0] if args else kwargs["input"]).is_floating_point()
    ):
        return None
    return norms_of([args[0] if args else kwargs["input"]], p)[0]


def _equal(spec: IntervalSpec, x: torch.Tensor, other: torch.Tensor) -> bool | None:
    theirs = spec_of(other)
    if theirs is None or not spec.same_cut(theirs):
        return None
    if spec.shape != theirs.shape:
        return False
    every = spec.exchange(torch.tensor([torch.equal(x, other)], dtype=torch.uint8), "equal")
    return bool(every.all())


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype if not dtype.is_complex else dtype.to_real()


# -- what is said ----------------------------------------------------------------------------------


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return []


def _subject(args: Any, kwargs: Any) -> str:
    found = [s for t in _tensors((args, kwargs)) if (s := spec_of(t)) is not None]
    said = dict.fromkeys(
        f"{s.name!r} (this rank holds elements {s.start} to {s.stop} of shape {tuple(s.shape)})"
        for s in found[:3]
    )
    return " and ".join(said) or "a sharded parameter"


def _refusal(func: Any, name: str, args: Any, kwargs: Any) -> ShardedParameterError:
    said = f"{name} of {_subject(args, kwargs)} cannot be done on a part. "
    if name in _VIEWS or name == "[...]":
        said += "A view in another order would be a copy, and what is written to it would be lost. "
    return ShardedParameterError(
        said + "Every rank: read a whole copy with `parameter.onefold.gather()`, or read and write"
        " inside `with onefold.full_params(model, write=True):`. To change the model itself"
        " (resize_token_embeddings, a new head) use `with onefold.unsharded(model):`."
    )


def _mismatch(
    name: str, base: IntervalSpec, others: Sequence[torch.Tensor]
) -> ShardedParameterError:
    shapes = ", ".join(
        str(tuple(s.shape if (s := spec_of(t)) is not None else t.shape)) for t in others
    )
    return ShardedParameterError(
        f"{name} on {base.name!r} of shape {tuple(base.shape)} was given {shapes or 'nothing'}:"
        " expected a number, or a tensor that broadcasts to that shape (the whole's; each rank"
        " takes its slice)."
    )
