"""`onefold checkpoint inspect|verify|export|reshard|diff`: work with a checkpoint without ranks, a
model or a GPU.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from onefold.cli.options import refuse, stopped
from onefold.recipe.options import bytes_of

if TYPE_CHECKING:
    from onefold.checkpoint.source import Source

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Look into checkpoints, verify them, write them in other forms, compare them. No ranks and"
        " no GPU are needed. Exit status: 0 all is well, 1 something is damaged or differs, 2"
        " something cannot be read or written."
    ),
)

Path_ = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint, a folder of them or a run's output folder; of several the newest.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of words and tables.")
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace what is at the target, once the new one is whole."),
]
Filter = Annotated[
    str | None,
    typer.Option(
        "--filter",
        metavar="GLOB",
        help="Only tensors of these names, such as '*.mlp.*'.",
        show_default=False,
    ),
]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


class Part(enum.Enum):
    """The parts that can be compared by themselves; see `onefold.inspection.diff.KINDS_OF`."""

    WEIGHTS, OPTIMIZER, REST, RANDOM = "weights", "optimizer", "rest", "random"


@app.command("inspect")
def inspect_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint of Onefold, DeepSpeed or Hugging Face; a folder of them, or a run's output folder, is listed.",
            show_default=False,
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="Also a line for every tensor.")] = False,
    only: Filter = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say what a checkpoint holds: step, versions, ranks it was saved with, tensors, optimizer
    groups, what resumes. Reads no tensor.

    A folder of checkpoints, or a run's output folder, is listed instead, the newest first, with
    those that are not whole.
    """
    from onefold.checkpoint.folder import of_run
    from onefold.inspection.summary import listed, summarize

    with _told(as_json):
        path = of_run(path)
        found = [] if (path / "manifest.json").exists() else listed(path)
        if found:
            if as_json:
                _say("list", path=str(path), checkpoints=_plain(found))
            else:
                _tables().show_list(path, found)
            broken = any(c.wrong and not c.path.name.startswith(".") for c in found)
            raise typer.Exit(1 if broken else 0)
        with _opened(path) as source:
            summary = summarize(source, path)
        shown = None
        if tensors or only:
            shown = [t for t in summary.tensors if fnmatchcase(t.item.name, only or "*")]
        if as_json:
            said = _plain(summary) | {"model_files": summary.model_files}
            said |= {"parameters": summary.parameters, "tensors": _plain(shown)}
            _say(
                "inspect", **{k: v for k, v in said.items() if k != "tensors" or shown is not None}
            )
        else:
            _tables().show_summary(summary, shown)


