"""What the user sees: a progress bar in a terminal, lines where there is none, JSON lines with
--json, nothing on other ranks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from onefold.train.machine import readable
from onefold.train.wires import of_the_wire


class Reporter:
    """Says nothing; what ranks other than the first use."""

    def note(self, text: str) -> None:
        """Something is being done, or was done in another way than one may expect."""

    def plan(self, plan: dict[str, Any]) -> None:
        """What was chosen and why, before the first step."""

    def sample(self, when: str, prompt: str, text: str) -> None:
        """Text of the model, `when` is "before" or "after"."""

    def step(self, row: dict[str, Any]) -> None:
        """Metrics of one step."""

    def alert(self, text: str) -> None:
        """Something needs an eye: a step that was left out, a slow rank."""

    def saved(self, row: dict[str, Any]) -> None:
        """A checkpoint is whole: its step, path, seconds, and the seconds of them in which the
        training stood still.
        """

    def done(self, row: dict[str, Any]) -> None:
        """The run is over and saved."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class JsonReporter(Reporter):
    """One JSON object a line on stdout, with the key "event"."""

    def _write(self, event: str, **values: Any) -> None:
        sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        self._write("note", text=text)

    def plan(self, plan: dict[str, Any]) -> None:
        self._write("plan", **plan)

    def sample(self, when: str, prompt: str, text: str) -> None:
        self._write("sample", when=when, prompt=prompt, text=text)

    def step(self, row: dict[str, Any]) -> None:
        self._write("step", **row)

    def alert(self, text: str) -> None:
        self._write("alert", text=text)

    def saved(self, row: dict[str, Any]) -> None:
        self._write("checkpoint", **row)

    def done(self, row: dict[str, Any]) -> None:
        self._write("done", **row)


class ConsoleReporter(Reporter):
    """For people: a table, then a bar (a terminal) or a line every `log_every` steps (a file or a
    pipe).
    """

    def __init__(self, log_every: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._log_every = log_every
        self._bar: Progress | None = None
        self._steps = 0
        self._held_out: dict[str, Any] = {}
        self._borders = ""

    def note(self, text: str) -> None:
        self.console.print(f"[dim]{_plain(text)}[/dim]")

    def plan(self, plan: dict[str, Any]) -> None:
        self._steps, self._borders = plan["steps"], plan["borders"]
        facts = Table.grid(padding=(0, 2))
        batch = (
            f"{plan['micro_batch']} x {plan['ranks']} ranks x {plan['accumulation']} accumulated"
        )
        for label, value in (
            ("model", f"{plan['model']}, {plan['parameters']:,} parameters ({plan['trained']:,} trained)"),
            ("data", f"{plan['data']}: {plan['samples']:,} sequences of up to {plan['seq']} tokens, {plan['held_out']:,} held out"),
            ("ranks", f"{plan['ranks']} on {plan['device']} over {plan['backend']}, {plan['threads']} threads each"),
            ("batch", f"{plan['global_batch']} sequences a step = {batch}"),
            ("length", f"{plan['steps']} steps, {plan['epochs']:.2f} epochs, {plan['schedule']}"),
            ("stage", plan["reason"]),
            ("off the device", plan["off_the_device"]),
            ("output", plan["output"]),
        ):  # fmt: skip
            if value != "":
                facts.add_row(f"[bold]{label}[/bold]", _plain(str(value)))
        self.console.print(facts)
        stages = Table(
            title="a rank would hold at peak", title_justify="left", box=None, padding=(0, 2)
        )
        for column in ("stage", "needed", "may use", ""):
            stages.add_column(column, justify="left" if column == "" else "right")
        for stage, needed in plan["needed"].items():
            mark = (
                "<- chosen"
                if int(stage) == plan["stage"]
                else ""
                if needed <= plan["available"]
                else "does not fit"
            )
            stages.add_row(str(stage), readable(needed), readable(plan["available"]), mark)
        self.console.print(stages)
        self.console.print(_plain(plan["recipe"]), style="dim")

    def sample(self, when: str, prompt: str, text: str) -> None:
        self._stop_bar()
        self.console.print(
            f"[bold]{when} training[/bold]  [dim]{_plain(prompt)}[/dim]{_plain(text)}"
        )

    def step(self, row: dict[str, Any]) -> None:
        if self.console.is_terminal:
            self._advance(row)
        elif row["step"] % self._log_every == 0 or row["step"] in (1, self._steps):
            self.console.print(f"step {row['step']}/{self._steps}  {_figures(row, self._borders)}")

    def alert(self, text: str) -> None:
        self.console.print(f"[yellow]{_plain(text)}[/yellow]")

    def saved(self, row: dict[str, Any]) -> None:
        text = (
            f"checkpoint {row['path']} in {row['seconds']:.1f} s, {row['stall_s']:.2f} s of them"
            " waited for"
        )
        self.console.print(f"[dim]{_plain(text)}[/dim]")

    def done(self, row: dict[str, Any]) -> None:
        self._stop_bar()
        verb = f"stopped ({row['why']})" if row["stopped"] else "done"
        first, last = row["first_loss"], row["last_loss"]
        losses = (
            f"loss {first:.3f} -> {last:.3f}, " if first is not None and last is not None else ""
        )
        self.console.print(
            f"[bold]{verb}[/bold] after {row['steps']} steps in {row['seconds']:.0f} s:"
            f" {losses}{readable(row['wire_bytes_total'])} sent by each"
            f" rank{of_the_wire(row, self._borders, '_total')}, peak memory"
            f" {readable(row['memory_peak'])} a rank"
        )
        kept = [f"{row['model_kind']} {row['model']}"] if row["model"] else []
        kept += [f"checkpoint {row['checkpoint']}"] if row["checkpoint"] else []
        self.console.print(f"saved {_plain(', '.join([*kept, row['metrics']]))}")

    def close(self) -> None:
        self._stop_bar()

    def _advance(self, row: dict[str, Any]) -> None:
        if self._bar is None:
            self._bar = Progress(
                SpinnerColumn(), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
                console=self.console,
            )  # fmt: skip
            self._bar.add_task("train", total=self._steps, figures="")
            self._bar.start()
        if "eval_loss" in row:  # stays in sight until the next one
            self._held_out = {"eval_loss": row["eval_loss"]}
        self._bar.update(
            self._bar.task_ids[0],
            completed=row["step"],
            figures=_figures({**self._held_out, **row}, self._borders),
        )

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _figures(row: dict[str, Any], borders: str) -> str:
    parts = [f"loss {row['loss']:.3f}" if row["loss"] is not None else "loss not finite"]
    if row.get("left_out"):
        parts.append("left out")
    if "eval_loss" in row:
        parts.append(f"held-out {row['eval_loss']:.3f}")
    parts.append(f"{row['tokens_per_s']:.0f} tokens/s")
    parts.append(f"memory {readable(row['memory'])} (peak {readable(row['memory_peak'])})")
    parts.append(f"wire {readable(row['wire_bytes'])}/step{of_the_wire(row, borders)}")
    return "  ".join(parts)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def reporter(first: bool, json_lines: bool, log_every: int) -> Reporter:
    """The one that this rank uses."""
    if not first:
        return Reporter()
    return JsonReporter() if json_lines else ConsoleReporter(log_every)
