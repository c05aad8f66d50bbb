"""What a run shows, writes and leaves for `onefold report`.

    Reporter    tells events to its listeners: Console or json_lines, Metrics, tensorboard; those of the first rank
    describe    what was chosen and why
    observe     writes this rank's ledgers into the output folder

event        values
note         text: something is being done, or was done in an unexpected way
plan         what was chosen and why, before the first step (`describe`)
resumed      the step that this start goes on from, its ranks and stage
step         figures of one step
alert        text: something needs attention, such as a skipped step
checkpoint   one is complete: step, path, seconds, and stall_s, the seconds that training waited for it
done         the run is over and saved
error        the run failed (--json only)
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import progress as rich
from rich.console import Console as RichConsole
from rich.markup import escape
from rich.table import Table

import onefold
from onefold.observe.meter import flat
from onefold.observe.runfile import write_observed
from onefold.reading import parse_json
from onefold.train.optimizers import peak_lr, rates
from onefold.wording import readable

if TYPE_CHECKING:
    from onefold.train.prepare import Run

Row = dict[str, Any]
Listener = Callable[[str, Row], object]


class Reporter:
    """Tells what happens to those who show or keep it. Without listeners it tells nobody."""

    def __init__(self) -> None:
        self.listeners = list[Listener]()

    def say(self, event: str, **values: Any) -> None:
        """See the table above."""
        for listener in self.listeners:
            listener(event, values)

    def note(self, text: str) -> None:
        self.say("note", text=text)

    def alert(self, text: str) -> None:
        self.say("alert", text=text)


@contextlib.contextmanager
def to_those_who_read() -> Iterator[None]:
    """Go on if nobody reads standard output any more: `| tee` ends at a Ctrl-C, a terminal closes. It
    leads nowhere from then on.
    """
    try:
        yield
    except (OSError, SystemExit):  # the latter is rich's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@to_those_who_read()
def json_lines(event: str, values: Row) -> None:
    """Print one JSON object per line, with the key "event"."""
    print(json.dumps({"event": event, **values}), flush=True)


class Metrics:
    """The metrics file: a JSON object for each step, each start from a checkpoint and the end, written
    at once. A run goes on without it: if the disk takes nothing, `alert` is told, once, and the file
    keeps whole lines.

    Args:
        after: keep the file's rows up to this step and append to them; None begins a new file.
    """

    def __init__(
        self, path: Path, alert: Callable[[str], object], after: int | None = None
    ) -> None:
        self.path, self.alert, self.failed = path, alert, False
        if after is not None and path.is_file():
            _keep(path, after)
        self._file = path.open("wb" if after is None else "ab", buffering=0)

    def __call__(self, event: str, values: Row) -> None:
        if event not in ("step", "resumed", "done"):
            return
        line, begin = memoryview(json.dumps(values).encode() + b"\n"), self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(begin)
                self._file.seek(begin)
            if not self.failed:
                self.failed = True
                self.alert(
                    f"{self.path} cannot be written ({error.strerror or error}): the training goes on,"
                    " and rows are missing there. Free space on that disk, or checkpoints will fail"
                    " too."
                )


def _keep(path: Path, after: int) -> None:
    """Keep a file's rows up to step `after`, without those that were cut off as a run was killed."""
    kept = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = parse_json(line)
            if not row.get("done") and row.get("step", row.get("from_step", 0)) <= after:
                kept.append(line + b"\n")
    aside = path.with_name(path.name + ".unfinished")
    try:
        aside.write_bytes(b"".join(kept))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def tensorboard(folder: Path, after: int | None) -> Listener:
    """Return who writes the figures of steps for TensorBoard. Steps beyond `after` are void."""
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)

    def draw(event: str, values: Row) -> None:
        for name, value in flat(values).items() if event == "step" else ():
            board.add_scalar(name.replace(" ", "_"), value, values["step"])
        if event == "done":
            board.close()

    return draw


