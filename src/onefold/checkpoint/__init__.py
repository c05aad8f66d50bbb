"""Checkpoints of sharded state: whole or absent, loaded at any stage on any number of ranks,
bit-equal.

    step-00000100/
      manifest.json             which tensors there are, and in which bytes of which file each element lies
      manifest.sha256           its checksum, as `sha256sum -c` reads it
      state.json                parameter groups, step counts, scheduler, scaler, data position, whatever the user gave
      rank-00000.safetensors    what rank 0 wrote, as one-dimensional pieces; and so on
      config.json, tokenizer... a transformers model's own files

There is no pickle in it. Modules: `saving`, `loading`, `checkpointer` are what people call; `parts`
collects, `apply` distributes; `tensorfile`, `manifest`, `values`, `crc`, `folder` are the format.
"""

from onefold.checkpoint.background import Background
from onefold.checkpoint.checkpointer import Checkpointer
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import latest
from onefold.checkpoint.loading import Loaded, Loading, load, load_async
from onefold.checkpoint.saving import save, save_async

__all__ = [
    "Background",
    "CheckpointError",
    "Checkpointer",
    "Loaded",
    "Loading",
    "latest",
    "load",
    "load_async",
    "save",
    "save_async",
]
