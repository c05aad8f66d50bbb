"""The largest model of each side: one attempt, started by `benchmarks/on_gpu/largest.py`.

A GPT of wide blocks, each recomputed in the backward pass so that activations do not decide, is
built in each library's own way of never having it whole on the device, and takes two steps. An
attempt that runs out of memory ends with an error, which is an answer.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks import launch, probes
from benchmarks.offload import sides
from benchmarks.peers import adapters
from benchmarks.peers.model import GPT, Shape
from benchmarks.peers.settings import Setting

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
    side = {**sides.SIDES, **sides.PLAIN}[name]
    if side.family in ("onefold", "fsdp2"):
        with torch.device("meta"):
            model = Large(shape)
        return sides.build(name, setting, model, disk, init=initialize)
    if side.family == "deepspeed" and side.stage == 3:
        deepspeed = importlib.import_module("deepspeed")
        config = adapters.deepspeed_config(setting, **side.zero(setting.device))
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Large(shape)
        return sides.build(name, setting, model, own_adam=own_adam)
    if side.family == "deepspeed":
        torch.set_default_dtype(torch.bfloat16)  # the library casts to it anyway
        model = Large(shape)
        torch.set_default_dtype(torch.float32)
        return sides.build(name, setting, model, own_adam=own_adam)
    with torch.device(setting.device):
        return sides.build(name, setting, Large(shape))


def prepare(job: dict[str, Any]) -> None:
    adapters.prepare(job["side"], job["setting"]["device"])


def join(job: dict[str, Any]) -> None:
    """Plain PyTorch meets nobody."""
    if job["side"] in sides.SIDES:
        launch.join_on_devices(job, job["setting"]["device"])


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