class Console:
    """Prints for people: a table, then a bar in a terminal, else a line a step."""

    def __init__(self) -> None:
        self.console = RichConsole(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._bar: rich.Progress | None = None
        self._shown: Row = {}
        self._plan: Row = {}

    @to_those_who_read()
    def __call__(self, event: str, values: Row) -> None:
        styles = {"note": "dim", "alert": "yellow"}
        if event in styles:
            self.console.print(escape(values["text"]), style=styles[event])
        elif event == "plan":
            self._begin(values)
        elif event == "step":
            self._step(values)
        elif event == "checkpoint":
            took = f"{values['seconds']:.1f} s, {values['stall_s']:.2f} s of them waited for"
            self("note", {"text": f"checkpoint {values['path']} in {took}"})
        elif event == "done":
            self._done(values)

    @to_those_who_read()
    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _begin(self, plan: Row) -> None:
        self._plan = plan
        facts = Table.grid(padding=(0, 2))
        kind = "ranks" if plan["data_ranks"] == plan["ranks"] else "data-parallel ranks"
        peaks = ", ".join(f"stage {s}: {readable(n)}" for s, n in plan["needed"].items())
        for label, text in (
            ("model", "{model}, {parameters:,} parameters ({trained:,} trained)"),
            ("data", "{data}: {samples:,} sequences of up to {seq} tokens, {held_out:,} held out"),
            ("axes", "{axes}"),
            ("ranks", "{ranks} on {device} over {backend}, {threads} threads each"),
            ("batch", f"{{global_batch}} sequences a step = {{micro_batch}} x {{data_ranks}} {kind} x {{accumulation}} accumulated"),
            ("length", "{steps} steps, {epochs:.2f} epochs, {schedule}"),
            ("stage", "{reason}"),
            ("at peak", peaks and f"{peaks}, of {readable(plan['available'])} a rank may use"),
            ("output", "{output}"),
        ):  # fmt: skip
            if said := text.format_map(plan):
                facts.add_row(f"[bold]{label}[/bold]", escape(said))
        self.console.print(facts)
        self.console.print(escape(plan["recipe"]), style="dim")
        if self.console.is_terminal:
            self._bar = rich.Progress(
                rich.SpinnerColumn(), rich.BarColumn(bar_width=20), rich.MofNCompleteColumn(), rich.TimeRemainingColumn(),
                rich.TextColumn("{task.fields[figures]}"), console=self.console,
            )  # fmt: skip
            self._bar.add_task("train", total=plan["steps"], figures="")
            self._bar.start()

    def _step(self, row: Row) -> None:
        # A held-out loss stays in sight until the next one
        kept = {name: self._shown[name] for name in ("eval_loss",) if name in self._shown}
        self._shown = {**(kept if self.console.is_terminal else {}), **row}
        figures = _figures(self._shown, self._plan["borders"])
        if self._bar is None:
            self.console.print(f"step {row['step']}/{self._plan['steps']}  {figures}")
        else:
            self._bar.update(self._bar.task_ids[0], completed=row["step"], figures=figures)

    def _done(self, row: Row) -> None:
        self.close()
        verb = f"stopped ({row['why']})" if row["stopped"] else "done"
        first, last = row["first_loss"], row["last_loss"]
        losses = f"loss {first:.3f} -> {last:.3f}, " if None not in (first, last) else ""
        self.console.print(
            f"[bold]{verb}[/bold] after {row['steps']} steps in {row['seconds']:.0f} s:"
            f" {losses}peak memory {readable(row['memory_peak'])} a rank"
        )
        kinds = {"model": f"{row['model_kind']} ", "checkpoint": "checkpoint ", "metrics": ""}
        kept = [f"{kind}{row[name]}" for name, kind in kinds.items() if row[name]]
        self.console.print(f"saved {escape(', '.join(kept))}")


def _figures(row: Row, borders: str) -> str:
    sent, between, plain = (row[f"wire_bytes{which}"] for which in ("", "_between", "_plain"))
    details = [f"{readable(between)} between {borders.partition(' ')[2]}"] if borders else []
    details += [f"{readable(plain)} without codecs"] if plain != sent else []
    parts = [
        f"loss {row['loss']:.3f}" if row["loss"] is not None else "loss not finite",
        "left out" if row.get("left_out") else "",
        f"held-out {row['eval_loss']:.3f}" if row.get("eval_loss") is not None else "",
        f"{row['tokens_per_s']:.0f} tokens/s",
        f"memory {readable(row['memory'])} (peak {readable(row['memory_peak'])})",
        f"wire {readable(sent)}/step" + (f" ({', '.join(details)})" if details else ""),
    ]
    return "  ".join(filter(None, parts))


def describe(run: Run) -> Row:
    """Return what was chosen and why, ready for JSON."""
    config, choice, ranks, order = run.config, run.choice, run.ranks, run.order
    planned, axes = choice.planned, ""
    if planned is not None and not planned.scheme.degrees.data_only:
        axes = str(planned.scheme.degrees)
    groups = run.optimizer.param_groups
    peaks = rates({**group, "lr": peak_lr(config, group)} for group in groups)
    said = ", ".join(f"{name.replace('_', ' ')} {rate:g}" for name, rate in peaks.items())
    return {
        **{name: getattr(config, name) for name in ("seq", "precision", "output")},
        **{name: getattr(choice, name) for name in ("stage", "reason", "available", "micro_batch")},
        **{name: getattr(run, name) for name in ("trained", "steps")},
        "model": run.loaded.name,
        "parameters": run.trained + run.frozen,
        "data": run.data.name,
        "samples": run.data.size(),
        "held_out": run.data.size(held_out=True),
        "ranks": ranks.world_size,
        "data_ranks": run.parts,
        "axes": axes,
        "device": ranks.device.type,
        "backend": ranks.backend,
        "threads": torch.get_num_threads(),
        "needed": {str(stage): size for stage, size in choice.needed.items()},
        "predicted": planned.account.to_json() if planned is not None else None,
        "recipe": run.recipe.describe(),
        "borders": onefold.engine_of(run.model).group.borders,
        "global_batch": order.global_batch,
        "accumulation": order.global_batch // (choice.micro_batch * run.parts),
        "epochs": run.steps * order.global_batch / run.data.size(),
        "schedule": f"{said}, {config.schedule}",
    }


def observe(run: Run, folder: Path, rows: list[Row]) -> None:
    """Write this rank's ledgers into the output folder, for `onefold report`."""
    if run.measured is None or not rows:
        return
    later, measured = rows[1:] or rows, run.measured

    def median(name: str) -> float | None:
        found = [row[name] for row in later if row.get(name) is not None]
        return statistics.median(found) if found else None

    seconds = {**measured.seconds, "step": (median("step_ms") or 0.0) / 1000}
    rate = median("tokens_per_s") or 0.0
    account = replace(measured, seconds=seconds, tokens_per_s=rate, mfu=median("mfu"))
    facts = {k: v for k, v in describe(run).items() if isinstance(v, str | int | float) and v != ""}
    planned = run.choice.planned
    # No ledger has what torch's other axes send
    plan = replace(planned.account, sent={}) if planned is not None else None
    write_observed(
        folder, run.ranks.rank, run.ranks.world_size, account,
        plan=plan, step=run.recording, facts=facts,
    )  # fmt: skip