@app.command("verify")
def verify_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A checkpoint; or a folder of them, or a run's output folder: each is verified.", show_default=False
        ),
    ],
    as_json: Json = False,
) -> None:  # fmt: skip
    """Read every byte of a checkpoint and name every file and tensor that is not as it was saved.

    Exit status 1 if anything is damaged or missing. Files that do not belong to the checkpoint are
    mentioned only.
    """
    from onefold.checkpoint.folder import of_run
    from onefold.inspection.verify import examine, is_like_a_checkpoint

    with _told(as_json):
        path = path if is_like_a_checkpoint(path) else of_run(path)
        folders = [path]
        if path.is_dir() and not is_like_a_checkpoint(path):
            inside = (p for p in path.iterdir() if not p.name.startswith("."))
            folders = sorted(filter(is_like_a_checkpoint, inside)) or [path]
        verdicts = []
        for folder in folders:
            begun = time.perf_counter()
            with _bar(f"verifying {folder.name}", _bytes_in(folder), as_json) as advance:
                verdict = examine(folder, advance)
            verdicts.append((verdict, time.perf_counter() - begun))
            if not as_json:
                _tables().show_verdict(*verdicts[-1])
        whole = not any(v.problems for v, _ in verdicts)
        if as_json:
            said = [_plain(v) | {"whole": not v.problems, "seconds": s} for v, s in verdicts]
            _say("verify", path=str(path), whole=whole, checkpoints=said)
    if not whole:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    path: Path_,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to make.", show_default=False)],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option("--dtype", help="Of the weights (default: as they are stored).", show_default=False),
    ] = None,
    max_shard: Annotated[str, typer.Option("--max-shard", help="The largest file, such as 500MB, 5GB or 2GiB.")] = "5GB",
    beside: Annotated[
        Path | None,
        typer.Option(
            "--like", help="A Hugging Face folder whose config.json and tokenizer are taken (default: its own).", show_default=False
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write the model in a checkpoint as safetensors that transformers' from_pretrained opens."""
    with _told(as_json):
        import torch

        from onefold.pretrained.export_folder import export_folder

        try:
            limit = bytes_of("--max-shard", max_shard)
        except ValueError as error:
            raise _error(str(error)) from None
        begun = time.perf_counter()
        with _opened(path) as source, _bar(f"exporting to {target}", None, as_json) as advance:
            written = _Total(advance)
            kind = getattr(torch, DTYPES[dtype]) if dtype else None
            export_folder(source, target, kind, limit, written, beside=beside, overwrite=overwrite)
            said = {"source": source.describe}
        _written("export", target, written.done, time.perf_counter() - begun, as_json, said)


@app.command("reshard")
def reshard_command(
    path: Path_,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The checkpoint to make; may be PATH with --overwrite.", show_default=False)
    ],
    ranks: Annotated[int, typer.Option("--ranks", help="How many ranks' files to write; 1 puts all into one.", show_default=False)],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write the same checkpoint in the files of another number of ranks. Loading does not need it:
    it loads on any number as it is.
    """
    with _told(as_json):
        from onefold.checkpoint.folder_source import FolderSource
        from onefold.inspection.reshard import reshard

        with _opened(path) as source:
            if not isinstance(source, FolderSource):
                raise _error(
                    f"{source.describe} is not a checkpoint of Onefold. Load it in a run and save"
                    " it there, or export it."
                )
            folder, nbytes = source.folder, sum(f.nbytes for f in source.manifest.files.values())
        begun = time.perf_counter()
        with _bar(f"writing {target.name}", nbytes, as_json) as advance:
            reshard(folder, target, ranks, overwrite=overwrite, advance=advance)
        seconds, said = time.perf_counter() - begun, {"source": str(folder), "ranks": ranks}
        _written("reshard", target, _bytes_in(target), seconds, as_json, said)


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A checkpoint of Onefold, DeepSpeed or Hugging Face.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another, from any number of ranks.", show_default=False)],
    only: Annotated[
        list[Part] | None,
        typer.Option("--only", help="A part to compare, or several. rest: step, scheduler, scaler, data, extra.", show_default=False),
    ] = None,
    names: Filter = None,
    atol: Annotated[float, typer.Option("--atol", min=0, help="Elements that differ by no more are the same.")] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="The same, as a part of the larger of the two.")] = 0.0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare two checkpoints: which tensors differ and by how much, and parameter groups, step
    counts and all else that resumes.

    How they were saved (ranks, stage, versions) is shown and is no difference. Exit status 1 if
    they differ.
    """
    from onefold.checkpoint.tensorfile import numel_of
    from onefold.inspection.diff import PARTS, Tolerance, differences

    with _told(as_json):
        chosen = ["weights", "optimizer"] if names else PARTS
        chosen = [part.value for part in only] if only else chosen
        parts = [p for p in PARTS if p in chosen]
        with _opened(first) as one, _opened(second) as other:
            elements = sum(numel_of(s.shape) for s in one.items().values())
            with _bar(f"comparing {first.name} and {second.name}", elements, as_json) as advance:
                found = differences(
                    one, other, parts=parts, tolerance=Tolerance(atol, rtol), advance=advance,
                    wanted=lambda name: names is None or fnmatchcase(name, names),
                )  # fmt: skip
            made = [{"from": s.describe, **_made(s)} for s in (one, other)]
        if as_json:
            made_by = {"first": made[0], "second": made[1]}
            _say("diff", **{"equal": found.equal, **made_by, **_plain(found)})
        else:
            _tables().show_difference(found, made, parts)
    if not found.equal:
        raise typer.Exit(1)


# -- common ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _told(as_json: bool) -> Iterator[None]:
    """Report an error that the user can fix in one sentence, with status 2. Ctrl-C ends the command
    with status 130 and leaves no files.
    """
    import onefold.inspection.diff
    import onefold.inspection.reshard  # noqa: F401, torch is imported before Ctrl-C becomes an exception
    from onefold.checkpoint.errors import CheckpointError
    from onefold.checkpoint.folder import in_words
    from onefold.processes.signals import interruptible

    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        stopped(signal.SIGINT, "written")
    except (CheckpointError, OSError) as error:
        text = str(error) if isinstance(error, CheckpointError) else f"{in_words(error)}."
        refuse(text, as_json, kind=type(error).__name__)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Source]:
    from onefold.checkpoint.loading import source_of

    source = source_of(path)
    try:
        yield source
    finally:
        source.close()


@contextlib.contextmanager
def _bar(title: str, total: int | None, as_json: bool) -> Iterator[Callable[..., object]]:
    """Show a progress bar in a terminal. Yields a function to call with (bytes since the last call,
    total bytes if they have changed).
    """
    if as_json or not sys.stderr.isatty():
        yield lambda done, of=None: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(), rich.TimeRemainingColumn(),
    )  # fmt: skip
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)

        def advance(more: int, of: int | None = None) -> None:
            progress.update(task, advance=more, **({} if of is None else {"total": of}))  # type: ignore[arg-type]

        yield advance


class _Total:
    """Converts calls with (bytes done, bytes in all) to steps of a progress bar."""

    def __init__(self, advance: Callable[..., object]) -> None:
        self._advance, self.done = advance, 0

    def __call__(self, done: int, total: int) -> None:
        self._advance(done - self.done, total)
        self.done = done


def _say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}))


def _written(
    event: str, target: Path, nbytes: int, seconds: float, as_json: bool, more: dict[str, Any]
) -> None:
    files = sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file())
    if as_json:
        figures = {"bytes": nbytes, "seconds": seconds}
        _say(event, **more, target=str(target), files=files, **figures)
    else:
        _tables().show_written(target, files, nbytes, seconds)


def _made(source: Source) -> dict[str, Any]:
    """Return how and when a checkpoint was made. It is shown to people, and never compared."""
    from onefold.checkpoint.folder_source import FolderSource

    if not isinstance(source, FolderSource):
        return {}
    manifest = source.manifest
    keys = ("world_size", "stage", "onefold", "torch")
    return {"step": manifest.step, "created": manifest.created} | {
        k: manifest.saved_by[k] for k in keys if k in manifest.saved_by
    }


def _bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0


def _error(text: str) -> Exception:
    from onefold.checkpoint.errors import CheckpointError

    return CheckpointError(text)


def _plain(value: Any) -> Any:
    """Convert dataclasses and their contents to values for JSON."""
    from dataclasses import fields, is_dataclass

    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "numel", lambda: 1)() == 1:
        return _plain(item())
    return str(value)


def _tables() -> Any:
    from onefold.cli import checkpoint_tables

    return checkpoint_tables
