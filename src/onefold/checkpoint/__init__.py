"""Checkpoints of sharded state. A save is atomic, and a checkpoint loads bit-equal at any stage and
on any number of ranks.

    step-00000100/
      manifest.json             the list of tensors: file, position and checksum of each piece
      manifest.sha256           the manifest's checksum, as `sha256sum -c` reads it
      state.json                parameter groups, step counts, scheduler, scaler, data position, the user's `extra`
      rank-00000.safetensors    the one-dimensional pieces that rank 0 wrote; one such file per rank
      config.json, tokenizer... a transformers model's own files

A checkpoint contains no pickle.

| to read about             | modules, in the order of a call                                                          |
|---------------------------|------------------------------------------------------------------------------------------|
| a save                    | checkpointer, saving ► parts (what this rank writes), per_rank ► background               |
| a load                    | loading ► source (what can be loaded from), folder_source ► apply (into the model) |
| messages between ranks    | together, progress (how long a rank waits)                                               |
| the format                | folder (atomic rename), manifest, tensorfile, values                                     |
| errors                    | errors                                                                                   |
| torch's own checkpoints   | dcp                                                                                      |

The package `pretrained` reads and writes Hugging Face folders; the package `inspection` has the
commands on checkpoints.

A parameter's `Entry` (runtime/flat.py) says which elements each rank holds. Its flat buffer's
`Storage` (runtime/storage.py) gives access to those elements.
"""

from onefold.checkpoint.background import Background
from onefold.checkpoint.checkpointer import Checkpointer
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import latest
from onefold.checkpoint.loading import Loaded, load
from onefold.checkpoint.saving import save, save_async

__all__ = [
    "Background",
    "CheckpointError",
    "Checkpointer",
    "Loaded",
    "latest",
    "load",
    "save",
    "save_async",
]
