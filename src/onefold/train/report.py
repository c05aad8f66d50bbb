"""What the user sees of a run, and what the run writes for `onefold report`.

Reporter          prints nothing: for ranks other than the first
JsonReporter      --json: one object per line
ConsoleReporter   a progress bar in a terminal, plain lines elsewhere

event        values
note         text: something is being done, or was done in an unexpected way
plan         what was chosen and why, before the first step (`describe`)
step         figures of one step
alert        text: something needs attention, such as a skipped step
checkpoint   one is complete: step, path, seconds, and stall_s, the seconds that training waited for it
done         the run is over and saved
error        the run failed (--json only)

Window       records steps: one for the report, or those that --trace names
describe     what was chosen and why
observe      writes this rank's ledgers into the output folder
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import progress as rich
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import onefold
from onefold.observe.runfile import write_observed
from onefold.observe.trace import Recording, measured, record
from onefold.recipe.core import NODES
from onefold.train.optimizers import peak_lr, rates
from onefold.train.prepare import steps_of
from onefold.wording import readable

if TYPE_CHECKING:
    from onefold.train.prepare import Run


class Reporter:
    """Prints nothing."""

    def say(self, event: str, **values: Any) -> None:
        """See the table above."""

    def note(self, text: str) -> None:
        self.say("note", text=text)

    def alert(self, text: str) -> None:
        self.say("alert", text=text)

    def close(self) -> None:
        """Leave the terminal as it was."""


class JsonReporter(Reporter):
    """Prints one JSON object per line on stdout, with the key "event"."""

    def say(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), flush=True)


class ConsoleReporter(Reporter):
    """Prints for people: a table, then a bar in a terminal, else a line a step."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._bar: rich.Progress | None = None
        self._steps = 0
        self._held_out: dict[str, Any] = {}
        self._borders = ""

    def say(self, event: str, **values: Any) -> None:
        getattr(self, f"_{event}")(values)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _note(self, note: dict[str, Any]) -> None:
        self.console.print(f"[dim]{escape(note['text'])}[/dim]")

    def _alert(self, alert: dict[str, Any]) -> None:
        self.console.print(f"[yellow]{escape(alert['text'])}[/yellow]")

    def _plan(self, plan: dict[str, Any]) -> None:
        self._steps, self._borders = plan["steps"], plan["borders"]
        facts = Table.grid(padding=(0, 2))
        micro, ranks, times = plan["micro_batch"], plan["data_ranks"], plan["accumulation"]
        kind = "ranks" if ranks == plan["ranks"] else "data-parallel ranks"
        batch = f"{micro} x {ranks} {kind} x {times} accumulated"
        for label, value in (
            ("model", f"{plan['model']}, {plan['parameters']:,} parameters ({plan['trained']:,} trained)"),
            ("data", f"{plan['data']}: {plan['samples']:,} sequences of up to {plan['seq']} tokens, {plan['held_out']:,} held out"),
            ("axes", plan["axes"]),
            ("ranks", f"{plan['ranks']} on {plan['device']} over {plan['backend']}, {plan['threads']} threads each"),
            ("batch", f"{plan['global_batch']} sequences a step = {batch}"),
            ("length", f"{plan['steps']} steps, {plan['epochs']:.2f} epochs, {plan['schedule']}"),
            ("stage", plan["reason"]),
            ("output", plan["output"]),
        ):  # fmt: skip
            if value != "":
                facts.add_row(f"[bold]{label}[/bold]", escape(str(value)))
        self.console.print(facts)
        stages = Table(
            *(Column(name, justify="right") for name in ("stage", "needed", "may use")), "",
            title="a rank would hold at peak", title_justify="left", box=None, padding=(0, 2),
        )  # fmt: skip
        for stage, needed in plan["needed"].items():
            mark = "" if needed <= plan["available"] else "does not fit"
            mark = "<- chosen" if int(stage) == plan["stage"] else mark
            stages.add_row(stage, readable(needed), readable(plan["available"]), mark)
        self.console.print(stages)
        self.console.print(escape(plan["recipe"]), style="dim")

    def _step(self, row: dict[str, Any]) -> None:
        if not self.console.is_terminal:
            said = _figures(row, self._borders)
            self.console.print(f"step {row['step']}/{self._steps}  {said}")
            return
        if self._bar is None:
            figures = rich.TextColumn("{task.fields[figures]}")
            columns = (
                rich.BarColumn(bar_width=20),
                rich.MofNCompleteColumn(),
                rich.TimeRemainingColumn(),
            )
            self._bar = rich.Progress(rich.SpinnerColumn(), *columns, figures, console=self.console)
            self._bar.add_task("train", total=self._steps, figures="")
            self._bar.start()
        if "eval_loss" in row:  # stays in sight until the next one
            self._held_out = {"eval_loss": row["eval_loss"]}
        self._bar.update(
            self._bar.task_ids[0],
            completed=row["step"],
            figures=_figures({**self._held_out, **row}, self._borders),
        )

    def _checkpoint(self, row: dict[str, Any]) -> None:
        took = f"{row['seconds']:.1f} s, {row['stall_s']:.2f} s of them waited for"
        self._note({"text": f"checkpoint {row['path']} in {took}"})

    def _done(self, row: dict[str, Any]) -> None:
        self.close()
        verb = f"stopped ({row['why']})" if row["stopped"] else "done"
        first, last = row["first_loss"], row["last_loss"]
        losses = f"loss {first:.3f} -> {last:.3f}, " if None not in (first, last) else ""
        self.console.print(
            f"[bold]{verb}[/bold] after {row['steps']} steps in {row['seconds']:.0f} s:"
            f" {losses}peak memory {readable(row['memory_peak'])} a rank"
        )
        kept = [f"{row['model_kind']} {row['model']}"] if row["model"] else []
        kept += [f"checkpoint {row['checkpoint']}"] if row["checkpoint"] else []
        kept += [row["metrics"]] if row["metrics"] else []
        self.console.print(f"saved {escape(', '.join(kept) or 'nothing')}")


