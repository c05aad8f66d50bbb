"""A Llama of 1.3 billion parameters trained in a few GiB of memory: parameters, gradients, masters and moments rest on a disk.

    torchrun --nproc-per-node 2 examples/larger_than_memory.py /path/on/a/fast/disk

In fp32 its state takes 16 bytes a parameter, 21.5 GB. The model is built on the meta device and never exists whole. A unit (a block of the
model) is read from the disk ahead of its use, gathered, computed with and dropped; its gradient goes to the disk as it appears; the
optimizer's step reads, steps and writes chunk after chunk. Weights above `--tile` (the embedding and the head, 262 MB each, and the
MLPs') are computed in tiles. `--size tiny` does the same with a model of 0.7 million.
"""

import argparse
import os
import resource
import threading
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import onefold

SIZES = {
    "1.3b": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 32000},
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512},
}


class Resident:
    """The most memory that this process had in RAM at a time since `begin()`, looked at every few milliseconds, in bytes."""

    def __init__(self) -> None:
        self.most, self._end = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def _watch(self) -> None:
        while not self._end.wait(0.01):
            self.most = max(self.most, self.now())

    def end(self) -> int:
        self._end.set()
        self._thread.join()
        return max(self.most, self.now())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model whose state rests on a disk.")
    parser.add_argument("disk", help="a folder on the disk; what is written there is removed at the end")
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a rank's micro-batch")
    parser.add_argument("--lr", type=float, default=1e-4, help="AdamW's learning rate")
    parser.add_argument("--tile", default="32MB", help="a larger weight of a linear or embedding layer is computed in tiles of this size")
    given = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    before, watched = Resident.now(), Resident()

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[given.size], tie_word_embeddings=False, max_position_embeddings=given.tokens)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    recipe = onefold.Recipe.zero(stage=3, offload_optimizer="nvme", offload_param="nvme", nvme=given.disk, tile=given.tile)
    model = onefold.shard(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, fused=True)
    engine = onefold.engine_of(model)

    generator = torch.Generator().manual_seed(rank)
    words = torch.randint(config.vocab_size, (1, given.tokens), generator=generator)  # one text, to be learned by heart
    for step in range(given.steps):
        begun = time.perf_counter()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {time.perf_counter() - begun:.1f} s", flush=True)

    most = torch.tensor(float(watched.end()))
    on_disk = torch.tensor(float(sum(engine.beyond.disk.now().values())))
    if dist.is_initialized():
        dist.all_reduce(most)
        dist.all_reduce(on_disk)
    if rank == 0:
        parameters = sum(entry.slot.numel for entry in engine.entries)
        print(
            f"{parameters / 1e6:,.1f} million parameters, {16 * parameters / 1e9:.2f} GB of state; "
            f"{ranks} ranks together at most {most.item() / 2**30:.2f} GiB in memory ({before / 2**30:.2f} a rank before the model), "
            f"{on_disk.item() / 1e9:.2f} GB on the disk"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
