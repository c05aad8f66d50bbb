"""The operators by name: what runs on intervals, what on shapes alone, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onefold.runtime.parameters.interval import IntervalSpec, ShardedParameterError, dress, spec_of

# -- names -----------------------------------------------------------------------------------------
#
# The names of torch's operators, grouped by what they do with the elements of a tensor.


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = words("""
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


# They read the dtype and the device of a second tensor, never its elements: `scale.to(p)`.
OF_ANOTHERS_KIND = words("to type_as")


DUNDERS = {
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


WRITTEN = words("""
    copy_ fill_ zero_ masked_fill_ apply_
    """) | {
    name + "_"
    for name in ELEMENTWISE
    if name not in ("to", "type", "detach", "contiguous", "clone")
}


DRAWN = words("""
    normal_ uniform_ exponential_ geometric_ log_normal_ cauchy_ random_ bernoulli_
    """)


LIKE = words("""
    zeros_like ones_like empty_like full_like
    """)


DRAWN_LIKE = words("""
    rand_like randn_like randint_like
    """)


FRESH = words("""
    new_zeros new_ones new_empty new_full new_tensor new new_empty_strided result_type
    """)


REDUCED = words("""
    sum mean prod norm linalg_vector_norm linalg_norm max min amax amin any all count_nonzero equal
    """)


VIEWS = words("""
    view reshape flatten ravel view_as reshape_as unflatten squeeze unsqueeze select narrow unbind chunk split split_with_sizes
    tensor_split hsplit vsplit dsplit swapaxes swapdims moveaxis movedim transpose permute t adjoint T mT H mH real imag numpy_T
    matrix_H diagonal unfold as_strided view_as_real view_as_complex detach_copy atleast_1d atleast_2d atleast_3d unsafe_chunk
    unsafe_split
    """)


# Views in which elements repeat. torch forbids writes to them, so a view of the gathered copy will
# do. Where no element repeats they are treated as VIEWS.
READ_VIEWS = words("""
    expand expand_as broadcast_to broadcast_tensors meshgrid
    """)


READ = words("""
    unique unique_consecutive pca_lowrank svd_lowrank lu stft istft cov corrcoef einsum block_diag cartesian_prod
    """)


NUMBERS = words("""
    item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __contains__
    """)


REFUSED = words("""
    set_ resize_ resize resize_as resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_ share_memory_ __dlpack__
    __dlpack_device__ __cuda_array_interface__ to_sparse to_mkldnn t_ transpose_ squeeze_ unsqueeze_ swapdims_ swapaxes_
    as_strided_ map_ map2_ module_load backward storage register_hook register_post_accumulate_grad_hook
    embedding_renorm_ __setstate__ __array_wrap__
    """)


# Answered by the local tensor: identity, device, autograd's bookkeeping.
LOCAL = words("""
    data_ptr untyped_storage storage_type _typed_storage is_shared is_pinned pin_memory get_device is_set_to device dtype layout
    requires_grad is_leaf grad_fn _version is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_mps
    is_mtia is_xpu is_xla is_ipu is_maia is_vulkan is_floating_point is_complex is_signed is_conj is_neg is_inference element_size
    itemsize output_nr _base _cdata _backward_hooks _post_accumulate_grad_hooks retains_grad volatile name
    requires_grad_ detach_ retain_grad __hash__ _is_view is_coalesced is_distributed _has_compatible_shallow_copy_type _grad_fn
    grad_dtype is_inference can_cast as_subclass cudnn_is_acceptable record_stream _is_zerotensor _is_any_true _is_all_true
    get_default_dtype grad _grad __repr__ is_tensor is_storage
    """)


LEAF = "a leaf Variable that requires grad is being used in an in-place operation."


# -- metadata --------------------------------------------------------------------------------------
#
# Questions that need no elements: shape, strides and the like, answered for the whole tensor.


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


#: {name: the function that answers it, from the interval's spec, the tensor and the arguments}.
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


#: Names of all metadata, of the whole tensor and of the local one.
METADATA = frozenset(META) | words(
    "dtype device is_leaf requires_grad layout is_cuda is_cpu is_meta itemsize is_floating_point"
    " is_complex element_size"
)


def metadata_of(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "requires_grad_" and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
        raise ShardedParameterError(
            f"requires_grad_() on one rank's part of {subject_of(args, kwargs)}: gradients of it"
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


# -- refusals --------------------------------------------------------------------------------------
#
# Error messages for operations that cannot be done on an interval.


def tensors_among(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_among(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_among(v)]
    return []


def subject_of(args: Any, kwargs: Any) -> str:
    found = [s for t in tensors_among((args, kwargs)) if (s := spec_of(t)) is not None]
    said = dict.fromkeys(
        f"{s.name!r} (this rank holds elements {s.start} to {s.stop} of shape {tuple(s.shape)})"
        for s in found[:3]
    )
    return " and ".join(said) or "a sharded parameter"


def refusal(func: Any, name: str, args: Any, kwargs: Any) -> ShardedParameterError:
    said = f"{name} of {subject_of(args, kwargs)} cannot be done on a part. "
    if name in VIEWS or name == "[...]":
        said += "A view in another order would be a copy, and what is written to it would be lost. "
    return ShardedParameterError(
        said + "Every rank: read a whole copy with `parameter.onefold.gather()`, or read and write"
        " inside `with onefold.full_params(model, write=True):`. To change the model itself"
        " (resize_token_embeddings, a new head) use `with onefold.unsharded(model):`."
    )


def mismatch(
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