def _figures(row: dict[str, Any], borders: str) -> str:
    parts = [f"loss {row['loss']:.3f}" if row["loss"] is not None else "loss not finite"]
    if row.get("left_out"):
        parts.append("left out")
    if "eval_loss" in row:
        parts.append(f"held-out {row['eval_loss']:.3f}")
    parts.append(f"{row['tokens_per_s']:.0f} tokens/s")
    parts.append(f"memory {readable(row['memory'])} (peak {readable(row['memory_peak'])})")
    sent, between, plain = (row[f"wire_bytes{which}"] for which in ("", "_between", "_plain"))
    details = [f"{readable(between)} between {borders.partition(' ')[2]}"] if borders else []
    details += [f"{readable(plain)} without codecs"] if plain != sent else []
    more = f" ({', '.join(details)})" if details else ""
    parts.append(f"wire {readable(sent)}/step{more}")
    return "  ".join(parts)


def reporter(first: bool, json_lines: bool) -> Reporter:
    """Return the reporter that this rank uses."""
    if not first:
        return Reporter()
    return JsonReporter() if json_lines else ConsoleReporter()


class Window:
    """Records the run's steps from `first` to `last` and stores the recording in the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first, self.last = steps_of(run.config.trace, run.steps)
        # The first steps of this process build states and record orders, so count from its start
        if run.config.trace is None and run.start:
            self.first = self.last = min(run.start + self.first, run.steps - 1)
        self._stack = contextlib.ExitStack()
        self._recording: Recording | None = None
        self._whole = 0

    def is_near(self, step: int) -> bool:
        """Whether `step` is being recorded, or is the one before the first recorded step.
        The loop reads such a step before the next one begins.
        """
        return self._recording is not None or step + 1 == self.first

    def begin(self, step: int) -> None:
        """Tell that `step` is about to begin."""
        if step == self.first:
            seen = record(self.run.model, self.run.optimizer, activations=True)
            self._recording = self._stack.enter_context(seen)

    def end(self, step: int, over: bool, whole: bool = True) -> None:
        """Tell that `step` has ended. `whole`: its update was applied. A window without any applied
        update moves on to the next step.
        """
        self._whole += whole and self._recording is not None
        if self._recording is not None and (step >= self.last or over):
            self._stack.close()
            recording, self._recording = self._recording, None
            if not self._whole:
                self.first = self.last = step + 1
                return
            self.run.recording = recording
            self.run.measured = measured(self.run.model, self.run.optimizer, recording)

    def close(self) -> None:
        """Stop recording, because the run failed or ended. An unfinished recording is dropped."""
        self._recording = None
        self._stack.close()

    def write(self, folder: Path) -> Path | None:
        """Write this rank's trace, if the run was asked for one."""
        config = self.run.config
        if self.run.recording is None or config.trace is None:
            return None
        return self.run.recording.write_chrome(folder / f"trace-rank{self.run.ranks.rank}.json")


