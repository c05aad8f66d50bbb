"""What Hugging Face's Trainer adds to a step, on Onefold and on its peers.

    python -m benchmarks trainer [--layers 6] [--width 256] [--sides "loop 3" "trainer 3" ...]

| side                      | what makes the steps                                               |
|---------------------------|--------------------------------------------------------------------|
| "loop 1", "loop 3"        | a loop of one's own over `onefold.shard` at that stage             |
| "trainer 1", "trainer 3"  | `onefold.hf.Trainer` at that stage, the same model and data        |
| "trainer name 1", "... 3" | transformers' Trainer with `deepspeed={...}`, served by Onefold    |
| "loop ddp", "trainer ddp" | the same on DistributedDataParallel, with transformers' Trainer    |
| "trainer fsdp2"           | transformers' Trainer with accelerate's FSDP plugin, version 2     |
| "trainer deepspeed 1", "... 3" | transformers' Trainer on DeepSpeed itself (`--deepspeed-python`) |

All of them clip by the norm and step AdamW and a schedule. Two ranks over gloo, one thread each; a turn
is a fresh process a rank, which has imported the libraries before anything is measured.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness, launch, probes
from benchmarks.harness import Row, Run
from benchmarks.pages import Cell, range_of, shown

SIDES = (
    "loop 1", "trainer 1", "trainer name 1", "loop 3", "trainer 3", "trainer name 3", "loop ddp",
    "trainer ddp", "trainer fsdp2", "trainer deepspeed 1", "trainer deepspeed 3",
)  # fmt: skip
#: How much longer a step of Trainer on Onefold may take than one of Onefold's own loop.
GOAL = 1.02
LEGEND = (
    "step: median of the timed steps, of the slower rank. ÷ its loop: over the loop of one's own on the"
    " same library; ÷ DDP: over Trainer on DDP; medians of the rounds' own ratios, with the range of the"
    " first. processor: of a rank in a step: what to trust where the machine has other work. peak: what"
    " the resident memory of a rank rises by in timed steps, above what the libraries take."
)
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
    before, setting = probes.resident_mib(), Setting(**job["setting"])
    how, _, on = job["side"].partition(" ")
    clock, run = Clock(setting.warmup), by_loop if how == "loop" else by_trainer
    dist.barrier()
    with tempfile.TemporaryDirectory() as folder:
        model = llama(setting.layers, setting.width)
        run(on, model, clock, setting.warmup + setting.steps, folder)
    peak = probes.difference(probes.peak_resident_mib(), before)
    return {"step_s": clock.wall, "cpu_s": clock.cpu, "loss": clock.loss, "peak_mib": peak}


def prepare(job: dict[str, Any]) -> None:
    """Import what sides of this kind use, before memory is measured."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
        "TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    names = ["accelerate", "torch._dynamo", "torch.distributed.fsdp", "transformers"]
    if launch.on_deepspeed(job["side"]):
        names.insert(0, "deepspeed")
    else:
        names.append("onefold.hf")
    if " name " in job["side"]:
        importlib.import_module("onefold.deepspeed").serve(say=False)
    for name in names:
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    assert transformers.LlamaForCausalLM and transformers.Trainer


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A Llama of so many layers of that width, in fp32."""

    layers: int
    width: int
    warmup: int
    steps: int
    ranks: int = 2
    threads: int = 1

    @property
    def title(self) -> str:
        tokens = BATCH * TOKENS
        return (
            f"Llama of {self.layers} layers of {self.width}, {tokens} tokens a rank, fp32, 2 ranks"
        )


class OnTrainer(harness.Study):
    schema, module, known = "onefold-trainer/3", "benchmarks.trainer", SIDES
    read, notes, reference, legend = Setting, {}, "trainer ddp", LEGEND

    def row(self, comparison: harness.Comparison, side: str, good: list[Run]) -> Row:
        how, *on = side.split()
        loop = harness.by_round(comparison.runs, f"loop {on[-1]}" if how == "trainer" else "")
        ddp = self.references(comparison) if how == "trainer" else {}
        if launch.on_deepspeed(side):
            loop = {}

        def cpu(run: Run) -> float:
            return median(harness.slowest(run.ranks, "cpu_s"))

        return {
            **harness.timings(good, loop),
            "cpu_s": median(map(cpu, good)),
            "cpu_ratio": harness.middle(
                cpu(run) / cpu(loop[run.round]) for run in good if run.round in loop
            ),
            "of_ddp": harness.middle(harness.ratios(good, ddp)),
            "cpu_of_ddp": harness.middle(
                cpu(run) / cpu(ddp[run.round]) for run in good if run.round in ddp
            ),
            "peak_mib": harness.over_rounds(good, "peak_mib"),
            "loss": good[0].ranks[0]["loss"],
        }

    def columns(self, setting: Setting) -> Mapping[str, Cell]:
        return {
            "side": shown("side"),
            "step, ms": shown("step_s", "{:.0f}", 1e-3),
            "÷ its loop": shown("ratio", "{:.3f}"),
            "range": range_of("ratio_low", "ratio_high"),
            "÷ DDP": shown("of_ddp", "{:.3f}"),
            "processor, ms": shown("cpu_s", "{:.0f}", 1e-3),
            "processor ÷ its loop": shown("cpu_ratio", "{:.3f}"),
            "processor ÷ DDP": shown("cpu_of_ddp", "{:.3f}"),
            "peak, MiB": shown("peak_mib", "{:.0f}"),
            "loss": shown("loss", "{:.4f}"),
        }

    def goals(self, judged: Any) -> list[Row]:
        return [
            harness.goal(
                f"{row['side']}: at most {GOAL} of its loop",
                row["ratio"],
                GOAL,
                "{:.3f}",
            )
            for _, rows in judged
            for row in rows
            if row["side"].startswith(("trainer 1", "trainer 3", "trainer name"))
            and row["status"] == "ok"
        ]

    def document(self) -> dict[str, Any]:
        return {"packages": ("transformers", "accelerate")}


@harness.command(
    "trainer",
    __doc__,
    rounds=5,
    steps=10,
    warmup=3,
    timeout=300.0,
    sides=(list(SIDES), "what makes the steps", SIDES),
    layers=(6, "layers of the Llama"),
    width=(256, "its width"),
    **harness.OPTIONS,
)
def main(options: harness.Options) -> int:
    harness.check_at_least(options, 1, "rounds", "steps", "warmup", "layers", "width")
    shared = {name: getattr(options, name) for name in ("layers", "width", "warmup", "steps")}
    return OnTrainer(options, [Setting(**shared)]).run()
