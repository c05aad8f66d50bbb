"""Reading what DeepSpeed's `engine.save_checkpoint` wrote, at ZeRO stages 1, 2 and 3, on any number
of ranks.

    folder.py    which files make up the checkpoint
    pickles.py   a file's contents through torch's safe unpickler
    shard.py     what one rank saved, in one form for all stages
    layout.py    which elements of a parameter lie where
    source.py    `DeepSpeedSource`: all of it as a `Source`

DeepSpeed itself is not needed, and nothing of it is imported or run.
"""

from onefold.integrations.deepspeed.checkpoint_reader.folder import is_deepspeed
from onefold.integrations.deepspeed.checkpoint_reader.source import DeepSpeedSource

recognizes, open_source = is_deepspeed, DeepSpeedSource

__all__ = ["DeepSpeedSource", "is_deepspeed", "open_source", "recognizes"]
