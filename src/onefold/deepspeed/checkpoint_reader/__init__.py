"""Read checkpoints of DeepSpeed's `engine.save_checkpoint`, of ZeRO stages 1, 2 and 3.

    folder.py    which files make up the checkpoint
    pickles.py   a file's contents, read by torch's safe unpickler
    shard.py     the optimizer state of one rank, in one form for all stages
    layout.py    where each element of a parameter is stored
    source.py    `DeepSpeedSource`: the whole checkpoint as a `Source`

The checkpoint may be of any number of ranks. DeepSpeed is not needed: none of its code is imported
or run.
"""

from onefold.deepspeed.checkpoint_reader.folder import is_deepspeed
from onefold.deepspeed.checkpoint_reader.source import DeepSpeedSource

recognizes, open_source = is_deepspeed, DeepSpeedSource

__all__ = ["DeepSpeedSource", "is_deepspeed", "open_source", "recognizes"]
