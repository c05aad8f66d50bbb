"""A model and data for published scripts, and what these do on the ranks of a test."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

#: Blocks of SmolLM2 that are left of its 30.
LAYERS = 2


def texts(count: int) -> list[tuple[str, str]]:
    """(topic, prose) of Python's own documentation, in plain lines."""
    from pydoc_data.topics import topics

    long = [(name, " ".join(text.split())) for name, text in sorted(topics.items())]
    return [(name, text) for name, text in long if len(text) > 1500][:count]


def prepare(folder: str) -> int:
    """SmolLM2 with fewer blocks as a folder of transformers, and data in the forms that scripts
    read; the number of parameters. Runs on one rank.
    """
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from onefold.data.text import smollm2_path

    path = smollm2_path()
    assert path is not None
    whole = gguf.GGUFReader

    @functools.lru_cache(maxsize=1)
    def first_blocks(file: str) -> Any:
        """As if the file ended there: what is cut away need not be dequantized."""
        reader = whole(file)
        reader.tensors = [
            tensor
            for tensor in reader.tensors
            if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < LAYERS
        ]
        return reader

    gguf.GGUFReader = first_blocks  # this process ends after it
    where, file = str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        where, **file, dtype=torch.float32, num_hidden_layers=LAYERS
    )
    # What remembers that it was quantized, and would refuse to be saved
    for owner in (model, model.config):
        for name in ("hf_quantizer", "quantization_method", "is_quantized", "quantization_config"):
            vars(owner).pop(name, None)
    model.float().save_pretrained(Path(folder) / "model")
    AutoTokenizer.from_pretrained(where, **file).save_pretrained(Path(folder) / "model")

    rows = texts(20)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What does Python say of {name}?"},
                {"role": "assistant", "content": text[:200]},
            ]
        }
        for name, text in rows
    ]
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"What does Python say of {name}?"}],
            "chosen": [{"role": "assistant", "content": text[:150]}],
            "rejected": [{"role": "assistant", "content": text[-150:]}],
        }
        for name, text in rows
    ]
    for name, kind in {"chats": chats, "pairs": pairs}.items():
        (Path(folder) / name).mkdir()
        for split, part in {"train": kind[:16], "test": kind[16:]}.items():
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (Path(folder) / name / f"{split}.jsonl").write_text(lines)
    return sum(p.numel() for p in model.parameters())


def run(script: str, arguments: list[str], cache: str) -> Any:
    """The script in this rank as a launcher would start it. Of a script with a Trainer: its log,
    and what the model and the ranks were to it.
    """
    import datasets
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests",
    )  # fmt: skip
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    datasets.disable_progress_bars()
    # The group is the test's: a script that ends it waits for the others instead
    dist.destroy_process_group = lambda group=None: dist.barrier()
    seen: dict[str, Any] = {}
    _watch(seen)
    sys.path.insert(0, os.path.dirname(script))
    sys.argv = [script, *arguments]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        runpy.run_path(script, run_name="__main__")
    dist.barrier()
    return seen


def left(output: Path) -> dict[str, Any]:
    """What a script wrote: the digests of its weights, names of files. The folder is removed."""
    found = {
        "files": sorted(file.name for file in output.iterdir()),
        "weights": {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in output.glob("*.safetensors")
        },
    }
    shutil.rmtree(output)
    return found


def _watch(seen: dict[str, Any]) -> None:
    """Every Trainer of this process tells what it logs; the script is as it was."""
    import transformers

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, *_: Any, model: Any, **__: Any) -> None:
            seen["ranks"] = args.world_size
            seen["sharded"] = all(hasattr(p, "onefold") for p in model.parameters())
            seen["engine"] = args.deepspeed is not None

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            for key in ("loss", "rewards/margins"):
                if key in logs:
                    seen.setdefault(key, []).append(logs[key])

    transformers.trainer.DEFAULT_CALLBACKS.append(Watch)
