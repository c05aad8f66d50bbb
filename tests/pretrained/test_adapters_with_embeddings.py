"""Adapters of models whose embedding layers peft saves too: adapters on them, or other tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import preload, run_ranks

#: Of ranks.SERVERS.
SERVER = "libraries"

preload("peft", "transformers.models.llama.modeling_llama")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)

TOKENS = torch.arange(60, 67).reshape(1, 7)  # some that are new in a model of 70
BOTH = ["q_proj", "embed_tokens", "lm_head"]
PATTERN = r".*\.(q_proj|embed_tokens)"
#: How the model is made, and whether peft's file holds embedding layers.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "adapters on both": ({"target_modules": BOTH}, 2),
    "adapters on both, tied": ({"target_modules": BOTH, "tied": True}, 2),
    "adapters on one": ({"target_modules": BOTH[:2]}, 1),
    "adapters on one, by a pattern": ({"target_modules": PATTERN}, 1),
    "more tokens": ({"tokens": 70}, 2),
    "more tokens, tied": ({"tokens": 70, "tied": True}, 2),
    "fewer tokens": ({"tokens": 60}, 2),
    "more tokens, adapters on both": ({"tokens": 70, "target_modules": BOTH}, 2),
    "more tokens, prompts": ({"tokens": 70, "prompts": True}, 2),
    "more tokens, transformers' own": ({"tokens": 70, "own": True}, 2),
    "adapters on both, transformers' own": ({"target_modules": BOTH, "own": True}, 2),
    "more tokens, the head trained": ({"tokens": 70, "modules_to_save": ["lm_head"]}, 2),
    "new tokens trained": ({"trainable_token_indices": [3, 5]}, 0),
    "as many tokens": ({}, 0),
}


def made(
    root: Path, seed: int, tokens: int = 64, tied: bool = False, own: bool = False,
    prompts: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """The model of a folder with as many tokens as are asked for, and with adapters. The seed
    draws what is new in it.
    """
    import peft
    import transformers

    if not (folder := root / f"base {tied}").exists():
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, tie_word_embeddings=tied,
        )  # fmt: skip
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    if tokens != 64:
        model.resize_token_embeddings(tokens, mean_resizing=False)
    lora = peft.LoraConfig(
        **{"r": 3, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    )
    if prompts:
        model = peft.get_peft_model(
            model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        )
    elif own:
        model.add_adapter(lora)
    else:
        model = peft.get_peft_model(model, lora)
    torch.manual_seed(seed + 1)
    for param in model.parameters():
        if param.requires_grad:
            param.data.normal_()
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def unequal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    return sorted(ours.keys() ^ theirs.keys()) + sorted(
        n for n in ours.keys() & theirs.keys() if not torch.equal(ours[n], theirs[n])
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.eval()(TOKENS % model.config.vocab_size).logits
    return out


def saved_and_loaded(kind: str, root: Path, stages: list[int]) -> list[str]:
    import onefold

    options, _ = KINDS[kind]
    wrong, theirs = [], made(root, 1, **options)
    whole = {name: value.clone() for name, value in theirs.state_dict().items()}
    for stage in stages:
        recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
        model = onefold.shard(made(root, 1, **options), recipe)
        folder = onefold.save_adapters(model, root / f"ours {stage}")
        if options.get("prompts"):
            continue
        other = onefold.shard(made(root, 5, **options), recipe)
        assert not torch.equal(logits(other), logits(model))
        onefold.load_adapters(other, folder)
        back = dict(onefold.stream_params(other))
        wrong += [
            f"stage {stage}: {name}" for name in back if not torch.equal(back[name], whole[name])
        ]
        wrong += [f"stage {stage}: logits"] * (not torch.equal(logits(other), logits(theirs)))
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_layers_are_saved_as_by_peft_and_come_back(kind: str, tmp_path: Path) -> None:
    import peft

    options, layers = KINDS[kind]
    theirs = made(tmp_path, 1, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = tensors(tmp_path / "theirs")
    names = ("embed_tokens.weight", "embed_tokens.base_layer.weight", "lm_head.weight",
             "lm_head.base_layer.weight")  # fmt: skip
    assert sum(name.endswith(names) for name in expected) == layers
    stages = [0, 3]
    assert run_ranks(2, saved_and_loaded, kind, tmp_path, stages) == [[], []]
    for stage in stages:
        folder = tmp_path / f"ours {stage}"
        assert unequal(tensors(folder), expected) == []
        if not options.get("own"):
            base = made(tmp_path, 7, **options).get_base_model()
            if not options.get("prompts"):
                base = made(tmp_path, 7, **options).unload()
            again = peft.PeftModel.from_pretrained(base, str(folder))
            assert torch.equal(logits(again), logits(theirs))


def refused(root: Path, folder: Path) -> str:
    import onefold
    from onefold.checkpoint import CheckpointError

    before = onefold.shard(made(root, 1), onefold.Recipe.zero(3, stall_timeout=20.0))
    try:
        onefold.load_adapters(before, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_embedding_layers_of_other_tokens_are_refused(tmp_path: Path) -> None:
    made(tmp_path, 1, tokens=70).save_pretrained(tmp_path / "theirs")
    for said in run_ranks(2, refused, tmp_path, tmp_path / "theirs"):
        assert "embed_tokens.weight: (70, 16) there, (64, 16) in the model" in said
        assert "resize_token_embeddings" in said
