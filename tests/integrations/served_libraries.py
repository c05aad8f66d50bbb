"""Imported by a fork server: the name deepspeed is served, and what published scripts import is
there. Each rank that is forked from it starts as under `python -m onefold.deepspeed`.
"""

from __future__ import annotations

import onefold.deepspeed

onefold.deepspeed.serve(say=False)

import accelerate
import datasets
import peft
import transformers
from gguf import GGUFReader
from transformers import AutoTokenizer, LlamaForCausalLM, Trainer
from trl import DPOTrainer, SFTTrainer

import onefold.lightning

__all__ = [
    "AutoTokenizer", "DPOTrainer", "GGUFReader", "LlamaForCausalLM", "SFTTrainer", "Trainer",
    "accelerate", "datasets", "onefold", "peft", "transformers",
]  # fmt: skip
