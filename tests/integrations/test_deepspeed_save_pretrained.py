"""`save_pretrained` of transformers and peft on every rank, under the name deepspeed: what rank 0
writes stays.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks

pytest.importorskip("peft")
SERVER = "served"


def saved(folder: str) -> dict[str, list[str]]:
    """{case: names of the tensors in the file}, where rank 1 saves after rank 0 has."""
    import onefold.deepspeed

    onefold.deepspeed.serve(say=False)
    import deepspeed  # type: ignore[import-not-found]
    from peft import LoraConfig, get_peft_model
    from safetensors import safe_open
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    out = {}
    for stage in (1, 3):
        for adapted in (False, True):
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(shape)
            if adapted:
                model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
            engine, *_ = deepspeed.initialize(
                model=model,
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "zero_optimization": {"stage": stage},
                    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                },
            )
            # As accelerate.get_state_dict asks for it
            whole = (
                engine._zero3_consolidated_16bit_state_dict()
                if stage == 3
                else engine.module.state_dict()
            )
            place = Path(folder) / f"{stage}{adapted}"
            if dist.get_rank():
                dist.barrier()
            engine.module.save_pretrained(place, state_dict=whole)
            if dist.get_rank() == 0:
                dist.barrier()
            places = [place]
            if stage == 1:  # asked of the model itself, together
                places.append(Path(f"{place} itself"))
                engine.module.save_pretrained(places[1])
            dist.barrier()
            for one in places:
                with safe_open(next(one.glob("*.safetensors")), "pt") as file:
                    out[one.name] = sorted(file.keys())
    return out


def test_what_rank_0_saves_is_not_replaced_by_ranks_that_hold_nothing(tmp_path: Path) -> None:
    for seen in run_ranks(2, saved, str(tmp_path)):
        assert len(seen) == 6, json.dumps(list(seen))
        for name, keys in seen.items():
            assert len(keys) == (4 if "True" in name else 21), (name, keys)
            assert all("lora_" in key for key in keys) == ("True" in name)
