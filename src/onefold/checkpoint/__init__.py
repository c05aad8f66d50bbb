"""Checkpoints of sharded state: whole or absent, loaded at any stage on any number of ranks,
bit-equal.

    step-00000100/
      manifest.json             which tensors there are, and in which bytes of which file each element lies
      manifest.sha256           its checksum, as `sha256sum -c` reads it
      state.json                parameter groups, step counts, scheduler, scaler, data position, whatever the user gave
      rank-00000.safetensors    what rank 0 wrote, as one-dimensional pieces; and so on
      config.json, tokenizer... a transformers model's own files

There is no pickle in it.

| to read about             | modules, in the order of a call                                                          |
|---------------------------|------------------------------------------------------------------------------------------|
| a save                    | checkpointer, saving ► parts (what this rank writes), per_rank ► copying, background      |
| a load                    | loading ► source (what can be loaded from), folder_source, views ► apply (into the model)      |
| what ranks tell           | together                                                                                 |
| the format                | folder (whole or absent), manifest, tensorfile, values                                   |
| what is told              | errors                                                                                   |
| torch's own checkpoints   | dcp, dcp_interval                                                                        |

Hugging Face folders are the room `pretrained`, commands on checkpoints the room `inspection`.

Who holds what of a parameter is asked of its `Entry` (runtime/entry.py), and its elements of the
storage that they rest in (runtime/storage.py).
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
