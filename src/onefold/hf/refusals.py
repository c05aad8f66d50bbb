"""Refuse what a Trainer on Onefold cannot do. Each message says what to do instead."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

import onefold
from onefold.recipe import Recipe
from onefold.runtime.hooks import is_sharded

#: Optimizers of `optim=` that step inside the backward pass: by name, and by the end of the name.
_IN_BACKWARD = ("lomo", "adalomo")
_LAYERWISE = "_layerwise"
#: Environment variables of `accelerate launch` that ask for another engine.
_OTHERS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a ParallelismConfig",
}
#: Names of axes along which ranks have parts of each sample.
_CONTEXT = ("cp", "sp")


def refuse_arguments(args: Any, recipe: Recipe) -> None:
    """Raise ValueError or NotImplementedError for training arguments that contradict a recipe."""
    if getattr(args, "deepspeed", None) is not None:
        raise ValueError(
            "deepspeed= was given beside a recipe of Onefold: leave it out. To run a script by its"
            " DeepSpeed configuration, use transformers.Trainer under `python -m"
            " onefold.deepspeed`."
        )
    if getattr(args, "fsdp", None):
        raise ValueError(
            f"fsdp={args.fsdp!r} was given beside a recipe of Onefold: leave it out;"
            " Recipe.zero(stage=3) divides the same states."
        )
    for name, what in _OTHERS.items():
        if os.environ.get(name, "false").lower() in ("1", "true", "yes", "on"):
            raise ValueError(
                f"accelerate's launcher asks for {what} ({name} is set), and this Trainer has a"
                " recipe of Onefold: start it with torchrun, or choose plain multi-GPU in"
                " `accelerate config`."
            )
    if getattr(args, "parallelism_config", None) is not None:
        raise NotImplementedError(
            "parallelism_config= is for accelerate's FSDP and DeepSpeed: leave it out. In place of"
            " tp_size and dp_replicate_size, load the model with onefold.hf.from_pretrained(...,"
            " distributed_config=...) (or give the recipe shard_group=). In place of cp_size and"
            " sp_size, call onefold.shard(model, recipe, mesh=..., data=...) before the Trainer is"
            " made, with the axis of context parallelism in data."
        )
    if recipe.reduce_op == "sum":
        raise ValueError(
            'the recipe has reduce_op="sum", and Trainer multiplies its loss by the number of ranks'
            " for engines that take the mean: gradients would be that many times too large. Leave"
            " reduce_op= out: the loss is divided by the number of tokens on all ranks anyway."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"this process sees {args.n_gpu} GPUs and no launcher, so that Trainer would copy the"
            " model to each with DataParallel. Start one process a GPU: torchrun --nproc-per-node"
            f" {args.n_gpu} script.py."
        )
    if args.auto_find_batch_size:
        raise NotImplementedError(
            "auto_find_batch_size=True starts over after a rank has run out of memory, while the"
            " others wait for it in a step. Leave it out; `onefold plan` says what fits."
        )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise NotImplementedError(
                f"{name}=True casts the model in place, which would cast master weights too: leave"
                " it out. With bf16=True evaluation computes in bf16."
            )
    if args.save_on_each_node:
        raise NotImplementedError(
            "save_on_each_node=True writes a folder for each node. All ranks of Onefold write one"
            " folder together: leave it out, and give an output_dir that all nodes share."
        )
    if args.optim in _IN_BACKWARD or str(args.optim).endswith(_LAYERWISE):
        raise NotImplementedError(
            f"optim={str(args.optim)!r} steps inside the backward pass, before gradients are"
            " reduced over the ranks: choose another, such as adamw_torch. The recipe's"
            " step_in_backward=True saves the same memory where states are stored on the host."
        )
    if getattr(args, "sync_ref_model", False):
        raise NotImplementedError(
            "sync_ref_model=True mixes weights into the reference model in place, which sharded"
            " models do not take: leave it out."
        )
    if recipe.step_in_backward and args.max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm={args.max_grad_norm} clips by the norm of all gradients, and the recipe"
            " steps in the backward pass, before it is known: set max_grad_norm=0, or leave"
            " step_in_backward out."
        )


def refuse_accelerator(accelerator: Any) -> None:
    """Raise ValueError if accelerate counts another number of ranks."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks != accelerator.num_processes:
        raise ValueError(
            f"torch.distributed has {ranks} ranks and accelerate counts"
            f" {accelerator.num_processes}: start with torchrun, and on machines without a GPU set"
            " use_cpu=True."
        )


def refuse_model(model: Any) -> None:
    """Raise ValueError or NotImplementedError for a model that transformers has spread over
    devices, sharded or quantized.
    """
    name = type(model).__name__
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1 or devices & {"cpu", "disk"}:
        raise ValueError(
            f"this {name} was spread over {', '.join(sorted(map(str, devices)))} by device_map=:"
            " load it without; the recipe decides where its states are stored."
        )
    if getattr(model, "_is_fsdp_managed_module", False):
        raise ValueError(
            f"transformers has applied its FSDP to this {name} while it was loaded: load it with"
            " onefold.hf.from_pretrained(..., distributed_config=...), which leaves FSDP out."
        )
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        raise NotImplementedError(
            f"this {name} was quantized while transformers loaded it: load it without"
            ' quantization_config=, and give the recipe frozen="nf4" (4 bits) or frozen="int8".'
        )


def refuse_whole_samples(model: Any) -> None:
    """Raise ValueError if ranks have parts of each sample, and Trainer's own loader is asked for."""
    mesh = onefold.engine_of(model).mesh if is_sharded(model) else None
    if mesh is None or mesh.plain:
        return
    sizes = zip(mesh.names, mesh.sizes, strict=True)
    for axis in [name for name, size in sizes if name in _CONTEXT and size > 1]:
        raise ValueError(
            f"this model is sharded over a mesh {mesh.describe()}, and Trainer's own loader gives"
            f" every rank other samples. Ranks along {axis!r} need parts of the same samples: write"
            " get_train_dataloader(), or that of the other dataset, in a subclass, as docs/context.md"
            " shows."
        )


def refuse_prompts(model: Any, args: Any) -> None:
    """Raise NotImplementedError for prompts of peft in a run that saves checkpoints."""
    kinds = [
        c.peft_type
        for c in (getattr(model, "peft_config", None) or {}).values()
        if c.is_prompt_learning
    ]
    if kinds and args.save_strategy != "no":
        raise NotImplementedError(
            f"checkpoints with prompts of peft ({kinds[0]}) cannot be written in parts: train with"
            ' save_strategy="no", then save by peft: `with onefold.full_params(model):` on every'
            " rank, and model.save_pretrained(folder) on the first."
        )


def refuse_frozen(model: Any) -> None:
    """Raise ValueError if no parameter of a model takes a gradient."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"no parameter of this {type(model).__name__} takes a gradient, so there is nothing to"
            " train: set model.requires_grad_(True) (merge_and_unload() leaves the weights frozen),"
            " or put adapters around it (PeftModel.from_pretrained(..., is_trainable=True))."
        )
