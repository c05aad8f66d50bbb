"""The largest model of each side: one attempt,
`python -m benchmarks.offload.largest JOB.json RANK`, started by
`benchmarks/on_gpu/largest.py`.

A GPT of wide blocks, each recomputed in the backward pass so that activations do not decide, is
built in each library's own way of never having it whole on the device, and takes two steps. An
attempt that runs out of memory ends with an error, which is an answer.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.offload import sides
from benchmarks.offload.settings import PLAIN, SIDES
from benchmarks.peers import probes
from benchmarks.peers.model import GPT, Shape
from benchmarks.peers.settings import Setting
from benchmarks.peers.worker import leave, read_job

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
    side = {**SIDES, **PLAIN}[name]
    if side.family in ("onefold", "fsdp2"):
        with torch.device("meta"):
            model = Large(shape)
        return (
            sides.Onefold(setting, model, side, disk)
            if side.family == "onefold"
            else sides.FSDP2(setting, model, initialize)
        )
    if side.family == "deepspeed" and side.stage == 3:
        deepspeed = importlib.import_module("deepspeed")
        with deepspeed.zero.Init(config_dict_or_path=sides.deepspeed_config(setting, side)):
            model = Large(shape)
        return sides.DeepSpeed(setting, model, side, own_adam)
    if side.family == "deepspeed":
        torch.set_default_dtype(torch.bfloat16)  # the library casts to it anyway
        model = Large(shape)
        torch.set_default_dtype(torch.float32)
        return sides.DeepSpeed(setting, model, side, own_adam)
    with torch.device(setting.device):
        return sides.build(name, setting, Large(shape))


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """Build and take two steps: seconds of the second, MiB allocated on the GPU and resident at
    most.
    """
    setting = Setting(**job["setting"])
    cuda = setting.device == "cuda"
    shape = shape_of(job["layers"], job["width"])
    trainer = build(job["side"], setting, shape, job["disk"], job["own_adam"])
    source = torch.Generator().manual_seed(0)
    words = torch.randint(
        shape.vocab, (max(1, setting.tokens // shape.seq), shape.seq + 1), generator=source
    )
    batch = [
        (
            words[:, :-1].contiguous().to(setting.device),
            words[:, 1:].contiguous().to(setting.device),
        )
    ]
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


def main() -> None:
    """Read the job, join, attempt, leave."""
    job, path, rank = read_job()
    setting = Setting(**job["setting"])
    sides.prepare(job["side"], setting.device)
    if SIDES.get(job["side"]) is not None:
        backend = "nccl" if setting.device == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"file://{path.with_name('store')}",
            rank=rank,
            world_size=setting.ranks,
        )
    leave(attempt(job), path, rank)


if __name__ == "__main__":
    main()
