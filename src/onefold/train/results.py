"""The result of a run: the saved model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from onefold.models.build import quiet_transformers
from onefold.models.names import kind_of, precision_of
from onefold.pretrained.adapters import export_merged, save_adapters
from onefold.pretrained.export import export as export_model
from onefold.recipe import COMPUTE_DTYPES
from onefold.train.prepare import Run

#: Folder in OUTPUT that --merge writes.
MERGED = "merged"


def export(run: Run, folder: Path) -> str:
    """Write the model to `folder`, and return the kind of what was written. Collective.

    - A transformers model: in the Hugging Face format.
    - A peft model: its adapters alone. With --merge, also the merged model, in a folder beside it.
    - Any other model: safetensors with the names of its state dict.

    Replaces an earlier folder once the new one is complete.
    Raises CheckpointError on every rank if the folder cannot be written.
    """
    model: Any = run.loaded.module
    # That of a folder's weights: the model keeps its size, and a later run on it has the same --precision
    name = run.config.model
    known = precision_of(name) if kind_of(name) in ("folder", "hub") else None
    dtype = COMPUTE_DTYPES.get(known or "")
    if getattr(model, "peft_config", None):
        save_adapters(run.model, folder, overwrite=True)
        if run.config.merge:
            model.config.use_cache = True
            merged = folder.with_name(MERGED)
            export_merged(run.model, merged, dtype, tokenizer=run.loaded.tokenizer, overwrite=True)
        return "adapters"
    ours = not run.loaded.is_transformers
    if not ours:
        model.config.use_cache = True
    with contextlib.nullcontext() if ours else quiet_transformers():
        export_model(
            run.model,
            folder,
            dtype or "master",
            tokenizer=run.loaded.tokenizer,
            overwrite=True,
        )
    return "safetensors" if ours else "Hugging Face model"
