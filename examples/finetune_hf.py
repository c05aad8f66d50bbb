"""Fine-tune a Hugging Face model with plain PyTorch around it, generate in between, and save it for
`from_pretrained`.

    torchrun --nproc-per-node 2 examples/finetune_hf.py path/to/model output        (or plain python: one rank)

Rank 0 alone loads the weights. The other ranks build the same model on the meta device, where it
takes no memory, and `onefold.shard` hands every rank its part.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import onefold


def main(source: str, output: str, steps: int = 5) -> list[float]:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model = onefold.shard(model.train(), onefold.Recipe.zero(stage=3), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    losses = []
    for _ in range(steps):
        tokens = torch.randint(
            0, model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(rank)
        )
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    model.eval()
    # Whole parameters on every rank, for as long as this lasts
    with onefold.full_params(model), torch.no_grad():
        model.generate(
            input_ids=tokens[:1, :4],
            attention_mask=torch.ones(1, 4),
            max_new_tokens=4,
            do_sample=False,
        )
    state = onefold.full_state_dict(model)  # whole on rank 0, {} elsewhere
    if rank == 0:
        model.save_pretrained(output, state_dict=state)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, saved in {output}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
