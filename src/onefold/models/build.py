"""Load or build `--model` as a module in fp32 with its tokenizer.

a folder                  on the meta device on every rank; `onefold.shard` reads each rank's part
a name in the hub         downloaded once on each machine, then as a folder
a package, a GGUF file    whole on rank 0, on the meta device elsewhere
a size                    initialized at random on rank 0, on the meta device elsewhere
a factory                 called on every rank; the model is used as it is returned
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.data.text import ByteTokenizer, Tokenizer, load_tokenizer, smollm2_path
from onefold.models.names import NAMED_SIZES, hub_folder, kind_of, parse_size
from onefold.plan.modules import made_by, quietly
from onefold.pretrained.weights import on_meta, read_whole
from onefold.processes.ranks import Ranks
from onefold.wording import TrainError

HEAD_WIDTH = 64


@dataclass
class Loaded:
    """A model to train.

    Attributes:
        module: the model in fp32: whole on the CPU, or on the meta device if `onefold.shard` loads
            its weights.
        tokenizer: None if the model (of a factory) takes other inputs than text.
        name: the model's name in messages.
        weights: the folder to read its weights from; None if rank 0 has them.
        notes: notes for the user on how it was loaded.
    """

    module: nn.Module
    tokenizer: Tokenizer | None
    name: str
    weights: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_transformers(self) -> bool:
        return hasattr(self.module, "save_pretrained") and hasattr(self.module, "config")


def load_model(name: str, tokenizer: str, seed: int, seq: int, empty: bool = False) -> Loaded:
    """Load or build `--model` in this process.

    Args:
        name, tokenizer: `--model` and `--tokenizer`.
        seed: the seed of random weights.
        seq: the sequence length that a model from scratch must support.
        empty: leave the parameters of a model from scratch on the meta device.

    Raises:
        TrainError: the name is unknown, or its model cannot be trained here.
    """
    kind = kind_of(name)
    if kind == "factory":
        return _from_factory(name, tokenizer, seed)
    with quiet_transformers():
        if kind == "folder":
            return _from_folder(Path(name), load_tokenizer(tokenizer, Path(name)))
        if kind in ("smollm2", "gguf"):
            path = smollm2_path() if kind == "smollm2" else Path(name)
            assert path is not None
            label = "SmolLM2-135M-Instruct" if kind == "smollm2" else path.stem
            return Loaded(_from_gguf(path), load_tokenizer(tokenizer, path), label)
        words = load_tokenizer(tokenizer, None)
        return Loaded(_from_scratch(name, len(words), seed, seq, words, empty), words, name)


def load_on_first_rank(
    name: str,
    tokenizer: str,
    seed: int,
    seq: int,
    ranks: Ranks,
    note: Callable[[str], None] = lambda line: None,
) -> Loaded:
    """Load or build `--model` with weights on rank 0 only, or on no rank, and on the meta device
    elsewhere. Collective. `onefold.shard` then gives every rank its part of rank 0's weights, or of
    the folder's. A factory is called on every rank, because only it can build its model. `note`
    tells the user of a download.
    """
    kind = kind_of(name)
    place = str(hub_folder(name, ranks, note)) if kind == "hub" else name
    load = partial(load_model, place, tokenizer, seed, seq)
    here: list[Loaded] = []

    def first() -> tuple[Any, ...]:
        here.append(load())
        module: Any = here[0].module
        beside = getattr(module, "generation_config", None)
        return type(module), module.config, beside, replace(here[0], module=nn.Identity())

    if ranks.world_size == 1 or kind in ("factory", "scratch"):
        loaded = load(empty=not ranks.is_first)
    else:
        model, config, generation, loaded = ranks.on_first(first)
        if here:
            loaded = here[0]
        else:
            with quiet_transformers(), torch.device("meta"):
                loaded.module = model(config).float().train()
            # With the same configuration, all ranks generate the same text samples
            loaded.module.generation_config = generation
            # The hub's cache of another machine may be in another place
            loaded.weights = loaded.weights and Path(place)
    return replace(loaded, name=name) if kind == "hub" else loaded


# -- models ----------------------------------------------------------------------------------------


def _from_folder(path: Path, words: Tokenizer) -> Loaded:
    """Open a folder on the meta device if its weights can be read in parts; otherwise load it whole."""
    try:
        module = on_meta(path)
        reason = read_whole(path, module)
    except CheckpointError as error:
        raise TrainError(f"--model {path}: {error}") from error
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = f"its code cannot be built without memory ({error})."
    if not reason:
        return Loaded(module, words, str(path), weights=path)
    from transformers import AutoModelForCausalLM

    try:
        whole = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise TrainError(f"--model {path}: transformers cannot open it ({error}).") from error
    note = f"the whole model is read on the first rank: {reason}"
    return Loaded(whole.train(), words, str(path), notes=(note,))


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Cache, inside the block, what transformers reads repeatedly from a GGUF file.

    transformers reads all fields once each for the configuration, the weights and the tokenizer,
    and lists the tensors' names again for every module. For a vocabulary of 49,152 words, each of
    the two takes longer than dequantizing 135 million weights.
    """
    with contextlib.ExitStack() as inside:
        if importlib.util.find_spec("gguf"):  # else transformers raises the error
            gguf: Any = importlib.import_module("gguf")
            for name in ("GGUFReader", "get_tensor_name_map"):
                once = lru_cache(maxsize=1)(getattr(gguf, name))
                inside.enter_context(mock.patch.object(gguf, name, once))
        yield


