"""The trained model on disk, in the form others read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from onefold.checkpoint.adapters import save_adapters
from onefold.checkpoint.export import export as export_model
from onefold.train.models import quiet_transformers
from onefold.train.prepare import Run


def export(run: Run, folder: Path) -> str:
    """Write the whole model to `folder`, in the masters' precision, and say what it is. Collective.

    A transformers model is saved as one (`from_pretrained` opens it); of a model of peft the
    adapters alone, which `PeftModel.from_pretrained` opens over its base; any other as safetensors
    with the names of its state dict. The folder appears under its name only when it is whole; an
    earlier one is replaced.

    Raises:
        CheckpointError: on every rank: it cannot be written.
    """
    model: Any = run.loaded.module
    if getattr(model, "peft_config", None):
        save_adapters(run.model, folder, overwrite=True)
        return "adapters"
    if run.loaded.is_transformers:
        model.config.use_cache = True
    with quiet_transformers() if run.loaded.is_transformers else contextlib.nullcontext():
        export_model(run.model, folder, "master", tokenizer=run.loaded.tokenizer, overwrite=True)
    return "Hugging Face model" if run.loaded.is_transformers else "safetensors"
