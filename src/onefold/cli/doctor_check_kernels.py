"""The check that Triton's kernels write what torch's operations write: on the device, or on a CPU in Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator

import torch

from onefold.cli.doctor_checks import Findings, Here, LeftOut
from onefold.comm.codecs import Blockwise, Encoded, Stochastic, codec, kernels

BLOCK_SIZES = (64, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Elements: whole blocks and a shorter last one; on an accelerator also many programs at once.
NUMELS = {"cpu": (1000,), "cuda": (1000, 256 * 17 + 64, 1 << 20)}


def kernels_run_here(device: torch.device) -> str:
    """Why they cannot be compared on this device; "" if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: torch's operations encode and decode, to the same bits but slower"
    if device.type == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else "TRITON_INTERPRET is set to 0: on a CPU kernels run in the interpreter"
    floats = torch.zeros(max(BLOCK_SIZES), device=device)
    if not any(kernels.serve(_blockwise(name, max(BLOCK_SIZES)), floats) for name in kernels.NAMES):
        return "the kernels do not serve this device (they need compute capability 8.0): torch's operations encode and decode"
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
    for at, factor in ((0, 4 * info.smallest_normal), (200, info.max / 2), (500, 0.0), (700, 2.0**-140)):
        floats[at : at + 150] *= factor
    finite = floats.clamp(info.min, info.max).to(dtype)
    yield "numbers", finite
    broken = finite.clone()
    broken[30], broken[numel // 2], broken[-1] = torch.inf, torch.nan, info.max
    yield "numbers with inf and nan", broken


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; one NaN is as good as another."""
    broken = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | broken).all())


def kernels_and_operations(here: Here, findings: Findings) -> str:
    """Encoding, decoding and adding of every codec that has kernels, with both."""
    reason = kernels_run_here(here.device)
    if reason:
        raise LeftOut(reason)
    interpreted, compared = here.device.type == "cpu", 0
    for name in kernels.NAMES:
        for block in BLOCK_SIZES:
            by = _blockwise(name, block)
            for numel in NUMELS["cpu" if interpreted else "cuda"]:
                for dtype in DTYPES:
                    for what, source in cases(numel, dtype):
                        for act, right in _acts(by, source.to(here.device), interpreted):
                            compared += 1
                            spelt = str(dtype).removeprefix("torch.")
                            findings.expect(right, f"{name}, {block} a block, {numel:,} {spelt} {what}: {act} differ")
    findings.figures |= {"compared": compared, "codecs": list(kernels.NAMES), "interpreted": interpreted}
    how = " in Triton's interpreter (the device's own compiler is not tried on a CPU)" if interpreted else ""
    return f"{compared} results of {', '.join(kernels.NAMES)} have the bits of torch's operations{how}"


def _acts(by: Blockwise, source: torch.Tensor, interpreted: bool) -> Iterator[tuple[str, bool]]:
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
        yield "stochastically encoded", both(lambda into: by.encode(source, into, rounding=chance), torch.empty_like(payload))
    # Triton's interpreter cuts bf16 off where every device rounds.
    for dtype in [d for d in DTYPES if not (interpreted and d == torch.bfloat16)]:
        yield f"decoded into {dtype}", both(lambda into: by.decode(payload, into), torch.empty_like(source, dtype=dtype))
    yield "decoded and added", both(lambda into: by.decode_add(payload, into), source.float())


def _blockwise(name: str, block: int) -> Blockwise:
    found = codec(name, block=block)
    assert isinstance(found, Blockwise)
    return found
