"""QLoRA: adapters of peft around a frozen base that is stored in 4 bits (nf4), once over all ranks, and
sent so.

    torchrun --nproc-per-node 2 examples/qlora.py path/to/model output        (or plain python: one rank)

The model is built without memory; `onefold.shard` reads the weights, each rank what it owns. Only
the adapters have gradients and optimizer states.
"""

import os
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import onefold


def main(source: str, output: str, steps: int = 20) -> list[float]:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
        model = get_peft_model(
            base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    recipe = onefold.Recipe.zero(stage=3, frozen="nf4")
    model = onefold.shard(model.train(), recipe, weights=source, device="cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    losses = []
    for _ in range(steps):
        tokens = torch.randint(
            0, base.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(rank)
        )
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    held = onefold.engine_of(model).memory.now()["parameters"]
    onefold.save_adapters(model, output)  # what PeftModel.from_pretrained opens
    if rank == 0:
        whole = sum(p.onefold.shape.numel() for p in model.parameters())
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; of {whole:,} parameters this rank holds"
            f" {held:,} bytes; saved in {output}"
        )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
