"""The chapter "largest" of benchmarks/gpu.py: the largest model of each side that takes two steps.

A GPT of wide blocks grows by blocks. Each is recomputed in the backward pass, so that activations do
not decide, and built in each library's own way of never having it whole on the device. An attempt
that runs out of memory ends with an error, which is an answer.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks import harness, launch, offload, probes, trainers
from benchmarks.gpt import GPT, Setting, Shape
from benchmarks.harness import Options
from benchmarks.pages import DASH, Table, essence
from onefold.memory.pool import free_host_memory

ON_ONE_GPU: tuple[str, ...] = (
    "plain",
    "onefold-3-cpu-param",
    "onefold-3-nvme-param",
    "onefold-2-cpu",
    "fsdp2-cpu",
    "deepspeed-2-cpu",
    "deepspeed-3-cpu-param",
)
SIDES = {**offload.SIDES, **offload.PLAIN}
GROWTH = 1.5
HOST_SHARE = 0.9
"""Of the free host memory, what an attempt may be expected to take."""


def chapter(options: Options) -> tuple[Table, list[dict[str, Any]]]:
    """A row a side."""
    title = (
        f"The largest model, one GPU: blocks of width {options.width:,},"
        f" {options.largest_tokens:,} tokens, recomputed"
    )
    memory = ("step s", "device MiB", "host MiB")
    table = Table(title, ("side", "largest", "blocks", *memory, "too large", "why"))
    absent = launch.absent(ON_ONE_GPU, options)
    sides = [side for side in ON_ONE_GPU if side not in absent]
    outcomes = []
    for side in sides:
        tried: dict[int, dict[str, Any]] = {}

        def fits(layers: int, side: str = side, tried: dict[int, dict[str, Any]] = tried) -> bool:
            tried[layers] = _attempt(side, layers, options)
            return bool(tried[layers]["status"] == "ok")

        best, above = search(fits, options.blocks)
        outcomes += tried.values()
        size, why = parameters_of(above, options.width), essence(tried[above]["error"])[:80]
        found = ["none", *[DASH] * 4]
        if best:
            rank = tried[best]["ranks"][0]
            found = [f"{parameters_of(best, options.width) / 1e9:.2f}B", str(best)]
            found.append(f"{rank['step_s']:.2f}")
            for name in ("device_mib", "resident_mib"):
                found.append(DASH if rank[name] is None else f"{rank[name]:,.0f}")
        table.add(side, *found, f"{size / 1e9:.2f}B", why)
    for side in ON_ONE_GPU:
        if side in absent:
            table.add(side, "not installed")
    return table, outcomes


def search(fits: Callable[[int], bool], first: int) -> tuple[int, int]:
    """(the largest number that fits, the smallest that does not), to an eighth; see `GROWTH`."""
    best, above, tried = 0, 0, first
    while True:
        if fits(tried):
            best = tried
        else:
            above = tried
        if above and (not best or above - best <= max(1, best // 8)):
            return best, above
        tried = (best + above) // 2 if above else int(GROWTH * tried) + 1


def _attempt(side: str, layers: int, options: Options) -> dict[str, Any]:
    """One attempt, unless the host cannot hold it: the system would end any process."""
    setting = Setting(
        model=f"{layers} blocks of {options.width}",
        tokens=options.largest_tokens,
        precision="bf16",
        ranks=1,
        threads=options.threads,
        device=options.device,
    )
    need, free = 16 * parameters_of(layers, options.width), int(HOST_SHARE * free_host_memory())
    if SIDES[side].optimizer == "cpu" and need > free:
        error = f"{need:,} bytes of state, {free:,} of host memory may be taken"
        return {"side": side, "layers": layers, "status": "refused", "error": error}
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.disk) as place:
        job: dict[str, Any] = {"layers": layers, "width": options.width}
        job |= {"disk": str(Path(place).resolve()), "own_adam": options.deepspeed_adam}
        found = launch.run_side("benchmarks.gpu_largest", side, setting, options, **job)
    harness.say(f"{side}, {layers} blocks: {found['status']} in {found['wall_s']:.0f} s")
    return {"side": side, "layers": layers, "error": "", **found}


# -- one attempt, on its rank -----------------------------------------------------------------------

VOCABULARY, LENGTH = 32_768, 1024


class Large(GPT):
    """A GPT whose head has a weight of its own and whose blocks are recomputed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten()
        )


def shape_of(layers: int, width: int) -> Shape:
    return Shape(layers=layers, width=width, heads=width // 128, vocab=VOCABULARY, seq=LENGTH)


def parameters_of(layers: int, width: int) -> int:
    """Elements of the model; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in Large(shape_of(layers, width)).parameters())


def initialize(module: nn.Module) -> None:
    """Values for the module's own parameters, if it knows any."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def build(name: str, setting: Setting, shape: Shape, disk: str | None, own_adam: bool) -> Any:
    """The side around a model that never was whole on the device, as far as its library allows."""
    side = SIDES[name]
    if side.family in ("onefold", "fsdp2"):
        with torch.device("meta"):
            model = Large(shape)
        return offload.build(name, setting, model, disk, init=initialize)
    if side.family == "deepspeed" and side.stage == 3:
        deepspeed = importlib.import_module("deepspeed")
        config = trainers.deepspeed_config(setting, **side.zero(setting.device))
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Large(shape)
        return offload.build(name, setting, model, own_adam=own_adam)
    if side.family == "deepspeed":
        torch.set_default_dtype(torch.bfloat16)  # the library casts to it anyway
        model = Large(shape)
        torch.set_default_dtype(torch.float32)
        return offload.build(name, setting, model, own_adam=own_adam)
    with torch.device(setting.device):
        return offload.build(name, setting, Large(shape))


def prepare(job: dict[str, Any]) -> None:
    trainers.prepare(job["side"], job["setting"]["device"])


def join(job: dict[str, Any]) -> None:
    """Plain PyTorch meets nobody."""
    if job["side"] != "plain":
        launch.join(job, job["setting"]["device"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build and take two steps: seconds of the second, peaks of the GPU and the host in MiB."""
    setting = Setting(**job["setting"])
    cuda = setting.device == "cuda"
    shape = shape_of(job["layers"], job["width"])
    trainer = build(job["side"], setting, shape, job["disk"], job["own_adam"])
    source = torch.Generator().manual_seed(0)
    samples = max(1, setting.tokens // shape.seq)
    words = torch.randint(shape.vocab, (samples, shape.seq + 1), generator=source)
    batch = [tuple(part.contiguous().to(setting.device) for part in (words[:, :-1], words[:, 1:]))]
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        trainer.step(batch)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return {
        "step_s": seconds[-1],
        "device_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
        "resident_mib": probes.peak_resident_mib(),
    }
