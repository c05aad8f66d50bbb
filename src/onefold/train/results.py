"""What a run leaves: the model, and a sample of its text before and after."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.models.build import quiet_transformers
from onefold.models.names import kind_of, precision_of
from onefold.pretrained.adapters import save_adapters
from onefold.pretrained.export import export as export_model
from onefold.pretrained.merged import export_merged
from onefold.recipe import COMPUTE_DTYPES
from onefold.train.prepare import Run

#: Where --merge writes.
MERGED = "merged"
#: Times the whole model in fp32 that each rank must have free, to hold it for a sample.
SPARE_TO_HOLD = 4


def prompt_of(run: Run) -> str:
    """What the sample continues."""
    usual = 'The "with" statement is used to' if run.config.data == "topics" else "The"
    return run.config.prompt or usual


def sample(run: Run) -> str | None:
    """What the model continues the prompt with; None if it cannot generate. Collective."""
    model: Any = run.model
    words, most = run.loaded.tokenizer, run.config.sample_tokens
    if not most or words is None or not callable(getattr(model, "generate", None)):
        return None
    prompt = words.encode(prompt_of(run), add_special_tokens=False)
    ids = torch.tensor([prompt], device=run.ranks.device)
    model.eval()
    try:
        # Each rank writes the same text. Blocks run uncompiled: each length that generating goes
        # through would be compiled.
        uncompiled = torch.compiler.set_stance("force_eager")
        with _readable(run), torch.no_grad(), uncompiled:
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=most,
                do_sample=False,
                use_cache=True,
                pad_token_id=words.eos_token_id,
            )
    finally:
        model.train()
    return words.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)


def _readable(run: Run) -> contextlib.AbstractContextManager[nn.Module]:
    """The model to generate with: whole on every rank where there is ample room, else gathered unit
    by unit. Collective.
    """
    ranks, whole = run.ranks, 4 * (run.trained + run.frozen)
    free = int(ranks.least(ranks.free_memory()))
    if free >= SPARE_TO_HOLD * whole or ranks.world_size == 1:
        return onefold.full_params(run.model)
    return onefold.keep_gathered(run.model, limit=max(1, free // 8))


def export(run: Run, folder: Path) -> str:
    """Write the whole model to `folder`, and say what it is. Collective.
    A transformers model as one; of a model of peft the adapters alone (and beside them, with
    --merge, the model that they make); any other as safetensors with the names of its state dict.
    Replaces an earlier folder once the new one is whole.
    Raises CheckpointError on every rank if it cannot be written.
    """
    model: Any = run.loaded.module
    dtype = saved_in(run)
    if getattr(model, "peft_config", None):
        save_adapters(run.model, folder, overwrite=True)
        if run.config.merge:
            model.config.use_cache = True
            merged = folder.with_name(MERGED)
            export_merged(
                run.model, folder, merged, dtype, tokenizer=run.loaded.tokenizer, overwrite=True
            )
        return "adapters"
    ours = not run.loaded.is_transformers
    if not ours:
        model.config.use_cache = True
    with contextlib.nullcontext() if ours else quiet_transformers():
        export_model(
            run.model, folder, dtype or "master", tokenizer=run.loaded.tokenizer, overwrite=True
        )
    return "safetensors" if ours else "Hugging Face model"


def saved_in(run: Run) -> torch.dtype | None:
    """--save-dtype; where it is auto, what the weights of a folder are in: the model is saved as
    large as it came, and a run on it has the same --precision. None: what is stepped.
    """
    said: str = run.config.save_dtype
    name = run.config.model
    if said == "auto" and kind_of(name) in ("folder", "hub"):
        said = precision_of(name) or said
    return COMPUTE_DTYPES.get(said)
