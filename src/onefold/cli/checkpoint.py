"""`onefold checkpoint inspect|verify|export|diff`: work with a checkpoint without ranks, a
model or a GPU. Each command answers with rows; see `show`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from onefold.cli.options import Json, option
from onefold.cli.show import answered, busy, show
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
        help=(
            "A checkpoint of Onefold, DeepSpeed or Hugging Face; or a folder of them, or of a run:"
            " verify verifies each, the others take the newest."
        ),
        show_default=False,
    ),
]
Filter = Annotated[
    str | None, option("A glob: only these tensors, such as '*.mlp.*'.", None, "--filter")
]


@app.command("inspect")
@answered
def inspect_command(
    path: Path_,
    tensors: Annotated[bool, option("Also a line for every tensor.", None, "--tensors")] = False,
    only: Filter = None,
    as_json: Json = False,
) -> int:
    """Say what a checkpoint holds: step, versions, ranks it was saved with, tensors, optimizer
    groups, what resumes. Reads no tensor.

    Of a folder of checkpoints, or a run's output folder, the newest, and the names of all.
    """
    from onefold.checkpoint.folder import newest_first, of_run
    from onefold.inspection.summary import summarize

    path = of_run(path)
    with contextlib.closing(_opened(path)) as source:
        found = summarize(source, path)
    found["checkpoints"] = [folder.name for folder in newest_first(path, damaged=True)]
    each = found.pop("each tensor")
    if tensors or only:
        found["each tensor"] = [row for row in each if fnmatchcase(row["name"], only or "*")]
    show(as_json, "inspect", found)
    return 0


@app.command("verify")
@answered
def verify_command(path: Path_, as_json: Json = False) -> int:
    """Read every byte of a checkpoint and name every file and tensor that is not as it was saved.

    Exit status 1 if anything is damaged or missing.
    """
    from onefold.checkpoint.folder import newest_first, of_run
    from onefold.inspection.verify import examine

    path, rows, problems = of_run(path), [], []
    for folder in newest_first(path, damaged=True) or [path]:
        begun = time.perf_counter()
        with busy(f"verifying {folder.name}", as_json):
            found = examine(folder)
        read = {"bytes": _bytes_in(folder), "seconds": time.perf_counter() - begun}
        state = "damaged" if found else "whole: every checksum agrees"
        rows.append({"name": folder.name, **read, "is": state})
        problems += [{"checkpoint": folder.name, **asdict(problem)} for problem in found]
    said = {"path": str(path), "whole": not problems, "checkpoints": rows, "problems": problems}
    show(as_json, "verify", said)
    return int(bool(problems))


@app.command("export")
@answered
def export_command(
    path: Path_,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to make.", show_default=False)
    ],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        option("Of the weights (default: as they are stored)."),
    ] = None,
    max_shard: Annotated[
        str, option("The largest file, such as 500MB, 5GB or 2GiB.", shown=True)
    ] = "5GB",
    beside: Annotated[
        Path | None,
        option(
            "A folder whose config.json and tokenizer are taken (default: its own).", None, "--like"
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        option("Replace what is at the target, once the new one is whole.", None, "--overwrite"),
    ] = False,
    as_json: Json = False,
) -> int:
    """Write the model in a checkpoint as safetensors that transformers' from_pretrained opens."""
    from onefold.pretrained.export import export_folder
    from onefold.recipe import COMPUTE_DTYPES

    limit, kind = bytes_of("--max-shard", max_shard), COMPUTE_DTYPES.get(dtype or "")
    with contextlib.closing(_opened(path)) as source, busy(f"exporting to {target}", as_json):
        export_folder(source, target, kind, limit, beside=beside, overwrite=overwrite)
        said = source.describe
    files = sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file())
    made = {"target": str(target), "bytes": _bytes_in(target), "files": files}
    show(as_json, "export", {"source": said, **made})
    return 0


@app.command("diff")
@answered
def diff_command(
    first: Path_,
    second: Path_,
    only: Annotated[
        list[str] | None,
        option(
            "What to compare, once or several times: weights, optimizer, rest (step, scheduler, scaler, data, extra), random."
        ),
    ] = None,
    names: Filter = None,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints: which tensors differ and by how much, and parameter groups, step
    counts and all else that resumes.

    How they were saved (ranks, stage, versions) is shown and is no difference. Exit status 1 if
    they differ.
    """
    from onefold.inspection.diff import OWN, PARTS, differences

    chosen = only or (["weights", "optimizer"] if names else PARTS)
    if not {*chosen} <= {*PARTS}:
        raise ValueError(f"--only: expected {', '.join(PARTS)}.")
    with contextlib.closing(_opened(first)) as one, contextlib.closing(_opened(second)) as other:
        ours = one.form == other.form == "Onefold"
        parts = [part for part in PARTS if part in chosen and (ours or part not in OWN)]
        if not parts:
            raise ValueError(
                f"--only {' --only '.join(chosen)}: only checkpoints of Onefold say that, and"
                f" {first if one.form != 'Onefold' else second} is none; compare weights or optimizer."
            )
        with busy(f"comparing {first.name} and {second.name}", as_json):
            rows = differences(one, other, parts, lambda name: fnmatchcase(name, names or "*"))
        made = [
            {"from": s.describe, "step": s.step, "created": s.created, **s.saved_by}
            for s in (one, other)
        ]
    said = {"first": made[0], "second": made[1], "differences": rows, "compared": parts}
    show(
        as_json,
        "diff",
        {"equal": not rows, **said, "result": "they differ" if rows else "the same"},
    )
    return int(bool(rows))


def _opened(path: Path) -> Source:
    from onefold.checkpoint.loading import source_of

    return source_of(path)


def _bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0
