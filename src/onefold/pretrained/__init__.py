"""Room `pretrained`: models as other libraries open them, read into shards and written out of them
without a whole one anywhere.

| to read about                   | modules, in the order of a call                                    |
|---------------------------------|--------------------------------------------------------------------|
| a Hugging Face folder, in       | huggingface ► hf_names (whose rows are whose) ► fitted; weights    |
| out                             | export (of ranks), export_folder (of a checkpoint) ► streams       |
| adapters of peft                | adapters; merged: added to their base                              |
| whole tensors, to other engines | whole_tensors                                                      |

What ranks tell each other, and the folder that is whole or absent, are those of checkpoints
(`onefold.checkpoint`).
"""

from onefold.pretrained.merged import export_merged
from onefold.pretrained.weights import on_meta, read_whole

__all__ = ["export_merged", "on_meta", "read_whole"]
