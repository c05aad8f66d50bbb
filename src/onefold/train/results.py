"""The results of a run: the saved model, and a sample of its text before and after training."""

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

#: Folder in OUTPUT that --merge writes.
MERGED = "merged"
#: A rank holds the whole model for a sample if this many times its fp32 size is free.
SPARE_TO_HOLD = 4


def prompt_of(run: Run) -> str:
    """Return the prompt that the text sample continues."""
    usual = 'The "with" statement is used to' if run.config.data == "topics" else "The"
    return run.config.prompt or usual


def sample(run: Run) -> str | None:
    """Return the model's continuation of the prompt; None if it cannot generate. Collective."""
    model: Any = run.model
    words, most = run.loaded.tokenizer, run.config.sample_tokens
    if (
        run.pipeline is not None
        or not most
        or words is None
        or not callable(getattr(model, "generate", None))
    ):
        return None
    prompt = words.encode(prompt_of(run), add_special_tokens=False)
    ids = torch.tensor([prompt], device=run.ranks.device)
    model.eval()
    try:
        # Each rank generates the same text. Blocks run uncompiled, because generation would compile
        # them anew for each sequence length.
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
    """Gather the whole model on every rank if memory is ample, else unit by unit. Collective."""
    ranks, whole = run.ranks, 4 * (run.trained + run.frozen)
    free = int(ranks.least(ranks.free_memory()))
    if free >= SPARE_TO_HOLD * whole or ranks.world_size == 1:
        return onefold.full_params(run.model)
    return onefold.keep_gathered(run.model, limit=max(1, free // 8))


def export(run: Run, folder: Path) -> str:
    """Write the model to `folder`, and return the kind of what was written. Collective.

    - A transformers model: in the Hugging Face format.
    - A peft model: its adapters alone. With --merge, also the merged model, in a folder beside it.
    - Any other model: safetensors with the names of its state dict.

    Replaces an earlier folder once the new one is complete.
    Raises CheckpointError on every rank if the folder cannot be written.
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
            run.model if run.pipeline is None else [run.model],
            folder,
            dtype or "master",
            tokenizer=run.loaded.tokenizer,
            overwrite=True,
        )
    return "safetensors" if ours else "Hugging Face model"


def saved_in(run: Run) -> torch.dtype | None:
    """Return the dtype of the saved weights: --save-dtype, or with auto the dtype of a folder's
    weights. Auto thus keeps the model's size, and a later run on it has the same --precision.
    None means the dtype of the master weights.
    """
    said: str = run.config.save_dtype
    name = run.config.model
    if said == "auto" and kind_of(name) in ("folder", "hub"):
        said = precision_of(name) or said
    return COMPUTE_DTYPES.get(said)
