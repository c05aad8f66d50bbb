"""The kernels as Triton compiles them for GPUs, which needs none: what would change bits on a
device, and does not show in the interpreter.

Every launch is caught with its arguments and compiled as Triton would compile it. PTX names how
each operation rounds.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from typing import Any

import pytest
import torch

from onefold.comm.launching import OPTIONS
from onefold.quant import Stochastic, codec
from onefold.quant.registry import WITH_KERNELS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int64: "*i64",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """What the kernels' callers launch: (kernel, arguments, options), instead of running it."""
    from onefold.comm import triton_sums
    from onefold.quant import triton_kernels, triton_moments

    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for room in (triton_sums, triton_kernels, triton_moments):
        monkeypatch.setattr(
            room,
            "launch",
            lambda kernel, programs, like, *args, **options: found.append((kernel, args, options)),
        )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return found


def described(parameter, value):
    """The type of an argument as Triton spells it, and whether it compiles for a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    return (
        "i32" if -(2**31) <= value < 2**31 else "i64"
    ), value % 16 == 0 and not parameter.do_not_specialize


def compiled(launch, architecture=90):
    """PTX and the first intermediate code of a launch, for an NVIDIA GPU of this compute
    capability.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, arguments, options = launch
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", given[name]
            continue
        signature[name], by_16 = described(parameter, given[name])
        if by_16:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(OPTIONS))
    return made.asm["ptx"], made.asm["ttir"]


def mnemonics(ptx):
    return Counter(re.findall(r"^\s+(?:@\S+ )?([a-z][\w.:]+)", ptx, re.MULTILINE))


def check(launch, architecture=90):
    """Every operation on floats rounds once, to the nearest, subnormals kept; offsets are of 64
    bits. Returns the instructions.

    (nf4 looks levels up in a table of 16: those offsets are of 32 bits.)
    """
    ptx, ttir = compiled(launch, architecture)
    found = mnemonics(ptx)
    wrong = [
        name
        for name in found
        if name.startswith(("fma.", "mad.f", "mad.rn.f"))
        or ".ftz" in name
        or ".approx" in name
        or ".full" in name
    ]
    wrong += [
        name
        for name in found
        if re.match(r"(add|sub|mul|div)\S*\.f32$", name) and ".rn." not in name
    ]
    wrong += [
        name
        for name in found
        if re.match(r"cvt\S*\.(f16|bf16|f16x2|bf16x2|e4m3x2)\.f32$", name) and ".rn." not in name
    ]
    assert not wrong, wrong
    narrow = re.findall(
        r"tt\.addptr %(.*?), .*: tensor<[^>]*!tt\.ptr<[^>]*>>, tensor<\S*xi(?:8|16|32)>", ttir
    )
    tables = int("encode" not in launch[0].__name__ and launch[2].get("KIND") == 3)
    assert len(narrow) == tables, f"{narrow}: beyond 2**31 elements these offsets wrap"
    return found


def codec_launches(launches, by, dtype, stochastic=False, numel=4096 * 3, start=0):
    """Encode from and decode to `dtype`; in fp32 decode and add as well."""
    from onefold.quant import triton_kernels

    floats = torch.empty(start + numel, dtype=dtype)[start:]
    payload, kept = by.split(torch.empty(by.encoded_bytes(numel), dtype=torch.uint8), numel)
    triton_kernels.encode(by, floats, payload, kept, Stochastic(1, 2, 3) if stochastic else None)
    if not stochastic:
        triton_kernels.decode(by, payload, kept, floats, 0)
        if dtype == torch.float32:
            triton_kernels.decode(by, payload, kept, floats, 1)
    found, launches[:] = list(launches), []
    return found


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_codecs_round_every_operation_once_and_move_16_bytes_at_a_time(launches, name):
    by = codec(name)
    for dtype in (torch.float32, torch.bfloat16):
        encode, *decodes = codec_launches(launches, by, dtype)
        found = check(encode)
        assert (
            found["div.rn.f32"]
            and found["ld.global.v4.b32"]
            and any(n.startswith("st.global.v") for n in found)
        ), found
        for decode in decodes:
            found = check(decode)
            assert found["st.global.v4.b32"], found
            assert not any(n.startswith("div") and n.endswith(".f32") for n in found), found
    if by.stochastic:
        (encode,) = codec_launches(launches, by, torch.bfloat16, stochastic=True)
        check(encode)


def sum_launch(launches, wire, own, out, round_to=None, n=4096, ranks=4, rank=1, start=0):
    from onefold.comm import triton_sums

    parts = torch.empty(ranks, n, dtype=DTYPES[wire])
    mine = torch.empty(n, dtype=DTYPES[own]) if own else None
    triton_sums.sum_parts(
        parts,
        torch.empty(n + start, dtype=DTYPES[out])[start:],
        0.25,
        mine,
        rank,
        DTYPES.get(round_to),
    )
    return launches.pop()


