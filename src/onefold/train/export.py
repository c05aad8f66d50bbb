"""The trained model on disk, in the form others read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import onefold
from onefold.train.models import quiet_transformers
from onefold.train.prepare import Run


def export(run: Run, folder: Path) -> str:
    """Write the whole model to `folder` from rank 0 and say what it is. Collective.

    A transformers model is saved as one (`from_pretrained` opens it); any other as `model.safetensors`. The folder appears
    under its name only when it is whole.
    """
    state = onefold.full_state_dict(run.model)
    kind = "Hugging Face model" if run.loaded.is_transformers else "safetensors"
    if run.ranks.is_first:
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if run.loaded.is_transformers:
            _save_transformers(run, state, unfinished)
        else:
            _save_tensors(state, unfinished)
        if run.loaded.tokenizer is not None:
            run.loaded.tokenizer.save_pretrained(str(unfinished))
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    run.ranks.wait()
    return kind


def _save_transformers(run: Run, state: dict[str, torch.Tensor], folder: Path) -> None:
    model: Any = run.loaded.module
    model.config.use_cache = True
    with quiet_transformers():
        model.save_pretrained(str(folder), state_dict=state)


def _save_tensors(state: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    # safetensors refuses tensors that share memory (tied weights): each gets its own.
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
