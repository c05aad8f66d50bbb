"""The model that a plan is asked about, in any of the forms in which one can be named: its shape
and its activations. Adapters (LoRA) change the shape.

    7.5e9              ──► equal blocks                    activations from dimensions
    "llama-3-70b"      ──► the table's shapes              activations from its dimensions
    folder, module:f   ──► its own code on meta ─┐
    nn.Module          ──────────────────────────┴──►      activations traced
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.plan.account import Activities
from onefold.plan.activity import Activity, assumed_dims, stretched
from onefold.plan.formulas import CODES
from onefold.plan.hardware import Machine
from onefold.plan.job import Job
from onefold.plan.modules import model_shape, module_of
from onefold.plan.shapes import (
    ModelShape,
    Parameter,
    UnitShape,
    architecture,
    blocks_of,
    find,
    known,
)
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.runtime.buffers import buffers_in, sent_before_passes
from onefold.tracing.blocks import repeated_blocks
from onefold.tracing.trace import Trace, between, trace

#: The note of a plan with adapters.
_LORA = "LoRA: activations are those of training everything, which adapters need less than"
#: The notes of a plan whose activations come from dimensions.
_IDEAL = (
    "activations are counted from dimensions, as fused kernels keep them: code that is none keeps"
    " more (transformers' GPT-2 1.8 times as much, its Llama 1.2 times); give a folder, config.json"
    " or package.module:factory to have its own code traced"
)
_AS_CODE = (
    "activations are counted from dimensions, as transformers' code for {code} keeps them; give a"
    " folder, config.json or package.module:factory to have its own code traced"
)
#: The largest model that a plan accepts, in parameters: ten times the largest in the papers.
MOST_PARAMETERS = 1e15
#: Bytes of buffers from which on a note says that they are sent.
_HEAVY_BUFFERS = 1 << 20
#: Families with learned positions: no sample can be longer than their table of positions.
_LEARNED_POSITIONS = ("gpt", "gpt2")


@dataclass(frozen=True)
class Subject:
    """A model as a plan sees it.

    Attributes:
        job: as it was asked; with the model's own dtype if `precision` is None.
        activities: the activity of a micro-batch, by its size and checkpointing.
        another: the activities of the same model with another number of blocks.
        source: where the activities come from.
        notes: what had to be assumed.
        repeats: whether there are blocks to recompute.
    """

    job: Job
    shape: ModelShape
    activities: Activities
    another: Callable[[ModelShape], Activities]
    source: str
    notes: tuple[str, ...] = ()
    repeats: bool = True


def subject_of(
    model: Any, job: Job, batch: Callable[[int], Any] | None, loss: Any, machine: Machine
) -> Subject:
    """Read a model in any of the forms above. Raises ValueError: `model` is none of these forms, or
    cannot be traced.
    """
    notes: list[str] = []
    code = ""
    if isinstance(model, (bool, int, float)):
        model = _of_size(model)
    elif isinstance(model, (str, Path)) and known(str(model)):
        notes += _positions(str(model), job.seq)
        family = find(str(model)).family
        code = family if family in CODES else ""
        model = architecture(str(model))
    elif isinstance(model, (str, Path)):
        model = _module(model, as_it_is=job.precision is None)
        if hasattr(getattr(model, "config", None), "use_cache"):
            model.config.use_cache = False  # training keeps no cache of keys and values
    if isinstance(model, nn.Module):
        if job.precision is None:
            job = replace(job, model_dtype=dtype_of(model))
        return _traced(model, job, batch, loss, machine)
    if not isinstance(model, ModelShape):
        raise ValueError(
            f"a plan was asked for {type(model).__name__}: expected a module, a name, a folder or a"
            " number of parameters."
        )
    if job.units is not None:
        raise ValueError(
            f"units={list(job.units)!r} names modules, and {model.name} is planned from its"
            " dimensions: leave it out."
        )
    adapted = with_lora(model, job.lora_rank) if job.lora_rank else model
    shape = adapted
    notes.append(_AS_CODE.format(code=code) if code else _IDEAL)
    if not model.transformer:
        notes.append("activations assume a decoder with heads of 128 and a vocabulary of 50,304")
    if job.precision is None:
        notes.append(
            f"precision=None computes as the model is, and {model.name} is known by its dimensions:"
            " its weights are taken as fp32"
        )

    def activities_of(shape: ModelShape) -> Activities:
        dims = shape.transformer or assumed_dims(shape, job.seq)
        element = COMPUTE_DTYPES[job.computes].itemsize

        @lru_cache(maxsize=256)
        def activities(micro_batch: int, checkpointing: str) -> Activity:
            given = micro_batch, job.seq, element, checkpointing, code
            return Activity.from_dims(shape, dims, *given)

        return activities

    source = "from dimensions"
    return Subject(job, shape, activities_of(shape), activities_of, source, tuple(notes))


def _of_size(numel: float) -> ModelShape:
    if isinstance(numel, bool) or not 1 <= numel < math.inf:
        raise ValueError(
            f"a model of {numel!r} parameters: expected a positive number, such as 7.5e9."
        )
    if numel > MOST_PARAMETERS:
        raise ValueError(f"a model of {numel:g} parameters: expected at most {MOST_PARAMETERS:g}.")
    return ModelShape.of_size(int(numel), f"{numel:,.0f} parameters")


def _positions(name: str, seq: int) -> Iterator[str]:
    row = find(name)
    if row.family in _LEARNED_POSITIONS and seq > row.dims.seq:
        yield (
            f"{row.name} has {row.dims.seq:,} learned positions: a sample of {seq:,} tokens cannot"
            f" run as it is (--seq {row.dims.seq})"
        )


def _module(source: str | Path, as_it_is: bool = False) -> nn.Module:
    text = str(source)
    if not text or (isinstance(source, Path) and text == "."):
        raise ValueError(
            "the model's name is empty: expected a name such as llama-3-8b, a folder, config.json"
            " or package.module:factory."
        )
    try:
        return module_of(source, as_it_is)
    except ValueError as error:
        # "organization/model", a name on Hugging Face's hub
        hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text) is not None
        plain = hub or re.fullmatch(r"[^:/\\]+", text)
        if Path(source).exists() or not plain or text.endswith(".json"):
            raise
        only = f" Nothing is downloaded: the config.json of {text} is all that a plan needs of it."
        try:
            architecture(text)
        except ValueError as names:
            raise ValueError(
                f"{names} Or give a folder with a config.json, package.module:factory, or"
                f" --params.{only if hub else ''}"
            ) from error
        raise


def dtype_of(model: Any) -> str:
    """Return the precision of most of a module's weights; "fp32" for anything that is no module, or
    whose weights are in none of the three precisions.
    """
    count = dict.fromkeys(COMPUTE_DTYPES, 0)
    for p in model.parameters() if isinstance(model, nn.Module) else ():
        for name, dtype in COMPUTE_DTYPES.items():
            count[name] += p.numel() if p.dtype == dtype else 0
    return max(count, key=lambda name: count[name])


# -- traced ----------------------------------------------------------------------------------------


def _traced(
    module: nn.Module, job: Job, batch: Callable[[int], Any] | None, loss: Any, machine: Machine
) -> Subject:
    name, recipe = type(module).__name__, job.recipe(3)
    shape = model_shape(module, job.units, seq=job.seq)
    shape = with_lora(shape, job.lora_rank) if job.lora_rank else shape
    make = batch or tokens(module, job.seq)
    options: dict[str, Any] = {
        "precision": job.precision,
        "device": "cpu" if machine.shared else "cuda",
        "loss": loss,
        "units": job.units,
    }
    log = logging.getLogger("torch._subclasses.fake_tensor")

    @lru_cache(maxsize=256)
    def traced(samples: int, checkpointing: Any) -> Trace:
        log.addFilter(_silent)  # torch logs the traceback of what is raised below
        try:
            return trace(module, make(samples), checkpointing=checkpointing, **options)
        except ValueError:
            raise
        except Exception as error:  # a model's own code may raise anything
            text = " ".join(str(error).split()).rstrip(".")
            text = text if len(text) <= 300 else text[:300] + " ..."
            raise ValueError(
                f"{name} failed in the trace of its forward and backward pass:"
                f" {type(error).__name__}: {text}. Mend it, give onefold.plan a"
                " batch=function that makes what its forward takes, or plan by its size"
                " (--params)."
            ) from error
        finally:
            log.removeFilter(_silent)

    @lru_cache(maxsize=256)
    def activities(micro_batch: int, checkpointing: str) -> Activity:
        return Activity.from_trace(between(lambda n: traced(n, checkpointing), micro_batch))

    found = _frozen(activities, shape) if job.lora_rank else activities
    blocks = tuple(u.name for u in blocks_of(shape.units))

    def another(other: ModelShape) -> Activities:
        names = tuple(u.name for u in blocks_of(other.units))
        return lambda micro_batch, checkpointing: stretched(
            found(micro_batch, checkpointing), blocks, names
        )

    notes = (_LORA,) if job.lora_rank else ()
    return Subject(
        job,
        shape,
        found,
        another,
        "traced from the module",
        (*notes, *_of_buffers(module, recipe, machine)),
        repeats=bool(repeated_blocks(module)) or bool(job.lora_rank),
    )


def _of_buffers(module: nn.Module, recipe: Recipe, machine: Machine) -> Iterator[str]:
    """Yield a note about large buffers, which every stage sends in full."""
    nbytes = sum(b.nbytes for b in buffers_in(sent_before_passes(module, recipe)))
    if machine.ranks > 1 and nbytes >= _HEAVY_BUFFERS:
        yield (
            f"buffers: rank 0 sends {nbytes / 2**20:,.1f} MiB of them to each other rank"
            " before the forward pass behind a synchronized one, as DDP does, beside the wire's"
            " figures; sync_buffers='norms' or False sends fewer"
        )


def _silent(record: logging.LogRecord) -> bool:
    return False


def _frozen(activities: Activities, shape: ModelShape) -> Activities:
    """Return the activities without the FLOPs of gradients that frozen parameters do not have: of three
    parts of the products.
    """
    trained = {u.name: u.trainable / u.numel if u.numel else 1.0 for u in shape.units}

    def fewer(micro_batch: int, checkpointing: str) -> Activity:
        found = activities(micro_batch, checkpointing)
        passes = {
            (unit, phase): n - found.passes.get((unit, "forward"), 0) * (1 - trained.get(unit, 1.0))
            if phase == "backward"
            else n
            for (unit, phase), n in found.passes.items()
        }
        return replace(found, passes=passes)

    return fewer


def tokens(module: nn.Module, seq: int, asker: str = "onefold.plan") -> Callable[[int], Any]:
    """Return a function from a number of samples to the arguments of a language model: its token
    ids, also as labels if its forward takes them. Raises ValueError: its forward takes no
    `input_ids`.
    """
    taken = inspect.signature(module.forward).parameters
    if "input_ids" not in taken:
        raise ValueError(
            f"{type(module).__name__}.forward takes no input_ids, so it is no language model: wrap"
            f" it in a module whose forward does, or give {asker} a batch in Python (batch=...)."
        )
    names = [name for name in ("input_ids", "labels") if name in taken]
    if (
        getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        and "decoder_input_ids" in taken
    ):
        names.append("decoder_input_ids")

    def make(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros((samples, seq), dtype=torch.long, device="meta")
        return dict.fromkeys(names, ids)

    return make


# -- adapters --------------------------------------------------------------------------------------


def with_lora(model: ModelShape, rank: int) -> ModelShape:
    """Return the model frozen, with adapters on every matrix of its blocks: A of rank × in, B of
    out × rank (Hu et al. 2022, section 4.1).

    Experts that are stacked in one tensor (experts × out × in) get one adapter each.

    Raises:
        ValueError: there are no matrices, or none with both sides larger than `rank`.
    """
    blocks = {u.name for u in blocks_of(model.units)}
    units = []
    added = active = smaller_side = 0
    experts = model.transformer.experts if model.transformer else 1
    used = model.transformer.active if model.transformer else 1
    for unit in model.units:
        frozen = [replace(p, trainable=False) for p in unit.parameters]
        adapters: list[Parameter] = []
        for p in unit.parameters if unit.name in blocks else ():
            if len(p.shape) == 2 or (len(p.shape) == 3 and p.routed):
                *stacked, rows, columns = p.shape
                pair = [
                    Parameter(f"{p.name}.lora_A", (*stacked, rank, columns)),
                    Parameter(f"{p.name}.lora_B", (*stacked, rows, rank)),
                ]
                both = sum(a.numel for a in pair)
                added += both
                active += both * used // experts if p.routed else both
                smaller_side = max(smaller_side, min(rows, columns))
                adapters += pair
        units.append(UnitShape(unit.name, (*frozen, *adapters), unit.looks_up_only))
    if not added:
        raise ValueError(
            f"{model.name} has no blocks with matrices to put adapters on: LoRA needs a model with"
            " its real shapes."
        )
    if rank > smaller_side:
        raise ValueError(
            f"LoRA of rank {rank}: no matrix in a block of {model.name} is larger than"
            f" {smaller_side} on both sides, so the adapters would be larger than what they adapt;"
            f" use at most {smaller_side}."
        )
    name = f"{model.name}, LoRA of rank {rank}"
    return replace(model, name=name, units=tuple(units), active_numel=model.active_numel + active)