@pytest.mark.parametrize(
    ("wire", "own", "out", "round_to"),
    [
        ("fp32", None, "fp32", None),
        ("bf16", "fp32", "fp32", "bf16"),
        ("bf16", "bf16", "bf16", None),
        ("fp16", "fp16", "fp32", "fp16"),
    ],
)
def test_sums_add_and_then_multiply_and_move_16_bytes_at_a_time(launches, wire, own, out, round_to):
    launch = sum_launch(launches, wire, own, out, round_to)
    found = check(launch)
    assert (
        found["add.rn.f32"]
        and found["mul.rn.f32"]
        and found["ld.global.v4.b32"]
        and found["st.global.v4.b32"]
    ), found
    assert not any(name.startswith("ld.global") and ".v4." not in name for name in found), found


@pytest.mark.parametrize("architecture", [80, 100])
def test_every_architecture_rounds_alike(launches, architecture):
    check(sum_launch(launches, "bf16", "fp32", "bf16"), architecture)
    for name in ("fp8", "nf4"):
        for launch in codec_launches(launches, codec(name), torch.bfloat16)[:2]:
            check(launch, architecture)


def test_a_kernel_is_not_compiled_anew_for_each_length_or_number_of_ranks(launches):
    """What Triton specializes on besides types: the numbers that 16 divides, and 1."""

    def variant(launch):
        kernel, arguments, options = launch
        plain = [
            (p, v) for p, v in zip(kernel.params, arguments, strict=False) if not p.is_constexpr
        ]
        ones = [
            p.name for p, v in plain if isinstance(v, int) and v == 1 and not p.do_not_specialize
        ]
        return [described(p, v) for p, v in plain], ones, sorted(options.items(), key=str)

    same_sums = [sum_launch(launches, "bf16", "fp32", "fp32", n=n, ranks=ranks, rank=rank) for n, ranks, rank in
                 [(64, 1, 0), (4096, 1, 1), (1 << 20, 8, 1), (320, 16, 15), (64 * 77, 17, 16)]]  # fmt: skip
    assert all(variant(launch) == variant(same_sums[0]) for launch in same_sums)
    for name in ("int8", "nf4"):
        lengths = [
            codec_launches(launches, codec(name), torch.bfloat16, numel=n)[0]
            for n in (256, 4096, 256 * 17, 1 << 20)
        ]
        assert all(variant(launch) == variant(lengths[0]) for launch in lengths)


def test_lengths_and_distances_beyond_32_bits_are_64_bit_integers(launches):
    """A row of 2**31 elements and a distance of as many, on the meta device: no memory is needed to
    be launched.
    """
    from onefold.comm import triton_sums

    class Far:
        """A receive buffer of 2**32 elements, of which Triton is told address and dtype."""

        dtype, shape = torch.bfloat16, (4, 2**31)

        def stride(self, dim):
            return (2**31, 1)[dim]

    class Long(Far):
        shape = (2**31,)

        def numel(self):
            return 2**31

    triton_sums.sum_parts(Far(), Long(), 0.25, None, 0, None)
    kernel, arguments, options = launches.pop()
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    assert (given["n"], given["stride"]) == (2**31, 2**31)
    small = torch.empty(16, dtype=torch.bfloat16)
    check((kernel, (small, small, small, *arguments[3:]), options))


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_rows_of_all_ranks_are_read_and_written_16_bytes_at_a_time(launches, name):
    from onefold.quant import triton_kernels

    by, numel = codec(name), 4096
    coded = torch.empty(4, by.encoded_bytes(numel) + 16, dtype=torch.uint8)
    floats, own = torch.empty(4, numel, dtype=torch.bfloat16), torch.empty(numel)
    payload, kept = by._split_rows(coded[:, : by.encoded_bytes(numel)], numel)
    triton_kernels.encode(by, floats, payload, kept, None)
    triton_kernels.decode(by, payload, kept, floats, 0)
    triton_kernels.decode_sum(by, payload, kept, own, 2, torch.empty(numel))
    encode, decode, total = launches
    found = check(encode)
    assert found["ld.global.v4.b32"] and any(n.startswith("st.global.v") for n in found), found
    found = check(decode)
    assert found["st.global.v4.b32"], found
    found = check(total)
    assert found["st.global.v4.b32"] and found["add.rn.f32"] and found["mul.rn.f32"], found


def test_moments_round_every_operation_once(launches):
    from onefold.quant import triton_moments

    n = 4096 * 3
    codes, scales = torch.empty(n, dtype=torch.uint8), torch.empty(n // 256)
    floats, table = torch.empty(n), torch.empty(256)
    lowest, boundary = torch.empty(1 << 16, dtype=torch.uint8), torch.empty(1 << 16)
    triton_moments.unpack(codes, scales, table, floats, 256)
    triton_moments.pack(floats, lowest, boundary, codes, scales, 256)
    triton_moments.round_by_chance(floats, -(1 << 62), 5, floats.bfloat16())
    triton_moments.round_by_chance(floats, torch.zeros(1).long(), 5, floats.bfloat16())
    unpack, pack, *rounds = launches
    assert check(unpack)["mul.rn.f32"]
    assert check(pack)["div.rn.f32"]
    for launch in rounds:
        check(launch)
