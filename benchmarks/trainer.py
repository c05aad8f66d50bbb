"""What Hugging Face's Trainer adds to a step, on Onefold and on DDP:
`python -m benchmarks.trainer [--layers 6] [--width 256] [--sides ...]`.

| side                    | what makes the steps                                          |
|-------------------------|---------------------------------------------------------------|
| "loop 1", "loop 3"      | a loop of one's own over `onefold.shard` at that stage        |
| "trainer 1", "trainer 3" | `onefold.hf.Trainer` at that stage, the same model and data  |
| "loop ddp", "trainer ddp" | the same on DistributedDataParallel, with transformers' Trainer |

All of them clip by the norm and step AdamW and a schedule. Two ranks over gloo, one thread each, are
started once; in them every side takes its turn in each round, in the other direction every other
round. A figure of a turn is its quickest step, of the slower rank: other work on the machine only
adds. Of a side, it is the median of its turns. The ratio of a Trainer is that to the loop beside
it, the median of the rounds' own ratios: of the wall clock, and of the processor's time. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import RESULTS, ROOT

SCHEMA = "onefold-trainer/1"
SIDES = ("loop 1", "trainer 1", "loop 3", "trainer 3", "loop ddp", "trainer ddp")
#: How much longer a step of Trainer on Onefold may take than one of Onefold's own loop.
GOAL = 1.02
BATCH, TOKENS, VOCABULARY = 2, 128, 4096


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(
            0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index)
        )
        return {"input_ids": ids, "labels": ids}


# -- one rank --------------------------------------------------------------------------------------


def _model(layers: int, width: int) -> Any:
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
    """Seconds between the ends of steps, on the wall and of the processor."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self._last: tuple[float, float] | None = None

    def step(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._last = now


def by_loop(on: str, model: Any, count: int, folder: str) -> Clock:
    """Steps of a loop of one's own."""
    import onefold

    sampler = torch.utils.data.DistributedSampler(Data(), shuffle=False)
    loader = torch.utils.data.DataLoader(Data(), BATCH, sampler=sampler)
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
    clock, total = Clock(), torch.zeros(())
    for _, batch in zip(range(count), loader, strict=False):
        loss = forward(**batch).loss
        loss.backward()
        clip()
        optimizer.step()
        schedule.step()
        model.zero_grad()
        total += loss.detach()
        clock.step()
    clock.losses = [total.item() / count]
    return clock


def by_trainer(on: str, model: Any, count: int, folder: str) -> Clock:
    """Steps of Trainer."""
    import transformers

    import onefold.hf

    clock = Clock()

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    args = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=BATCH, max_steps=count,
        learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=10, report_to=[],
        disable_tqdm=True, save_strategy="no", weight_decay=0.01,
    )  # fmt: skip
    given: dict[str, Any] = {"train_dataset": Data(), "callbacks": [Watch()]}
    kind: Any = transformers.Trainer if on == "ddp" else onefold.hf.Trainer
    trainer = kind(model, args, **given, **({} if on == "ddp" else {"recipe": int(on)}))
    trainer.remove_callback(transformers.PrinterCallback)
    clock.losses = [trainer.train().training_loss]
    return clock


def rank_main(options: Any, rank: int, folder: str) -> None:
    """All rounds of one rank; what it saw goes to a file."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    runs: list[dict[str, Any]] = []
    for number, side in harness.in_turns(options.sides, options.rounds):
        how, _, on = side.partition(" ")
        model = _model(options.layers, options.width)
        dist.barrier()
        clock = (by_loop if how == "loop" else by_trainer)(
            on, model, options.warmup + options.steps, folder
        )
        runs.append(
            {
                "round": number,
                "side": side,
                "step_s": clock.wall[options.warmup - 1 :],
                "cpu_s": clock.cpu[options.warmup - 1 :],
                "loss": clock.losses[0],
            }
        )
        if rank == 0:
            harness.say(f"round {number}  {side}: {1e3 * median(runs[-1]['step_s']):.1f} ms")
    Path(folder, f"{rank}.json").write_text(json.dumps(runs))
    dist.barrier()
    dist.destroy_process_group()


# -- all of them -----------------------------------------------------------------------------------


def rows_of(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each side: its medians, and a Trainer's multiples of the loop beside it."""
    turns: dict[tuple[str, int], dict[str, Any]] = {}
    for both in zip(*ranks, strict=True):
        turns[both[0]["side"], both[0]["round"]] = {
            key: min(max(each) for each in zip(*(run[key] for run in both), strict=True))
            for key in ("step_s", "cpu_s")
        } | {"loss": both[0]["loss"]}
    rows = []
    for side in dict.fromkeys(side for side, _ in turns):
        own = {number: turn for (s, number), turn in turns.items() if s == side}
        row: dict[str, Any] = {"side": side}
        row |= {key: median(turn[key] for turn in own.values()) for key in ("step_s", "cpu_s")}
        row["loss"] = own[min(own)]["loss"]
        loop = side.replace("trainer", "loop")
        if loop != side and (loop, min(own)) in turns:
            for key in ("step_s", "cpu_s"):
                each = [turn[key] / turns[loop, number][key] for number, turn in own.items()]
                row[f"{key}_of_loop"], row[f"{key}_of_loop_range"] = (
                    median(each),
                    (min(each), max(each)),
                )
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every side was measured and computed something."""
    parser = harness.parser(
        "trainer", __doc__, rounds=5, steps=10, warmup=3, name="trainer", output=RESULTS
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rank", nargs=2, default=None)
    options = harness.parsed(parser, arguments)
    harness.check_at_least(options, 1, "rounds", "steps", "warmup", "layers", "width")
    if options.rank:
        rank_main(options, int(options.rank[0]), options.rank[1])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = _measured(options, folder)
    rows = rows_of(ranks)
    for row in rows:
        print(_line(row))
    about = harness.about(options, SCHEMA)
    about["versions"] |= {n: harness.version(n) for n in ("transformers", "accelerate")}
    shape = {"layers": options.layers, "width": options.width, "tokens": BATCH * TOKENS}
    harness.keep(options, {**about, "model": shape, "goal": GOAL, "rows": rows, "runs": ranks})
    return 0 if all(math.isfinite(row["loss"]) for row in rows) else 1


def _measured(options: Any, folder: str) -> list[list[dict[str, Any]]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    asked = [
        f"--{n}={getattr(options, n)}" for n in ("rounds", "steps", "warmup", "layers", "width")
    ]
    work = [sys.executable, "-m", "benchmarks.trainer", *asked, "--sides", *options.sides]
    ranks = [
        subprocess.Popen([*work, "--rank", str(rank), folder], env=environment) for rank in (0, 1)
    ]
    codes = [rank.wait(3600) for rank in ranks]
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}; what they said stands above")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]


def _line(row: dict[str, Any]) -> str:
    ratios = "   ".join(
        f"{key.removesuffix('_s_of_loop')} × {row[key]:.3f} of the loop"
        for key in ("step_s_of_loop", "cpu_s_of_loop")
        if key in row
    )
    times = f"step {1e3 * row['step_s']:7.1f} ms   cpu {1e3 * row['cpu_s']:7.1f} ms"
    return f"{row['side']:12} {times}   loss {row['loss']:.4f}   {ratios}"


if __name__ == "__main__":
    sys.exit(main())
