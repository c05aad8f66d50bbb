"""Read a configuration file, YAML or TOML, as keys and values."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from onefold.wording import TrainError, did_you_mean

#: Options that `onefold train` has no longer, and what to do instead.
GONE = {
    "prompt": "generate with the model in OUTPUT/model",
    "sample_tokens": "leave it out: a run makes no samples of text",
    "save_before": "let the scheduler send SIGUSR1 or SIGTERM, and give the run --grace",
    "slow_factor": "leave it out: `slowest` in the metrics is the slowest rank of a step",
    "torch_profiler": "use torch.profiler in a loop of your own",
    **dict.fromkeys(("beta1", "beta2"), "give betas in --optimizer-options betas=0.9,0.95"),
    "save_dtype": "onefold checkpoint export --dtype writes the weights of a checkpoint in another dtype",
    "log_every": "leave it out: every step is a line where there is no terminal",
    "pp": "write a loop with onefold.parallel.PipelineStage, as examples/pipeline.py does",
    **dict.fromkeys(
        ("nnodes", "rdzv_endpoint", "rdzv_id", "rdzv_backend", "rdzv_conf", "local_addr"),
        "give it to torchrun, on each machine: torchrun --nnodes 2 ... -m onefold train ...",
    ),
}


def refuse_gone(name: str) -> None:
    """Raise TrainError for an option that is gone, of a file or of the command line."""
    key = name.removeprefix("--").partition("=")[0].replace("-", "_")
    if key in GONE:
        raise TrainError(f"onefold train has no {name.partition('=')[0]} any more: {GONE[key]}.")


def read_config_file(path: str | Path, known: Collection[str]) -> dict[str, Any]:
    """Read a YAML or TOML file into {key: value}.
    Raises TrainError if the file cannot be read, or has a key that is not in `known`. Hyphens and
    underscores in keys mean the same.
    """
    import yaml

    path = Path(path)
    parsers: dict[str, Any] = {
        ".toml": tomllib.loads,
        **dict.fromkeys((".yaml", ".yml"), yaml.safe_load),
    }
    if path.suffix not in parsers:
        raise TrainError(f"--config {path}: expected a file that ends in .yaml, .yml or .toml.")
    try:
        values = parsers[path.suffix](path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise TrainError(f"--config {path} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise TrainError(f"--config {path} is nested too deeply.") from None
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # what is no text or no TOML, and Python's long numbers
        place = getattr(error, "problem_mark", None)
        where = f" in line {place.line + 1}, column {place.column + 1}" if place else ""
        said = getattr(error, "problem", None) or " ".join(str(error).partition(";")[0].split())
        kind = path.suffix[1:].upper().replace("YML", "YAML")
        raise TrainError(f"--config {path} is not valid {kind}{where}: {said}.") from None
    if not isinstance(values, dict):
        raise TrainError(
            f"--config {path}: expected keys and values at the top level, found"
            f" {type(values).__name__}."
        )
    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    for name, key in zip(named, values, strict=False):
        if name not in known:
            refuse_gone(str(key))
            raise TrainError(
                f"--config {path} has the unknown key {key!r}. {did_you_mean(name, known)}"
            )
    return named
