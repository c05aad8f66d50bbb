"""Room `pretrained`: read shards from models in Hugging Face's format, and write them back, without
a whole model on any rank.

| to read about                   | modules, in the order of a call                                      |
|---------------------------------|----------------------------------------------------------------------|
| loading a Hugging Face folder   | huggingface ► hf_names (rows of which tensor); weights               |
| exporting one                   | export                                                               |
| adapters of peft                | adapters; merged: adapters added to the base model's weights         |
| whole tensors, to other engines | whole_tensors                                                        |

Messages between ranks and folders that appear atomically come from `onefold.checkpoint`.
"""

from onefold.pretrained.adapters import export_merged
from onefold.pretrained.weights import on_meta, read_whole

__all__ = ["export_merged", "on_meta", "read_whole"]