def _from_gguf(path: Path) -> nn.Module:
    """Load a GGUF file, dequantized, as an ordinary fp32 model that can be saved like any other."""
    from transformers import AutoModelForCausalLM

    with _read_once():
        module = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )
    # Remove the marks of a quantized model, with which transformers refuses to save it
    for owner, name in (
        (module, "hf_quantizer"),
        (module, "quantization_method"),
        (module, "is_quantized"),
        (module.config, "quantization_config"),
    ):
        vars(owner).pop(name, None)
    return module.float().train()


def _from_scratch(
    name: str, vocabulary: int, seed: int, seq: int, words: Tokenizer, empty: bool
) -> nn.Module:
    import transformers

    layers, width = model_shape(name, vocabulary)
    heads = width // HEAD_WIDTH
    length = max(seq, 1024)
    end = words.eos_token_id
    common: dict[str, Any] = {
        "vocab_size": vocabulary, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
    }  # fmt: skip
    build: Any
    config: Any
    if name.startswith("gpt"):
        build = transformers.GPT2LMHeadModel
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, n_positions=length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common,
        )  # fmt: skip
    else:
        # Three matrices of this width have as many parameters as GPT's two of 4·width
        hidden = max(32, round(width * 8 / 3 / 32) * 32)
        build = transformers.LlamaForCausalLM
        config = transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads,
            intermediate_size=hidden, max_position_embeddings=length, tie_word_embeddings=True, **common,
        )  # fmt: skip
    with seeded(seed), torch.device("meta" if empty else "cpu"):
        return build(config).float().train()


def model_shape(name: str, vocabulary: int) -> tuple[int, int]:
    """Return (layers, width) of a built-in model: those of a named size, or about 64 · layers wide,
    as published models are, with about the given number of parameters: 12·width² a block, and
    vocabulary·width of the tied embedding.
    """
    size = parse_size(name)
    if isinstance(size, str):
        return NAMED_SIZES[size]

    def layers(width: int) -> float:
        return max(0.0, size - vocabulary * width) / (12 * width**2)

    widths = range(HEAD_WIDTH, 8193, HEAD_WIDTH)
    width = min(widths, key=lambda width: abs(width / HEAD_WIDTH - layers(width)))
    return max(1, round(layers(width))), width


def _from_factory(name: str, tokenizer: str, seed: int) -> Loaded:
    try:
        module, own = made_by(name, seeded(seed))
    except ValueError as error:
        raise TrainError(f"--model {error}") from error
    if own is None and tokenizer == "bytes":
        # transformers is not imported: that takes longer than a small run needs to start
        own = ByteTokenizer()
    elif own is None:
        with quiet_transformers():
            own = load_tokenizer(tokenizer, None)
    return Loaded(module, own, name)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings, which every rank would print."""
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise TrainError(
            "onefold train needs transformers: pip install 'onefold[train]'."
        ) from None
    with quietly():
        yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers depend on the seed only inside, and the global generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
