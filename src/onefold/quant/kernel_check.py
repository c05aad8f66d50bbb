"""Check that the kernels give torch's bits on this device. For `onefold doctor --check`,
benchmarks/codecs.py and the tests (in Triton's interpreter).

The reference is torch on the CPU: the results of a kernel on the device are compared with those of
torch's operations on the CPU. Bits must be equal, except that any NaN equals any other. The inputs
round, overflow, underflow or are not finite:

    codecs   blocks of ordinary, subnormal, zero and the largest values; infinity and NaN; ties between any two of a codec's numbers,
             and their neighbours; lengths that end inside a block; starts that are not a multiple
             of 16 bytes
    rows     intervals at equal distances in one call: those of all ranks
    moments  in 8 bits: packed and unpacked, a shorter last block too; rounded to bf16 by chance
    sums     1 to 5 parts of each dtype, with and without an own part of another dtype; -0, overflow, subnormals; rows with gaps
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from onefold.comm.launching import INTERPRETED, by_torch, served
from onefold.comm.sums import sum_parts
from onefold.quant import Blockwise, Encoded, Stochastic, codec
from onefold.quant.bf16_rounding import to_bf16
from onefold.quant.moment_packing import MomentPacking
from onefold.quant.registry import WITH_KERNELS
from onefold.recipe.moments import FORMATS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCKS = (64, 256)


def differences(device: torch.device | str) -> list[str]:
    """Return descriptions of the cases in which kernels and torch differ on `device`; an empty list
    if there are none. Waits for the device.

    Raises:
        ValueError: no kernel runs on this device.
    """
    device = torch.device(device)
    if not served(torch.empty(1, device=device)):
        raise ValueError(
            f"no kernel runs on {str(device)!r}: expected CUDA with Triton, or TRITON_INTERPRET=1"
            " with 'cpu'"
        )
    return (
        codec_differences(device)
        + row_differences(device)
        + moment_differences(device)
        + sum_differences(device)
    )


def compared(blocks: Sequence[int] = BLOCKS) -> tuple[int, int]:
    """Return the numbers of intervals and of sums that `differences` compares."""
    intervals = sum(
        1 for name in WITH_KERNELS for block in blocks for _ in cases(_blockwise(name, block))
    )
    return intervals, len(list(sums()))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits are equal; any NaN equals any other."""
    a, b = a.cpu(), b.cpu()
    broken = (
        a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    )
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | broken).all())


def placed(t: torch.Tensor, device: torch.device, start: int) -> torch.Tensor:
    """Return a copy of a flat `t` on `device`, at an offset of `start` elements in its storage."""
    return torch.empty(start + t.numel(), dtype=t.dtype, device=device)[start:].copy_(t)


# -- codecs ----------------------------------------------------------------------------------------


def codec_differences(
    device: torch.device,
    names: Sequence[str] = WITH_KERNELS,
    blocks: Sequence[int] = BLOCKS,
) -> list[str]:
    """Return the `differences` of these codecs, with blocks of these sizes."""
    found = []
    for name in names:
        for block in blocks:
            by = _blockwise(name, block)
            for i, (case, source) in enumerate(cases(by)):
                found += [
                    f"{name}, {block} a block, {case}: {what}"
                    for what in _codec_differs(by, source, device, start=i % 2)
                ]
    return found


