"""The check that Triton's kernels write what torch's operations write: on the device, or on a CPU
in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

import torch

from onefold.cli.doctor_check_moves import values
from onefold.cli.doctor_checks import Findings, Here, LeftOut
from onefold.comm import sums
from onefold.comm.launching import INTERPRETED, by_torch, usable
from onefold.quant import Blockwise, Encoded, Stochastic, codec, kernels

BLOCK_SIZES = (64, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Parts of a sum.
RANKS = (2, 5)
#: Elements: whole blocks and a shorter last one; on an accelerator also many programs at once.
NUMELS = {"cpu": (1000,), "cuda": (1000, 256 * 17 + 64, 1 << 20)}


def kernels_run_here(device: torch.device) -> str:
    """Why they cannot be compared on this device; "" if they can."""
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed: torch's operations encode and add up, to the same bits but"
            " slower"
        )
    if device.type == "cpu" and not INTERPRETED:
        return "TRITON_INTERPRET is set to 0: on a CPU kernels run in Triton's interpreter only"
    if not usable(device):
        return (
            "Triton runs no kernel on this device (it needs compute capability 8.0 and a C"
            " compiler): torch's operations do it"
        )
    return ""


@contextlib.contextmanager
def by_kernels(wanted: bool) -> Iterator[None]:
    """Inside, whole blocks are done by the kernels, or by plain operations."""

    def serve(codec: Blockwise, floats: torch.Tensor) -> bool:
        return wanted and codec.name in kernels.NAMES and floats.numel() >= codec.block

    before, kernels.serve = kernels.serve, serve
    try:
        yield
    finally:
        kernels.serve = before


def cases(numel: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Intervals on the host with what rounds, overflows, underflows or is not a number."""
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(7)
    floats = torch.randn(numel, generator=generator, dtype=torch.float64)
    floats *= torch.exp2(torch.randint(-12, 6, (numel,), generator=generator))
    for at, factor in (
        (0, 4 * info.smallest_normal),
        (200, info.max / 2),
        (500, 0.0),
        (700, 2.0**-140),
    ):
        floats[at : at + 150] *= factor
    finite = floats.clamp(info.min, info.max).to(dtype)
    yield "numbers", finite
    broken = finite.clone()
    broken[30], broken[numel // 2], broken[-1] = torch.inf, torch.nan, info.max
    yield "numbers with inf and nan", broken


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; one NaN is as good as another."""
    broken = (
        a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    )
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | broken).all())


def kernels_and_operations(here: Here, findings: Findings) -> str:
    """Every codec that has kernels, and the sums of reductions, with both."""
    reason = kernels_run_here(here.device)
    if reason:
        raise LeftOut(reason)
    interpreted, compared = here.device.type == "cpu", 0
    for numel in NUMELS["cpu" if interpreted else "cuda"]:
        for dtype in DTYPES:
            for ranks in RANKS:
                compared += 1
                format_ranks = str(dtype).removeprefix("torch.")
                findings.expect(
                    _sums_agree(here.device, ranks, numel, dtype),
                    f"sums of {ranks} parts of {numel:,} {format_ranks} differ",
                )
    for name in kernels.NAMES:
        for block in BLOCK_SIZES:
            by = _blockwise(name, block)
            for numel in NUMELS["cpu" if interpreted else "cuda"]:
                for dtype in DTYPES:
                    for what, source in cases(numel, dtype):
                        for act, right in _acts(by, source.to(here.device)):
                            compared += 1
                            format_ranks = str(dtype).removeprefix("torch.")
                            findings.expect(
                                right,
                                f"{name}, {block} a block, {numel:,} {format_ranks} {what}: {act}"
                                " differ",
                            )
    findings.figures |= {
        "compared": compared,
        "codecs": list(kernels.NAMES),
        "interpreted": interpreted,
    }
    how = (
        " in Triton's interpreter (the device's own compiler is not tried on a CPU)"
        if interpreted
        else ""
    )
    return (
        f"{compared} sums and results of {', '.join(kernels.NAMES)} have the bits of torch's"
        f" operations{how}"
    )


def _acts(by: Blockwise, source: torch.Tensor) -> Iterator[tuple[str, bool]]:
    """(what was done, whether both did the same)"""

    def both(act: Callable[[torch.Tensor], object], like: torch.Tensor) -> bool:
        results = []
        for wanted in (False, True):
            results.append(like.clone())
            with by_kernels(wanted):
                act(results[-1])
        return same(*results)

    with by_kernels(False):
        payload = Encoded.of(source, by).payload
    yield "encoded", both(lambda into: by.encode(source, into), torch.empty_like(payload))
    if by.stochastic:
        chance = Stochastic(2, 3, 2**33 - 77)
        yield (
            "stochastically encoded",
            both(lambda into: by.encode(source, into, rounding=chance), torch.empty_like(payload)),
        )
    for dtype in DTYPES:
        yield (
            f"decoded into {dtype}",
            both(lambda into: by.decode(payload, into), torch.empty_like(source, dtype=dtype)),
        )
    yield "decoded and added", both(lambda into: by.decode_add(payload, into), source.float())


def _sums_agree(device: torch.device, ranks: int, numel: int, dtype: torch.dtype) -> bool:
    """Whether the kernel that adds up parts gives torch's bits, in the parts' dtype."""
    parts = torch.stack([values(numel, rank, dtype) for rank in range(ranks)]).to(device)
    results = []
    for alone in (contextlib.nullcontext, by_torch):
        results.append(torch.empty(numel, dtype=dtype, device=device))
        with alone():
            sums.sum_parts(parts, results[-1], 1 / ranks)
    return same(*results)


def _blockwise(name: str, block: int) -> Blockwise:
    found = codec(name, block=block)
    assert isinstance(found, Blockwise)
    return found
