"""One rank of one turn of `benchmarks.trainer`, started by `launch.run_ranks`.

The kind of a side is "plain", "name" (the name deepspeed is served by Onefold before transformers
is imported) or "deepspeed" (DeepSpeed itself is installed).
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import probes

BATCH, TOKENS, VOCABULARY = 2, 128, 4096
#: How the configuration of DeepSpeed stands in transformers' guide; the rest is "auto" there too.
DEEPSPEED = {
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def data() -> Any:
    """Rows of random tokens, each a function of its number."""
    import torch

    class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            drawn = torch.Generator().manual_seed(index)
            ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=drawn)
            return {"input_ids": ids, "labels": ids}

    return Data()


def llama(layers: int, width: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(width // 64, 1)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, vocab_size=VOCABULARY,
        )
    )  # fmt: skip


class Clock:
    """Seconds between the ends of steps, wall and processor; memory from the end of the warm-up."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.loss = 0.0
        self._last: tuple[float, float] | None = None
        self._count = 0

    def step(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._last is not None and self._count >= self.warmup:
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._count += 1
        if self._count == self.warmup:
            probes.give_back_free_heap()
            probes.reset_peak()
            now = time.perf_counter(), time.process_time()
        self._last = now


def by_loop(on: str, model: Any, clock: Clock, count: int, folder: str) -> None:
    """Steps of a loop of one's own."""
    import torch

    import onefold

    sampler = torch.utils.data.DistributedSampler(data(), shuffle=False)
    loader = torch.utils.data.DataLoader(data(), BATCH, sampler=sampler)
    clip: Callable[[], Any]
    if on == "ddp":
        forward: Any = torch.nn.parallel.DistributedDataParallel(model)

        def clip() -> Any:
            return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        forward = onefold.shard(model, onefold.Recipe.zero(int(on)))

        def clip() -> Any:
            return onefold.clip_grad_norm_(model, 1.0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    total = torch.zeros(())
    for _, batch in zip(range(count), loader, strict=False):
        loss = forward(**batch).loss
        loss.backward()
        clip()
        optimizer.step()
        schedule.step()
        model.zero_grad()
        total += loss.detach()
        clock.step()
    clock.loss = total.item() / count


def by_trainer(on: str, model: Any, clock: Clock, count: int, folder: str) -> None:
    """Steps of Trainer on "1", "3" (Onefold's), "ddp", "fsdp2", "name 3" or "deepspeed 3"."""
    import transformers

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    kind, _, stage = on.partition(" ")
    more: dict[str, Any] = {}
    if kind in ("name", "deepspeed"):
        more["deepspeed"] = {**DEEPSPEED, "zero_optimization": {"stage": int(stage)}}
    if kind == "fsdp2":
        more |= {"fsdp": True, "fsdp_config": {"version": 2}}
    args = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=BATCH, max_steps=count,
        learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=10, report_to=[],
        disable_tqdm=True, save_strategy="no", weight_decay=0.01, **more,
    )  # fmt: skip
    given: dict[str, Any] = {"train_dataset": data(), "callbacks": [Watch()]}
    made: Any = transformers.Trainer
    if kind == "fsdp2":
        _take_for_gpus()
    elif kind.isdigit():
        import onefold.hf

        made, given["recipe"] = onefold.hf.Trainer, int(kind)
    trainer = made(model, args, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    clock.loss = trainer.train().training_loss
    _check(kind, trainer)


def _take_for_gpus() -> None:
    """accelerate heeds its FSDP plugin on GPUs only, and trains by DDP without a word elsewhere."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _check(kind: str, trainer: Any) -> None:
    """Raises where something else was measured than the side says."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    wrapped = trainer.model_wrapped
    seen = type(wrapped).__module__
    right = {
        "ddp": isinstance(wrapped, DistributedDataParallel),
        "fsdp2": isinstance(trainer.model, FSDPModule),
        "name": seen.startswith("onefold."),
        "deepspeed": seen.startswith("deepspeed."),
    }
    if not right.get(kind, hasattr(next(trainer.model.parameters()), "onefold")):
        raise RuntimeError(f"the side {kind} trained {type(wrapped)}, of {seen}")


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What one side took on this rank."""
    import torch.distributed as dist

    probes.give_back_free_heap()
    before = probes.resident_mib()
    how, _, on = job["side"].partition(" ")
    clock, run = Clock(job["warmup"]), by_loop if how == "loop" else by_trainer
    dist.barrier()
    with tempfile.TemporaryDirectory() as folder:
        model = llama(job["layers"], job["width"])
        run(on, model, clock, job["warmup"] + job["steps"], folder)
    peak = probes.difference(probes.peak_resident_mib(), before)
    return {"step_s": clock.wall, "cpu_s": clock.cpu, "loss": clock.loss, "peak_mib": peak}


def prepare(job: dict[str, Any]) -> None:
    """Import what sides of this kind use, before memory is measured."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
        "TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    if job["kind"] == "name":
        import onefold.deepspeed

        onefold.deepspeed.serve(say=False)
    if job["kind"] == "deepspeed":
        importlib.import_module("deepspeed")
    else:
        import onefold.hf
    import accelerate
    import torch._dynamo
    import torch.distributed.fsdp
    from transformers import LlamaForCausalLM, Trainer

    assert accelerate and torch and LlamaForCausalLM and Trainer