def describe(run: Run) -> dict[str, Any]:
    """Return what was chosen and why, ready for JSON."""
    config, choice, ranks = run.config, run.choice, run.ranks
    rows = ("parameters", "gradients", "optimizer")
    return {
        "model": run.loaded.name,
        "parameters": run.trained + run.frozen,
        "trained": run.trained,
        "data": run.data.name,
        "samples": run.data.size(),
        "held_out": run.data.size(held_out=True),
        "ranks": ranks.world_size,
        "data_ranks": run.part.count,
        "axes": str(choice.mesh.scheme.degrees) if choice.mesh is not None else "",
        "device": str(ranks.device.type),
        "backend": ranks.backend,
        "threads": torch.get_num_threads(),
        "stage": choice.stage,
        "reason": choice.reason,
        "needed": {str(stage): size for stage, size in choice.needed.items()},
        "available": choice.available,
        "predicted": choice.predicted.to_json() if choice.predicted else None,
        "mesh": choice.mesh.to_json() if choice.mesh is not None else None,
        "notes": list(choice.notes),
        "recipe": run.recipe.describe(),
        "tiers": {row: getattr(run.recipe, row).tier.value for row in rows},
        "wires": config.arguments(NODES),
        "borders": onefold.engine_of(run.model).group.borders,
        "precision": config.precision,
        "micro_batch": choice.micro_batch,
        "global_batch": run.order.global_batch,
        "accumulation": run.accumulation,
        "seq": config.seq,
        "steps": run.steps,
        "epochs": run.steps * run.order.global_batch / run.data.size(),
        "schedule": f"{_peaks(run)}, {config.schedule}",
        "output": config.output,
    }


def _peaks(run: Run) -> str:
    """Return the peak learning rates in words."""
    groups = run.optimizer.param_groups
    peaks = rates({**group, "lr": peak_lr(run.config, group)} for group in groups)
    return ", ".join(f"{name.replace('_', ' ')} {rate:g}" for name, rate in peaks.items())


def observe(run: Run, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write this rank's ledgers into the output folder, for `onefold report`."""
    if run.measured is None or not rows:
        return
    later = rows[1:] or rows
    shares = [row["mfu"] for row in later if row.get("mfu") is not None]
    step_s = statistics.median(row["step_ms"] for row in later) / 1000
    account = replace(
        run.measured,
        seconds={**run.measured.seconds, "step": step_s},
        tokens_per_s=statistics.median(row["tokens_per_s"] for row in later),
        mfu=statistics.median(shares) if shares else None,
    )
    facts = {k: v for k, v in describe(run).items() if isinstance(v, str | int | float) and v != ""}
    for name in ("recipe", "borders"):
        facts.pop(name, None)
    write_observed(
        folder,
        run.ranks.rank,
        run.ranks.world_size,
        account,
        recipe=run.recipe,
        plan=run.choice.predicted,
        step=run.recording,
        facts=facts,
    )