def cases(by: Blockwise) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (description, interval on the CPU)."""
    generator = torch.Generator().manual_seed(7)
    for numel in (
        (by.block, 256 * 17 + 65) if INTERPRETED else (by.block, 1000, 256 * 17 + 65, 1 << 20)
    ):
        for name, dtype in DTYPES.items():
            info = torch.finfo(dtype)
            floats = torch.randn(numel, generator=generator, dtype=torch.float64, device="cpu")
            floats *= torch.exp2(torch.randint(-12, 6, (numel,), generator=generator, device="cpu"))
            for at, factor in (
                (0, 4 * info.smallest_normal),
                (200, info.max / 2),
                (500, 0.0),
                (700, 2.0**-140),
            ):
                floats[at : at + 150] *= factor
            values = floats.clamp(info.min, info.max).to(dtype)
            yield f"{name} {numel}", values.clone()
            values[30], values[numel // 2], values[-1] = torch.inf, torch.nan, info.max
            yield f"{name} {numel} with inf and nan", values
    for name, dtype in DTYPES.items():
        yield f"{name} ties", ties(by).to(dtype)


def ties(by: Blockwise) -> torch.Tensor:
    """Return fp32 blocks with a scale of 1. They hold the midpoints between any two of the codec's
    numbers, the next floats above and below, and the numbers themselves.
    """
    numbers = by.numbers().double().unique()
    halves = ((numbers[1:] + numbers[:-1]) / 2).float()
    up, down = torch.tensor(torch.inf, device="cpu"), torch.tensor(-torch.inf, device="cpu")
    near = torch.cat([halves, halves.nextafter(up), halves.nextafter(down), numbers.float()])
    rows = torch.nn.functional.pad(near, (0, -near.numel() % (by.block - 1))).view(-1, by.block - 1)
    return torch.cat([torch.full((rows.shape[0], 1), by.top, device="cpu"), rows], dim=1).flatten()


def _codec_differs(
    by: Blockwise, source: torch.Tensor, device: torch.device, start: int
) -> Iterator[str]:
    there = placed(source, device, start)
    with by_torch():
        payload = Encoded.of(source, by).payload
    coded = placed(payload, device, 2 * start)

    def equal(
        act: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object], like: torch.Tensor
    ) -> bool:
        """Return whether `act(source, payload, result)` gives the same result on both devices. The
        result starts as a copy of `like`.
        """
        here, result = (
            like.clone(),
            placed(like, device, 2 * start if like.dtype == torch.uint8 else start),
        )
        with by_torch():
            act(source, payload, here)
        act(there, coded, result)
        return same(here, result)

    def encode(
        rounding: Stochastic | None, floats: torch.Tensor, _: torch.Tensor, into: torch.Tensor
    ) -> None:
        by.encode(floats, into, rounding=rounding)

    for rounding in (
        (None, Stochastic(1), Stochastic(2, 3, 2**33 - 77)) if by.stochastic else (None,)
    ):
        if not equal(partial(encode, rounding), torch.zeros_like(payload)):
            yield f"encoded with {rounding or 'rounding to the nearest'}"
    for name, dtype in DTYPES.items():
        if not equal(
            lambda _, given, into: by.decode(given, into), torch.zeros_like(source, dtype=dtype)
        ):
            yield f"decoded into {name}"
    if not equal(lambda _, given, into: by.decode_add(given, into), source.float()):
        yield "added"
    if not equal(lambda _, given, into: by.keep_residual(given, into), source):
        yield "residual"


def _blockwise(name: str, block: int) -> Blockwise:
    by = codec(name, block=block)
    assert isinstance(by, Blockwise)
    return by


# -- rows ------------------------------------------------------------------------------------------


def row_differences(
    device: torch.device, names: Sequence[str] = WITH_KERNELS, rows: int = 3
) -> list[str]:
    """Return the `differences` of codecs on rows of intervals."""
    return [
        f"{name}, {rows} rows of {dtype}: {what}"
        for name in names
        for dtype in DTYPES
        for what in _rows_differ(_blockwise(name, 64), DTYPES[dtype], rows, device)
    ]


def _rows_differ(
    by: Blockwise, dtype: torch.dtype, rows: int, device: torch.device
) -> Iterator[str]:
    """Compare what kernels do on `device` with torch on the CPU. Rows of bytes have gaps."""
    generator = torch.Generator().manual_seed(9)
    numel = by.block * 5
    used = by.encoded_bytes(numel)
    source = parts_of(rows, numel, dtype, generator)
    own = parts_of(1, numel, dtype, generator)[0]
    places: dict[str, dict[str, torch.Tensor]] = {}
    for where in (torch.device("cpu"), device):
        values = source.to(where)
        coded = torch.zeros(rows, used + 32, dtype=torch.uint8, device=where)[:, :used]
        found = places.setdefault("kernels" if places else "torch", {})
        with by_torch() if len(places) == 1 else contextlib.nullcontext():
            if by.stochastic:
                by.encode_rows(values, coded, rounding=Stochastic(2, 3, 77))
                found["encoded stochastically"] = coded.clone()
            by.encode_rows(values, coded)
            found["encoded"] = coded.clone()
            found["decoded"] = torch.zeros(rows, numel, dtype=dtype, device=where)
            by.decode_rows(coded, found["decoded"])
            found["residual"] = values.clone()
            by.keep_residual_rows(coded, found["residual"])
            for rank in (0, rows - 1):
                total = found[f"sum at rank {rank}"] = torch.ones(numel, device=where)
                by.decode_sum(coded, own.to(where), rank, total)
    for what, expected in places["torch"].items():
        if not same(expected, places["kernels"][what]):
            yield what


# -- moments ---------------------------------------------------------------------------------------


def moment_differences(device: torch.device) -> list[str]:
    """Return the `differences` of moments in 8 bits (if torchao is installed) and of rounding by
    chance.
    """
    found = []
    generator = torch.Generator().manual_seed(11)
    for n in (256, 1000, 4096 + 300):
        values = parts_of(1, n, torch.float32, generator)[0]
        for first in (0, 5):
            for step in (torch.tensor(3.0, device="cpu"), torch.tensor(3.0, device=device)):
                expected = torch.zeros(n, dtype=torch.bfloat16, device="cpu")
                result = torch.zeros_like(expected, device=device)
                with by_torch():
                    to_bf16(values, -(7**20), step.cpu(), first, expected)
                to_bf16(values.to(device), -(7**20), step, first, result)
                if not same(expected, result):
                    found.append(f"{n} values from {first}, rounded by chance, step {step.device}")
        if importlib.util.find_spec("torchao") is not None:
            for signed in (True, False):
                given = values if signed else values.abs()
                results: list[tuple[torch.Tensor, ...]] = []
                for where in (torch.device("cpu"), device):
                    packing = MomentPacking(FORMATS["int8"], where)
                    codes = torch.zeros(n, dtype=torch.uint8, device=where)
                    scales = torch.zeros(-(-n // 256), device=where)
                    with by_torch() if not results else contextlib.nullcontext():
                        packing.encode(given.to(where), signed, codes, scales)
                        results.append((codes, scales, packing.decode(codes, scales, n, signed)))
                if not all(map(same, *results)):
                    found.append(f"{n} moments in int8, {'signed' if signed else 'unsigned'}")
    return found


# -- sums ------------------------------------------------------------------------------------------


def sum_differences(device: torch.device) -> list[str]:
    """Return the `differences` of sums."""
    generator = torch.Generator().manual_seed(5)
    return [
        ", ".join(f"{k}={v}" for k, v in case.items())
        for case in sums()
        if not _sums_agree(case, device, generator)
    ]


def sums() -> Iterator[dict[str, Any]]:
    """Yield the cases of sums."""
    dice = random.Random(5)
    lengths = (
        (1, 16, 1000, 1023, 1024, 2064)
        if INTERPRETED
        else (1, 16, 1000, 1024, 65_536, (1 << 20) + 5)
    )
    for at, n in enumerate(lengths * 8):
        ranks = 1 + at % 5
        wire, out, own = (dice.choice(list(DTYPES)) for _ in range(3))
        yield {
            "n": n, "ranks": ranks, "rank": dice.randrange(ranks), "wire": wire, "own": dice.choice([None, own, wire]), "out": out,
            "round_to": dice.choice([None, *DTYPES]), "scale": dice.choice([1.0, 1 / 3, 0.25]), "gap": dice.choice([0, 0, 16, 3]),
            "start": dice.choice([0, 0, 1]), "in_place": dice.random() < 0.2,
        }  # fmt: skip


def parts_of(ranks: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return parts [ranks, n] whose sums round, cancel, overflow and underflow, with some -0,
    infinity and NaN.
    """
    info = torch.finfo(dtype)
    found = torch.randn(ranks, n, generator=generator, dtype=torch.float64, device="cpu")
    found *= torch.exp2(torch.randint(-10, 11, (ranks, n), generator=generator, device="cpu"))
    kinds = torch.randint(0, 12, (n,), generator=generator, device="cpu")
    for kind, factor in ((0, -0.0), (1, info.max / 2), (2, info.smallest_normal / 8)):
        found = torch.where(
            kinds == kind, found.abs() * factor if kind == 0 else found * factor, found
        )
    found = found.clamp(info.min, info.max).to(dtype)
    found[0, kinds == 3] = -found[-1, kinds == 3]
    found[ranks // 2, kinds == 4] = torch.tensor(
        [torch.nan, torch.inf, -torch.inf], dtype=dtype, device="cpu"
    )[torch.arange(int((kinds == 4).sum()), device="cpu") % 3]
    raw = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # The NaN of CUDA: all bits set except the sign
    found.view(raw)[-1, kinds == 5] = torch.iinfo(raw).max
    return found


def _sums_agree(case: dict[str, Any], device: torch.device, generator: torch.Generator) -> bool:
    n, ranks, wire, start, gap = (
        case["n"],
        case["ranks"],
        DTYPES[case["wire"]],
        case["start"],
        case["gap"],
    )
    with_own = case["own"] is not None
    parts = parts_of(ranks, n, wire, generator)
    own = parts_of(1, n, DTYPES[case["own"]], generator)[0] if with_own else None
    results: list[torch.Tensor] = []
    for where in (torch.device("cpu"), device):
        rows = parts[1:] if with_own else parts
        buffer = torch.zeros(start + rows.shape[0] * (n + gap), dtype=wire, device=where)
        there = buffer[start:].view(-1, n + gap)[:, :n].copy_(rows)
        mine = placed(own, where, start) if own is not None else None
        out = torch.full((start + n,), 7.0, dtype=DTYPES[case["out"]], device=where)[start:]
        if case["in_place"]:
            out = mine if mine is not None else there[case["rank"]]
        with by_torch() if not results else contextlib.nullcontext():
            sum_parts(
                there,
                out,
                case["scale"],
                own=mine,
                rank=case["rank"],
                round_to=DTYPES.get(case["round_to"]),
            )
        results.append(out)
    return same(*results)
