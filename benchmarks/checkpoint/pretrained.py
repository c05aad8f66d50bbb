"""One rank of a turn that opens a Hugging Face folder as a sharded model, started by
`launch.run_ranks`.

The folder holds a Llama of about the size of the benchmark's GPT with random weights in fp32,
written once for all turns.
"""

from __future__ import annotations

import copy
import gc
import importlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import probes
from benchmarks.checkpoint import disk
from benchmarks.checkpoint.settings import Turn

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "gpt-110m": (768, 2048, 12, 12, 32_000),
    "gpt-1b": (2048, 5632, 22, 16, 32_000),
    "gpt-tiny": (64, 128, 2, 4, 512),
}
"""Llamas in place of the benchmark's GPTs of these names: width, feed-forward, layers, heads, words."""

INTERVAL = 0.005
"""Seconds between two looks at this process's memory."""


def write_folder(folder: Path, name: str) -> int:
    """Make the folder; bytes of its weights."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    width, forward, layers, heads, words = SHAPES[name]
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=words,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    disk.flush(folder)
    return sum(path.stat().st_size for path in disk.files(folder) if path.suffix == ".safetensors")


class Watch:
    """The largest anonymous memory of this process while it lasts: resident pages that no file
    stands behind, MiB.

    What a library maps from a file counts as resident too although the kernel can take it back at
    any time; this does not count it.
    """

    def __init__(self) -> None:
        self.peak = self.rest = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @staticmethod
    def _now() -> float:
        return probes.own_bytes() / 2**20

    def _look(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.peak = max(self.peak, self._now())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._now())


class Opener:
    """The ways to open a folder as a sharded model."""

    def __init__(self, way: str) -> None:
        self.transformers: Any = importlib.import_module("transformers")
        names = ("fsdp", "checkpoint", "checkpoint.state_dict")
        if way.startswith("onefold"):
            self.onefold: Any = importlib.import_module("onefold")
        else:
            self.fsdp, self.dcp, self.state = (
                importlib.import_module(f"torch.distributed.{name}") for name in names
            )
        self.open = {
            "onefold-weights": self._onefold_weights,
            "onefold-rank0": self._onefold_rank0,
            "fsdp2-every": self._fsdp2_every,
            "fsdp2-rank0": self._fsdp2_rank0,
            "fsdp2-stream": self._fsdp2_stream,
        }[way]

    def _read(self, folder: Path) -> nn.Module:
        model: nn.Module = self.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        return model.train()

    def _empty(self, folder: Path) -> nn.Module:
        config = self.transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: nn.Module = self.transformers.AutoModelForCausalLM.from_config(config)
        return model.train()

    def _onefold_weights(self, folder: Path) -> nn.Module:
        return self.onefold.shard(self._empty(folder), self.onefold.Recipe.zero(3), weights=folder)

    def _onefold_rank0(self, folder: Path) -> nn.Module:
        model = self._read(folder) if dist.get_rank() == 0 else self._empty(folder)
        return self.onefold.shard(model, self.onefold.Recipe.zero(3), device="cpu")

    def _divided(self, model: Any) -> nn.Module:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            self.fsdp.fully_shard(layer, mesh=mesh)
        return self.fsdp.fully_shard(model, mesh=mesh)

    def _fsdp2_every(self, folder: Path) -> nn.Module:
        return self._divided(self._read(folder))

    def _fsdp2_empty(self, folder: Path) -> Any:
        model: Any = self._divided(self._empty(folder))
        model.to_empty(device="cpu")
        rotary = model.model.rotary_emb  # its buffer is in no file
        fresh = type(rotary)(config=copy.deepcopy(model.config))
        for name, buffer in fresh.named_buffers():
            rotary.get_buffer(name).copy_(buffer)
        return model

    def _fsdp2_rank0(self, folder: Path) -> nn.Module:
        whole = self._read(folder).state_dict() if dist.get_rank() == 0 else {}
        model = self._fsdp2_empty(folder)
        options = self.state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        self.state.set_model_state_dict(model, whole, options=options)
        return model

    def _fsdp2_stream(self, folder: Path) -> nn.Module:
        model = self._fsdp2_empty(folder)
        states = self.state.get_model_state_dict(model)
        self.dcp.load(states, storage_reader=self.dcp.HuggingFaceStorageReader(str(folder)))
        self.state.set_model_state_dict(model, states)
        return model


def _loss(model: nn.Module) -> float:
    """The loss of the same few tokens everywhere, fixed by the weights alone."""
    ids = torch.arange(64).remainder(500).view(1, -1)
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def open_turn(turn: Turn, folder: Path, toy: Path) -> dict[str, Any]:
    """Open the folder once, from the disk. Memory in MiB beyond what the libraries take."""
    opener = Opener(turn.peer)
    _loss(opener.open(toy))
    gc.collect()
    probes.give_back_free_heap()
    if dist.get_rank() == 0:
        disk.evict(folder)
    dist.barrier()
    resettable, rest = probes.reset_peak(), probes.resident_mib()
    with Watch() as watch:
        before, begun = probes.moved_bytes(), time.perf_counter()
        model = opener.open(folder)
        mine = time.perf_counter() - begun
        dist.barrier()
        # With the slowest rank: a model is open when every rank has it
        seconds = time.perf_counter() - begun
    peak = probes.difference(probes.peak_resident_mib(), rest) if resettable else None
    moved = probes.moved_since(before)
    gc.collect()
    probes.give_back_free_heap()
    stays = probes.difference(probes.resident_mib(), rest)
    found = {"seconds": seconds, "own_s": mine, "peak_mib": peak, "stays_mib": stays, **moved}
    return {**found, "own_peak_mib": watch.peak - watch.rest, "loss": _loss(model)}


def prepare(job: dict[str, Any]) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What this rank measured in the job's turn, or the bytes of the folders that it wrote."""
    folder, toy = Path(job["folder"]), Path(job["toy"])
    if job["turn"] is None:
        return {
            "bytes": write_folder(folder, job["setting"]["model"]),
            "toy_bytes": write_folder(toy, "gpt-tiny"),
        }
    return {"rank": dist.get_rank(), **open_turn(Turn(**job["turn"]), folder, toy)}
