"""Adapters that bring more than B·A: whole modules, biases, adapters of transformers' own; saved
and merged as peft does with the same model unsharded.
"""

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

TOKENS = torch.arange(14).reshape(2, 7)
KINDS: dict[str, dict[str, Any]] = {
    "modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "biases": {"bias": "all"},
    "lora's biases": {"bias": "lora_only"},
    "transformers": {"own": True, "modules_to_save": ["lm_head"]},
}


def made(own: bool = False, tied: bool = False, **options: Any) -> Any:
    """A model with adapters, and random values in all that they train."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    lora = peft.LoraConfig(
        r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options
    )
    if own:
        model.add_adapter(lora)
    else:
        model = peft.get_peft_model(model, lora)
    torch.manual_seed(1)
    for param in model.parameters():
        if param.requires_grad:
            param.data.normal_()
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def unequal(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], exact: bool = True
) -> list[str]:
    """The names that one of them lacks, or where values differ."""
    close = torch.equal if exact else lambda a, b: torch.allclose(a, b, rtol=1e-6, atol=1e-6)
    both = ours.keys() & theirs.keys()
    return [
        *sorted(ours.keys() ^ theirs.keys()),
        *(n for n in both if ours[n].shape != theirs[n].shape or not close(ours[n], theirs[n])),
    ]


def saved_and_merged(kind: str, root: Path, stages: list[int]) -> dict[str, Any]:
    import onefold
    from onefold.pretrained.merged import export_merged

    theirs = made(**KINDS[kind])
    whole = {name: value.clone() for name, value in theirs.state_dict().items()}
    merged = {}
    if hasattr(theirs, "merge_and_unload"):
        merged = theirs.merge_and_unload().state_dict()
    out: dict[str, Any] = {}
    for stage in stages:
        recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
        model = onefold.shard(made(**KINDS[kind]), recipe)
        folder = onefold.save_adapters(model, root / f"adapters {stage}")
        streamed = {name: value.clone() for name, value in onefold.stream_params(model)}
        given = {n: v.clone() for n, v in onefold.stream_params(model, merge_adapters=True)}
        export_merged(model, folder, root / f"merged {stage}")
        export_merged(model, folder, root / f"merged small {stage}", max_shard_bytes=4096)
        with torch.no_grad():
            logits = model.eval()(TOKENS).logits
        out[f"{stage} streamed"] = unequal(streamed, whole)
        out[f"{stage} merged"] = unequal(given, merged, exact=False) if merged else []
        out[f"{stage} given"] = given
        out[f"{stage} logits"] = logits
        # What was saved comes back into other adapters
        other = onefold.shard(made(**KINDS[kind]), recipe)
        with onefold.full_params(other, write=True):
            for name, param in other.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    param.fill_(0.5)
        onefold.load_adapters(other, folder)
        out[f"{stage} back"] = unequal(dict(onefold.stream_params(other)), whole)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_what_adapters_bring_besides_is_saved_and_merged_as_by_peft(
    kind: str, tmp_path: Path
) -> None:
    import transformers

    theirs = made(**KINDS[kind])
    theirs.save_pretrained(tmp_path / "theirs")
    expected = tensors(tmp_path / "theirs")
    assert expected and any("lora_" not in name for name in expected)
    stages = [1, 3]
    for seen in run_ranks(2, saved_and_merged, kind, tmp_path, stages):
        for stage in stages:
            for what in ("streamed", "merged", "back"):
                assert seen[f"{stage} {what}"] == [], (stage, what)
            for folder in (f"merged {stage}", f"merged small {stage}"):
                assert unequal(tensors(tmp_path / folder), seen[f"{stage} given"], False) == []
                model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
                with torch.no_grad():
                    mine, adapted = (m.eval()(TOKENS).logits for m in (model, theirs))
                torch.testing.assert_close(mine, adapted, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(seen[f"{stage} logits"], adapted, rtol=1e-4, atol=1e-4)
    for stage in stages:
        assert unequal(tensors(tmp_path / f"adapters {stage}"), expected) == []


def saves_what_is_tied(root: Path) -> str:
    import onefold
    from onefold.checkpoint import CheckpointError

    model = onefold.shard(made(tied=True, modules_to_save=["lm_head"]), onefold.Recipe.zero(3))
    onefold.save_adapters(model, root / "adapters")
    try:
        list(onefold.stream_params(model, merge_adapters=True))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_module_that_is_saved_whole_and_was_tied_is_saved_and_not_merged(tmp_path: Path) -> None:
    for said in run_ranks(2, saves_what_is_tied, tmp_path):
        assert "is tied in the base model" in said and "tie_word_embeddings=False" in said
    made(tied=True, modules_to_save=["lm_head"]).save_pretrained(tmp_path / "theirs")
    assert unequal(tensors(tmp_path / "adapters"), tensors(tmp_path / "theirs")) == []


def chosen_frozen(root: Path) -> list[str]:
    import onefold
    from onefold.checkpoint import CheckpointError

    recipe = onefold.Recipe.zero(3, stall_timeout=20.0)
    model = onefold.shard(made(), recipe)
    name = next(n for n, p in model.named_parameters() if n.endswith("embed_tokens.weight"))
    for bad in (["other.weight"], name):
        with pytest.raises(CheckpointError, match=r"expected True, False, or a list with names"):
            onefold.save(root / "bad", model=model, frozen=bad)
    onefold.save(root / "some", model=model, frozen=[name])
    with onefold.full_params(model, write=True):
        for param in model.parameters():
            param.fill_(0.5)
    loaded = onefold.load(root / "some", model=model, strict=False)
    expected = made().state_dict()
    kept = {n for n in expected if n == name or "lora_" in n}
    assert not kept.intersection(loaded.missing)
    whole = onefold.full_state_dict(model)
    return [n for n in whole if (n in kept) != torch.equal(whole[n], expected[n])]


def test_a_save_takes_some_frozen_parameters_by_name(tmp_path: Path) -> None:
    assert run_ranks(2, chosen_frozen, tmp_path) == [[], []]
