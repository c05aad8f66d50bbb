"""Loading a model's folder onto ranks and exporting it again: seconds, peak host memory.

    python -m benchmarks exports [--shape 8b] [--ranks 8] [--against OTHER/src ...]

A model of Llama 3's shape with random weights in bf16, at stage 3 without an optimizer, is read from
a folder by `onefold.load_pretrained` and written by `onefold.export`, in fresh processes each time.
With `--against` the `src` folders of other checkouts take turns. The files are taken out of the page
cache before a load and flushed after an export.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import checkpoint, harness, launch, pages

SCHEMA = "onefold-exports/1"
#: {name: width, layers, heads, heads of keys, width inside, vocabulary}: Llama 3 8B, Llama 3.2 3B and 1B, a toy.
SHAPES = {
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "3b": (3072, 28, 24, 8, 8192, 128256),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "toy": (64, 2, 4, 2, 128, 512),
}
COLUMNS = ("source", "act", "seconds", "GB/s", "peak MiB, first rank", "largest other")


def model_of(shape: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, keys, inside, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
        intermediate_size=inside, vocab_size=vocabulary, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def make(folder: Path, shape: str, most: int = 4 << 30) -> None:
    """The folder of a model with random weights, in files of `most` bytes or so."""
    from safetensors.torch import save_file

    model, weights, held = model_of(shape), dict[str, torch.Tensor](), 0
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    files: dict[str, str] = {}
    for name, value in model.state_dict().items():
        name_of_file = f"model-{held // most:05}.safetensors"
        if weights and name_of_file not in files.values():  # a file is full
            save_file(weights, folder / max(files.values()), metadata={"format": "pt"})
            weights = {}
        weights[name], files[name] = (
            torch.randint(2**14, value.shape, dtype=torch.int16).view(torch.bfloat16),
            name_of_file,
        )
        held += value.nbytes
    save_file(weights, folder / max(files.values()), metadata={"format": "pt"})
    index = {"metadata": {"total_size": held}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of this rank and MiB beyond its rest, of the load and of the export."""
    import onefold

    source, to = Path(job["folder"]), Path(job["to"])
    recipe = onefold.Recipe.zero(3, precision="bf16", master_dtype="bf16")
    model = onefold.shard(model_of(job["shape"]), recipe)
    if not job["rank"]:
        checkpoint.evict(source)
    found: dict[str, Any] = {}
    for act in ("load", "export"):
        rest, begun = checkpoint.settled(), time.perf_counter()
        if act == "load":
            onefold.load_pretrained(model, source)
        else:
            onefold.export(model, to)
            if not job["rank"]:
                checkpoint.flush(to)
        found[act] = {"seconds": time.perf_counter() - begun, "peak_mib": checkpoint.above(rest)}
    found["bytes"] = checkpoint.nbytes_of(to)
    return found


def lines(turns: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each source and act: medians over rounds."""
    rows = []
    for source in dict.fromkeys(turn["source"] for turn in turns):
        for act in ("load", "export"):
            good = [t["ranks"] for t in turns if t["source"] == source and t["status"] == "ok"]
            if not good:
                rows.append([source, act, "failed"])
                continue
            took = median(max(rank[act]["seconds"] for rank in ranks) for ranks in good)
            first = median(ranks[0][act]["peak_mib"] for ranks in good)
            others = median(max(r[act]["peak_mib"] for r in ranks[1:] or ranks) for ranks in good)
            rate = f"{good[0][0]['bytes'] / took / 1e9:.2f}"
            rows.append([source, act, f"{took:.1f}", rate, f"{first:,.0f}", f"{others:,.0f}"])
    return rows


@harness.command(
    "exports",
    __doc__,
    rounds=1,
    ranks=(8, "ranks that read and write"),
    against=[],
    timeout=1800.0,
    shape=("8b", "whose shape", list(SHAPES)),
)
def main(options: harness.Options) -> int:
    sources = {"this": launch.ROOT / "src"}
    sources |= {path.resolve().parent.name: path for path in options.against}
    turns = []
    with tempfile.TemporaryDirectory() as place:
        (folder := Path(place, "model")).mkdir()
        make(folder, options.shape)
        for number in range(1, options.rounds + 1):
            for name, source in sources.items():
                to = Path(place, "exported")
                job = {"folder": str(folder), "to": str(to), "shape": options.shape}
                ran = launch.run_ranks(
                    "benchmarks.exports", job, options.ranks, timeout=options.timeout, source=source
                )
                checkpoint.remove(to)
                turns.append({"source": name, "round": number, **ran})
                harness.say(
                    f"round {number}  {name}: {ran['status']} {pages.essence(ran.get('error', ''))}"
                )
                harness.keep(options, SCHEMA, shape=options.shape, ranks=options.ranks, turns=turns)
    pages.show(pages.markdown([COLUMNS, *lines(turns)], left=2))
    return int(any(turn["status"] != "ok" for turn in turns))
