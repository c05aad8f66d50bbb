"""Your own loop in twenty lines: a tiny GPT on one text, its training state divided among the
ranks.

torchrun --nproc-per-node 2 examples/own_loop.py        (or plain python: one rank)
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import onefold


class TinyGPT(nn.Module):
    def __init__(
        self, vocabulary: int = 256, width: int = 64, layers: int = 2, length: int = 64
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        ]
        self.blocks, self.out = nn.ModuleList(block), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.out(x)


def main(steps: int = 30, stage: int = 3) -> list[float]:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage=stage))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(b"to be, or not to be, that is the question. " * 50))
    losses = []
    for step in range(steps):
        starts = torch.randint(
            0, len(text) - 65, (4,), generator=torch.Generator().manual_seed(1000 * step + rank)
        )
        rows = torch.stack([text[s : s + 65] for s in starts.tolist()])
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if rank == 0:
        print(f"stage {stage}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
