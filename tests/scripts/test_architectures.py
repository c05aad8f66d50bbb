"""Tiny, randomly initialized architectures of transformers train at every stage as they do in DDP,
and write the same texts between steps. Their dropout stays: random numbers are drawn as by DDP.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import looks
import onefold
from on_ranks import on_ranks
from reference import built, ddp, differences, sgd, train, weights

pytestmark = pytest.mark.slow
SERVER = "libraries"

IDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}  # fmt: skip
TEXT = {**IDS, **SMALL, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
PAIRS = {**IDS, "d_model": 16, "decoder_start_token_id": 2, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}  # fmt: skip
IMAGE = {**SMALL, "image_size": 16, "patch_size": 4, "num_labels": 3}
#: {class of transformers: (its configuration, arguments, kind of batch)}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {**IDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "causal",
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**GROUPED, "tie_word_embeddings": True}, "causal"),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 8},
        "causal",
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1, "output_router_logits": True},
        "causal",
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        {**IDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        "causal",
    ),
    "DebertaV2ForMaskedLM": (
        "DebertaV2Config",
        {
            **TEXT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        "causal",
    ),
    "AlbertForMaskedLM": (
        "AlbertConfig",
        {**TEXT, "embedding_size": 8, "num_hidden_layers": 3},
        "causal",
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {
            **IDS,
            "d_model": 16,
            "decoder_start_token_id": 2,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
        },
        "causal",
    ),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 2],
            "num_stages": 2,
            "patch_size": 2,
            "image_size": 16,
            "num_labels": 3,
        },
        "images",
    ),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 2],
            "layer_type": "basic",
            "num_labels": 3,
        },
        "images",
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {
            **PAIRS,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
        },
        "mels",
    ),
    "CLIPModel": (
        "CLIPConfig",
        {"projection_dim": 8, "text_config": TEXT, "vision_config": IMAGE},
        "image and text",
    ),
}


def make(name: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config, arguments, _ = ARCHITECTURES[name]
    return getattr(transformers, name)(getattr(transformers, config)(**arguments)).train()


def batch(name: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.randint(3, 64, (2, 10), generator=generator)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made: dict[str, dict[str, Any]] = {
        "causal": {**text, "labels": ids},
        "images": {"pixel_values": noise(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 1])},
        "mels": {"input_features": noise(2, 8, 32), "labels": ids[:, :5]},
        "image and text": {**text, "pixel_values": noise(2, 3, 16, 16), "return_loss": True},
    }
    return made[ARCHITECTURES[name][2]]


@on_ranks(2)
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_an_architecture_trains_at_every_stage_as_in_ddp(name: str) -> None:
    batches = [batch(name, 10 * step + dist.get_rank()) for step in range(3)]
    found = []
    for stage in (None, 0, 1, 2, 3):
        inner = built(lambda: make(name))
        if stage is None:
            model = ddp(inner)
        else:
            model = onefold.shard(inner, onefold.Recipe.zero(stage, stall_timeout=20.0))
            assert len(looks.units(model)) > 1
        torch.manual_seed(100)
        losses = train(model, sgd(model), batches, lambda m, b: m(**b).loss)
        found.append((losses, weights(model)))
    assert len(set(found[0][0])) == 3
    for losses, whole in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-4, abs=1e-5)
        assert not differences(found[0][1], whole, 1e-4, 1e-5)
        assert losses == found[1][0] and not differences(found[1][1], whole)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if ("LM" in n and "Masked" not in n) or "Gen" in n])  # fmt: skip
def test_generation_between_steps_writes_the_same_text(name: str, stage: int) -> None:
    model: Any = built(lambda: make(name)).eval()
    whole = batch(name, dist.get_rank())
    given = {k: v for k, v in whole.items() if k != "labels"}

    def text(length: int) -> list[list[int]]:
        return model.generate(**given, max_new_tokens=length, do_sample=False).tolist()

    own = 3 + 4 * dist.get_rank()  # ranks at lengths of their own
    expected = text(4), text(own)
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0))
    assert text(4) == expected[0]
    with onefold.full_params(model):
        assert text(own) == expected[1]
    model.train()
    model(**whole).loss.backward()
