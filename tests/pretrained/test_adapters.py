"""Adapters alone, and what they bring besides: modules saved whole, biases, embedding
layers. They are saved and merged as peft does with the same model unsharded, and come back.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import onefold
from needed import skip_without
from on_ranks import on_ranks, slow
from reference import differences

skip_without("peft")
SERVER = "libraries"

TOKENS = torch.arange(60, 67).reshape(1, 7)  # some that are new in a model of 70
BOTH = ["q_proj", "embed_tokens", "lm_head"]
#: How the model is made; what is merged too; of how many embedding layers peft's file has weights.
KINDS: dict[str, tuple[dict[str, Any], bool, int]] = {
    "plain": ({}, True, 0),
    "whole modules": ({"modules_to_save": ["lm_head", "embed_tokens"]}, True, 0),
    "biases": ({"bias": "all"}, True, 0),
    "lora's biases": ({"bias": "lora_only"}, True, 0),
    "transformers' own": ({"own": True, "modules_to_save": ["lm_head"]}, False, 0),
    "adapters on both": ({"target_modules": BOTH}, False, 2),
    "adapters on both, tied": ({"target_modules": BOTH, "tied": True}, False, 2),
    "adapters on one, by a pattern": ({"target_modules": r".*\.(q_proj|embed_tokens)"}, False, 1),
    "more tokens": ({"tokens": 70}, False, 2),
    "more tokens, tied": ({"tokens": 70, "tied": True}, False, 2),
    "fewer tokens": ({"tokens": 60}, False, 2),
    "more tokens, transformers' own": ({"tokens": 70, "own": True}, False, 2),
    "more tokens, the head trained": ({"tokens": 70, "modules_to_save": ["lm_head"]}, False, 2),
    "new tokens trained": ({"trainable_token_indices": [3, 5]}, False, 0),
}

IN_CI = ("whole modules", "biases", "adapters on both, tied", "more tokens, transformers' own")


def recipe(stage: int = 3) -> onefold.Recipe:
    return onefold.Recipe.zero(stage, stall_timeout=20.0)


def base(folder: Path, tied: bool = False, device: str = "cpu") -> Any:
    """The model of `folder`/base, which is written if it is not there; without memory on "meta".
    Collective.
    """
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip
    if dist.get_rank() == 0 and not (folder / "base").exists():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        for parameter in model.parameters():
            parameter.data.add_(0.125)  # norms that are not all ones
        model.save_pretrained(folder / "base")
    dist.barrier()
    if device == "meta":
        with torch.device("meta"):
            return transformers.LlamaForCausalLM(config)
    return transformers.LlamaForCausalLM.from_pretrained(folder / "base")


def made(
    folder: Path, seed: int | None, tokens: int = 64, tied: bool = False, own: bool = False,
    prompts: bool = False, device: str = "cpu", **options: Any,
) -> Any:  # fmt: skip
    """The model with adapters. The seed draws what is new in it; without one, peft does."""
    import peft

    model = base(folder, tied, device)
    torch.manual_seed(seed or 0)
    if tokens != 64:
        model.resize_token_embeddings(tokens, mean_resizing=False)
    given = {"r": 3, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    config: Any = peft.LoraConfig(**{**given, **options})
    if prompts:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    if own:
        model.add_adapter(config)
    else:
        model = peft.get_peft_model(model, config)
    for parameter in model.parameters() if seed is not None else ():
        if parameter.requires_grad:
            parameter.data.normal_()
    return model


def tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    dist.barrier()
    return load_file(folder / "adapter_model.safetensors")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(TOKENS % model.config.vocab_size).logits
    return out


def streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in onefold.stream_params(model, **options)}


@on_ranks(2)
@pytest.mark.parametrize(
    "kind", [kind if kind in IN_CI else pytest.param(kind, marks=slow) for kind in KINDS]
)
def test_adapters_are_saved_as_by_peft_merged_and_come_back(kind: str, folder: Path) -> None:
    import peft
    import transformers

    options, merges, layers = KINDS[kind]
    theirs = made(folder, 1, **options)
    if dist.get_rank() == 0:
        theirs.save_pretrained(folder / "theirs")
    expected = tensors(folder / "theirs")
    names = (".weight", ".base_layer.weight")
    of_layers = tuple(layer + name for layer in ("embed_tokens", "lm_head") for name in names)
    assert layers in (0, sum(name.endswith(of_layers) for name in expected))
    whole = {name: value.clone() for name, value in theirs.state_dict().items()}
    for stage in (0, 3):
        model = onefold.shard(made(folder, 1, **options), recipe(stage))
        out = onefold.save_adapters(model, folder / f"ours {stage}")
        assert not differences(expected, tensors(out))
        first, second = (json.loads((f / "adapter_config.json").read_text()) for f in (out, folder / "theirs"))  # fmt: skip
        for config in (first, second):
            config["target_modules"] = sorted(config.get("target_modules") or [])
        assert first == second or options.get("own")
        other = onefold.shard(made(folder, 5, **options), recipe(stage))
        assert not torch.equal(logits(other), logits(model))
        onefold.load_adapters(other, out)
        back = streamed(other)
        assert not differences({name: whole[name] for name in back}, back)
        assert torch.equal(logits(other), logits(theirs))
        if not options.get("own") and options.get("bias") is None:
            again = peft.PeftModel.from_pretrained(made(folder, 7, **options).unload(), str(out))
            assert torch.equal(logits(again), logits(theirs))
        if merges:
            given = streamed(model, merge_adapters=True)
            merged = made(folder, 1, **options).merge_and_unload().state_dict()
            assert not differences(merged, given, 1e-6, 1e-6)
            for name, size in (("whole", 1 << 30), ("small", 4096)):
                place = folder / f"merged {stage} {name}"
                onefold.pretrained.export_merged(model, place, max_shard_bytes=size)
                dist.barrier()
                opened = transformers.AutoModelForCausalLM.from_pretrained(place)
                assert not differences(opened.state_dict(), given, 1e-6, 1e-6)
                torch.testing.assert_close(logits(opened), logits(theirs), rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_adapters_on_a_base_read_in_parts_begin_as_pefts_and_train_alone(folder: Path) -> None:
    theirs = base(folder).state_dict()
    model = onefold.shard(made(folder, None, device="meta"), recipe(), weights=folder / "base")
    before = onefold.full_state_dict(model)
    for name, value in before.items():
        if "lora_" in name:  # B·A begins at 0
            assert bool(value.any()) == ("lora_A" in name), name
        else:
            plain = name.removeprefix("base_model.model.").replace("base_layer.", "")
            assert torch.equal(value, theirs[plain]), name
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0.0)
    model(input_ids=TOKENS % 64, labels=TOKENS % 64).loss.backward()
    optimizer.step()
    after = onefold.full_state_dict(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {
        name for name in before if "lora_B" in name
    }  # A's gradient is something times 0


@on_ranks(2)
def test_what_cannot_be_is_told(folder: Path) -> None:
    import peft

    Failed = onefold.CheckpointError
    model = onefold.shard(made(folder, None), recipe())
    ours = onefold.save_adapters(model, folder / "ours")
    more = onefold.save_adapters(onefold.shard(made(folder, 1, tokens=70), recipe()), folder / "70")
    two = onefold.save_adapters(onefold.shard(made(folder, 1, r=2), recipe()), folder / "two")
    plain = onefold.shard(base(folder), recipe(0))
    dora = made(folder, None, use_dora=True, device="meta")
    ia3 = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    odd = peft.get_peft_model(base(folder, device="meta"), ia3)
    weights, prompts = folder / "base", onefold.shard(made(folder, 1, prompts=True), recipe())
    for words, call in {
        "has no adapters of peft": lambda: onefold.save_adapters(plain, folder / "out"),
        "no adapter 'other'; it has default": lambda: onefold.load_adapters(model, ours, "other"),
        "rank and targets": lambda: onefold.load_adapters(model, two),
        "no folder with adapter_model.safetensors": lambda: onefold.load_adapters(model, weights),
        r"\(70, 16\) there, \(64, 16\) in.*resize_token": lambda: onefold.load_adapters(model, more),
        r"\(PeftType.PROMPT_TUNING\) are not the model's own": lambda: onefold.save_adapters(prompts, folder / "out"),
        "save_adapters": lambda: onefold.export(model, folder / "out"),
        "starts from the base model's weights": lambda: onefold.shard(dora, recipe(), weights=weights),
        "ia3_l.*other than plain LoRA in memory": lambda: onefold.shard(odd, recipe(), weights=weights),
    }.items():  # fmt: skip
        with pytest.raises(Failed, match=f"(?s){words}"):
            call()
    meta = made(folder, None, device="meta")
    gain = torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    meta.get_base_model().register_parameter("gain", gain)  # which nothing initializes
    meta = onefold.shard(meta, recipe())
    with pytest.raises(onefold.UninitializedError, match=r"export_merged.*gain"):
        onefold.pretrained.export_merged(meta, folder / "out")
    assert not (folder / "out").exists()


@on_ranks(2)
def test_a_save_takes_some_frozen_parameters_by_name(folder: Path) -> None:
    model = onefold.shard(made(folder, 1), recipe())
    expected = made(folder, 1).state_dict()
    name = next(n for n, p in model.named_parameters() if n.endswith("embed_tokens.weight"))
    for bad in (["other.weight"], name):
        with pytest.raises(onefold.CheckpointError, match="expected True, False, or a list with"):
            onefold.save(folder / "bad", model=model, frozen=bad)
    onefold.save(folder / "some", model=model, frozen=[name])
    with onefold.full_params(model, write=True):
        for param in model.parameters():
            param.fill_(0.5)
    onefold.load(folder / "some", model=model, strict="trained")
    with pytest.raises(ValueError, match="'frozen' is not known"):
        onefold.load(folder / "some", model=model, strict="frozen")  # type: ignore[arg-type]
    kept = {n for n in expected if n == name or "lora_" in n}
    model.get_parameter(frozen := next(n for n in expected if n not in kept)).requires_grad_(True)
    with pytest.raises(onefold.CheckpointError, match=re.escape(f"missing in it ({frozen})")):
        onefold.load(folder / "some", model=model, strict="trained")
    for n, value in onefold.full_state_dict(model).items():
        assert torch.equal(value, expected[n]) == (n in kept), n
