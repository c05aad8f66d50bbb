"""One rank of a run, from joining the others to the saved model."""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onefold.observe.measure import reconciled
from onefold.observe.runfile import write_observed
from onefold.observe.tensorboard import TensorBoard
from onefold.train.config import TrainConfig
from onefold.train.errors import TrainError
from onefold.train.export import export
from onefold.train.loop import Row, train
from onefold.train.memory_error import explain, is_out_of_memory
from onefold.train.output import Metrics, with_output, write_config
from onefold.train.prepare import Run, prepare
from onefold.train.ranks import Ranks, join, leave
from onefold.train.report import JsonReporter, Reporter, reporter
from onefold.train.sample import prompt_of, sample
from onefold.train.stop import CONTROL, INTERRUPTED, StopSignal
from onefold.train.window import Window


def run_rank(config: TrainConfig) -> int:
    """Be one rank of `config` and return the exit status. What goes wrong is told once, by the first rank it happens to."""
    stop = StopSignal(int(os.environ["RANK"]))
    try:
        ranks = join(config.device, config.stall_timeout)
        if CONTROL not in os.environ:
            config = ranks.from_first(_with_output_or_error(config) if ranks.is_first else None)
            if isinstance(config, TrainError):
                raise config
        code = _run(config, ranks, stop)
        leave()
        return code
    except Exception as error:
        if not stop.requested and stop.speak_first():
            _tell(error, stop.rank, config.json_lines if isinstance(config, TrainConfig) else False)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: process groups that are in the middle of something would be waited for.
        os._exit(INTERRUPTED if stop.requested else 1)


def _with_output_or_error(config: TrainConfig) -> TrainConfig | TrainError:
    try:
        return with_output(config)
    except TrainError as error:
        return error


def _tell(error: Exception, rank: int, json_lines: bool) -> None:
    if json_lines:
        JsonReporter()._write("error", rank=rank, kind=type(error).__name__, message=str(error))
    if isinstance(error, TrainError):
        print(f"error: {error}", file=sys.stderr)
        return
    print(f"rank {rank} failed:", file=sys.stderr)
    traceback.print_exception(error)


def _run(config: TrainConfig, ranks: Ranks, stop: StopSignal) -> int:
    assert config.output is not None
    folder = Path(config.output)
    say = reporter(ranks.is_first, config.json_lines, config.log_every)
    try:
        begun = time.perf_counter()
        run = prepare(config, ranks, say.note)
        plan = describe(run)
        if ranks.is_first:
            write_config(config, folder, plan)
        say.plan(plan)
        for text in run.data.notes:
            say.note(text)
        _show_sample(run, say, "before")
        stop.arm()
        rows: list[Row] = []
        with Metrics(folder / "metrics.jsonl" if ranks.is_first else Path(os.devnull)) as metrics:

            board = TensorBoard(folder / "tensorboard") if config.tensorboard and ranks.is_first else None

            def report(row: Row) -> None:
                rows.append(row)
                metrics.write(row)
                if board is not None:
                    board.write(row)
                say.step(row)

            window = Window(run)
            try:
                done = train(run, lambda: stop.requested, report, window)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise explain(run, error) from error
            finally:
                window.close()
            traced = window.write(folder)
            if traced is not None:
                say.note(f"trace: {traced} (one file a rank; open it in Perfetto)")
            stopped = done < run.steps
            observe(run, folder, rows)
            kind = export(run, folder / "model")
            (peak,) = ranks.most(rows[-1]["memory_peak"])
            summary: Row = {
                "done": True,
                "stopped": stopped,
                "steps": done,
                "seconds": time.perf_counter() - begun,
                "first_loss": rows[0]["loss"],
                "last_loss": rows[-1]["loss"],
                "wire_bytes_total": rows[-1]["wire_bytes_total"],
                "memory_peak": int(peak),
                "model_kind": kind,
                "model": str(folder / "model"),
                "metrics": str(folder / "metrics.jsonl"),
            }
            metrics.write(summary)
            if board is not None:
                board.close()
        if not stopped:
            _show_sample(run, say, "after")
        say.done(summary)
        return stop.exit_code if stopped else 0
    finally:
        say.close()


def observe(run: Run, folder: Path, rows: list[Row]) -> None:
    """Leave what the ledgers saw in the output folder, for `onefold report`. Each rank writes its own file."""
    if run.measured is None:
        return
    later = rows[1:] or rows
    step_s = statistics.median(row["step_ms"] for row in later) / 1000
    tokens_per_s = statistics.median(row["tokens_per_s"] for row in later)
    account = replace(run.measured, seconds={**run.measured.seconds, "step": step_s}, tokens_per_s=tokens_per_s)
    write_observed(
        folder,
        run.ranks.rank,
        run.ranks.world_size,
        account,
        recipe=run.recipe,
        plan=run.choice.predicted,
        step=run.recording,
        machine=reconciled(run.model, account),
        facts={key: value for key, value in describe(run).items() if isinstance(value, (str, int, float)) and key != "recipe"},
    )


def _show_sample(run: Run, say: Reporter, when: str) -> None:
    text = sample(run)
    if text is not None:
        say.sample(when, prompt_of(run), text)


def describe(run: Run) -> dict[str, Any]:
    """What was chosen and why, ready for JSON."""
    config = run.config
    return {
        "model": run.loaded.name,
        "parameters": run.trained + run.frozen,
        "trained": run.trained,
        "data": run.data.name,
        "samples": len(run.data.train),
        "held_out": len(run.data.held_out),
        "ranks": run.ranks.world_size,
        "device": str(run.ranks.device.type),
        "backend": run.ranks.backend,
        "threads": torch.get_num_threads(),
        "stage": run.choice.stage,
        "reason": run.choice.reason,
        "needed": {str(stage): size for stage, size in run.choice.needed.items()},
        "available": run.choice.available,
        "predicted": run.choice.predicted.to_json() if run.choice.predicted else None,
        "notes": list(run.choice.notes),
        "recipe": run.recipe.describe(),
        "precision": config.precision,
        "micro_batch": run.choice.micro_batch,
        "global_batch": run.order.global_batch,
        "accumulation": run.accumulation,
        "seq": config.seq,
        "steps": run.steps,
        "epochs": run.steps * run.order.global_batch / len(run.data.train),
        "schedule": f"lr {config.lr:g}, {config.schedule}",
        "output": config.output,
    }


if __name__ == "__main__":
    sys.exit(run_rank(TrainConfig.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))))
