"""The model that a plan is asked about, in any of the forms in which one can be named: its shape and
its activations.

    7.5e9                   ──► equal blocks               activations from dimensions
    name, folder, module:f  ──► its code on meta ─┐
    nn.Module               ──────────────────────┴──►     activations traced
    with adapters           ──► the same, wrapped by peft as `onefold train --lora` does
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from onefold.plan.account import Activities, Question
from onefold.plan.activity import assumed_dims, of_dims
from onefold.plan.hardware import Machine
from onefold.plan.job import Job
from onefold.plan.modules import adapted, known, model_shape, module_of, positions_of, quietly
from onefold.plan.shapes import ModelShape
from onefold.recipe import COMPUTE_DTYPES
from onefold.tracing.blocks import repeated_blocks
from onefold.tracing.trace import Activity, between, trace

#: The note of a plan whose activations come from dimensions.
_IDEAL = (
    "activations assume a decoder with heads of 128 and a vocabulary of 50,304, and fused kernels: code"
    " that is none keeps more (transformers' GPT-2 1.8 times as much, its Llama 1.2 times); give a name,"
    " a folder, config.json or package.module:factory to have its own code traced"
)
_AS_FP32 = (
    "precision=None computes as the model is, and of this one no dtype is known: its weights are taken as"
    " fp32"
)
#: Tokens of a sample where a job leaves them open, if the model has as many positions.
LONGEST = 2048
#: The largest model that a plan accepts, in parameters: ten times the largest in the papers.
MOST_PARAMETERS = 1e15


def question_of(
    model: Any,
    machine: Machine,
    job: Job,
    batch: Callable[[int], Any] | None = None,
    loss: Any = None,
) -> Question:
    """Read a model in any of the forms above. The question's job is as it was asked; with the model's
    own dtype if `precision` is None, its length, and nothing to recompute if it has no blocks. Raises
    ValueError: `model` is none of these forms, or cannot be traced.
    """
    if isinstance(model, (bool, int, float)):
        model = _of_size(model)
    if isinstance(model, ModelShape):
        return _of_shape(model, machine, replace(job, seq=job.seq or LONGEST))
    named = known(model) if isinstance(model, (str, Path)) else None
    as_it_is = job.precision is None
    if named is not None:
        module = _by_name(named)
    elif isinstance(model, (str, Path)):
        module = _built(model, as_it_is)
    elif isinstance(model, nn.Module):
        module = model
    else:
        raise ValueError(
            f"a plan was asked for {type(model).__name__}: expected a module, a name, a folder or a"
            " number of parameters."
        )
    if not job.seq:
        job = replace(job, seq=min(LONGEST, positions_of(module) or LONGEST))
    if not (job.checkpointing or repeated_blocks(module)):
        job = replace(job, checkpointing="none")
    name = named or type(module).__name__
    device = "cpu" if machine.shared else "cuda"
    given = name, job.seq, job.lora_rank, job.units, job.precision, device, batch, loss
    module, shape, activities = (_read_once if named else _read)(module, *given)
    notes = [_AS_FP32] if as_it_is and named else []
    job = replace(job, model_dtype=dtype_of(module)) if as_it_is else job
    return Question(shape, activities, machine, job, "traced from the module", tuple(notes))


def _of_shape(shape: ModelShape, machine: Machine, job: Job) -> Question:
    if job.units is not None or job.lora_rank:
        asked = f"units={list(job.units)!r}" if job.units is not None else "LoRA"
        raise ValueError(
            f"{asked} takes modules by name, and {shape.name} is planned from its size, without its real shapes:"
            " leave it out, or give a name such as llama-3-8b."
        )

    dims = shape.transformer or assumed_dims(shape)
    element = COMPUTE_DTYPES[job.computes].itemsize

    @lru_cache(maxsize=256)
    def activities(micro_batch: int, checkpointing: str) -> Activity:
        return of_dims(shape, dims, micro_batch, job.seq, element, checkpointing)

    assumed = {_IDEAL: shape.transformer is None, _AS_FP32: job.precision is None}
    notes = tuple(note for note, holds in assumed.items() if holds)
    return Question(shape, activities, machine, job, "from dimensions", notes)


def _of_size(numel: float) -> ModelShape:
    if isinstance(numel, bool) or not 1 <= numel < math.inf:
        raise ValueError(
            f"a model of {numel!r} parameters: expected a positive number, such as 7.5e9."
        )
    if numel > MOST_PARAMETERS:
        raise ValueError(f"a model of {numel:g} parameters: expected at most {MOST_PARAMETERS:g}.")
    return ModelShape.of_size(int(numel), f"{numel:,.0f} parameters")


def dtype_of(module: nn.Module) -> str:
    """Return the precision of most of a module's weights; "fp32" if they are in none of the three."""
    count = Counter[torch.dtype]()
    for p in module.parameters():
        count[p.dtype] += p.numel()
    return max(COMPUTE_DTYPES, key=lambda name: count[COMPUTE_DTYPES[name]])


# -- traced ----------------------------------------------------------------------------------------


def _built(source: str | Path, as_it_is: bool = False) -> nn.Module:
    module: Any = module_of(source, as_it_is)
    if hasattr(getattr(module, "config", None), "use_cache"):
        module.config.use_cache = False  # training keeps no cache of keys and values
    return module


_by_name = lru_cache(maxsize=16)(_built)


def _read(
    module: nn.Module,
    name: str,
    seq: int,
    lora_rank: int,
    units: tuple[str | type, ...] | None,
    precision: Any,
    device: str,
    batch: Callable[[int], Any] | None = None,
    loss: Any = None,
) -> tuple[nn.Module, ModelShape, Activities]:
    """Return (the module, with its adapters; its shape; its activities, traced when they are asked
    for).
    """
    make = batch or tokens(module, seq)
    if lora_rank:
        module, name = with_lora(module, lora_rank), f"{name}, LoRA of rank {lora_rank}"
    shape = model_shape(module, units, name=name)
    options = {"precision": precision, "device": device, "loss": loss, "units": units}
    log = logging.getLogger("torch._subclasses.fake_tensor")

    @lru_cache(maxsize=256)
    def traced(samples: int, checkpointing: Any) -> Activity:
        try:
            # torch logs the traceback of what is raised below, and transformers warns
            with mock.patch.object(log, "disabled", True), quietly():
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

    @lru_cache(maxsize=256)
    def activities(micro_batch: int, checkpointing: str) -> Activity:
        return between(lambda n: traced(n, checkpointing), micro_batch)

    return module, shape, activities


#: Of a public architecture: the next plan of it finds the traces.
_read_once = lru_cache(maxsize=16)(_read)


def with_lora(module: nn.Module, rank: int) -> nn.Module:
    """Return a copy of the module on the meta device, frozen, with adapters (`modules.adapted`)."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in module.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    try:
        return adapted(copy.deepcopy(module, memo), rank)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"LoRA: peft puts no adapters on a {type(module).__name__} ({error}): wrap it by peft"
            " yourself, and leave lora_rank out."
        ) from None


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
