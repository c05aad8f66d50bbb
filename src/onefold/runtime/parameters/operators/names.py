"""The names of torch's operators, grouped by what they do with the elements of a tensor."""

from __future__ import annotations


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
