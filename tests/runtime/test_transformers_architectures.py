"""Tiny, randomly initialized architectures of transformers train three steps at every stage as they
do in DDP.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from trials import Case, compare_case

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
SEQUENCE = {
    "vocab_size": 64,
    "d_model": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
         "patch_size": 4, "num_labels": 3}  # fmt: skip
#: architecture: (model class, configuration class, its arguments, kind of batch)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
              "bos_token_id": 1, "eos_token_id": 2}, "causal"),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, "causal"),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}, "causal"),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED, "causal"),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 8}, "causal"),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", {**TEXT, "num_key_value_heads": 1}, "causal"),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, "causal"),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1,
              "eos_token_id": 2}, "causal"),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1,
                "output_router_logits": True}, "causal"),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
              "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, "causal"),
    "BERT": ("BertForMaskedLM", "BertConfig", TEXT, "masked"),
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                   "position_biased_input": False, "type_vocab_size": 0}, "masked"),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 8, "num_hidden_layers": 3}, "masked"),
    "T5": ("T5ForConditionalGeneration", "T5Config", {**SEQUENCE, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}, "pairs"),
    "BART": ("BartForConditionalGeneration", "BartConfig", {**SEQUENCE, "encoder_layers": 2, "decoder_layers": 2,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
             "max_position_embeddings": 32, "forced_eos_token_id": 2}, "pairs"),
    "ViT": ("ViTForImageClassification", "ViTConfig", IMAGE, "images"),
    "ConvNext": ("ConvNextForImageClassification", "ConvNextConfig", {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2,
                 "patch_size": 2, "image_size": 16, "num_labels": 3}, "images"),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2],
               "layer_type": "basic", "num_labels": 3}, "images"),
    "Wav2Vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2,
                 "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": [8, 8], "conv_stride": [4, 4],
                 "conv_kernel": [8, 4], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
                 "mask_time_prob": 0.0, "layerdrop": 0.0, "pad_token_id": 0}, "speech"),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**SEQUENCE, "encoder_layers": 2, "decoder_layers": 2,
                "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
                "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "begin_suppress_tokens": None,
                "suppress_tokens": None}, "mels"),
    "CLIP": ("CLIPModel", "CLIPConfig", {"projection_dim": 8, "text_config": TEXT, "vision_config": IMAGE}, "image and text"),
}  # fmt: skip
#: Dropout 0.1 is everywhere in these configurations and stays: random numbers must be drawn as by
#: DDP.


class Architecture(Case):
    name = ""
    rtol, atol = 1e-4, 1e-5

    def build(self) -> nn.Module:
        import transformers

        model_class, config_class, arguments, _ = ARCHITECTURES[self.name]
        config = getattr(transformers, config_class)(**arguments)
        return getattr(transformers, model_class)(config).train()

    def batch(self, rank: int, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)

        def tokens(length: int, high: int = 64) -> Tensor:
            return torch.randint(3, high, (2, length), generator=generator)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        ids = tokens(10)
        text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "causal": lambda: {**text, "labels": ids},
            "masked": lambda: {**text, "labels": tokens(10)},
            "pairs": lambda: {**text, "labels": tokens(6)},
            "images": lambda: {
                "pixel_values": noise(4, 3, 16, 16),
                "labels": torch.tensor([0, 1, 2, 1]),
            },
            "speech": lambda: {"input_values": noise(2, 400), "labels": tokens(4, 16)},
            "mels": lambda: {"input_features": noise(2, 8, 32), "labels": tokens(5)},
            "image and text": lambda: {
                **text,
                "pixel_values": noise(2, 3, 16, 16),
                "return_loss": True,
            },
        }
        return makers[ARCHITECTURES[self.name][3]]()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def compare_architecture(name: str) -> tuple[list[str], list[float], list[str]]:
    """Differences, the reference's losses, and the units that were found."""
    import transformers

    import onefold

    transformers.logging.set_verbosity_error()
    case_class = type("Named", (Architecture,), {"name": name})
    found, reference = compare_case(case_class)
    model = onefold.shard(case_class().build(), onefold.Recipe.zero(3, stall_timeout=10.0))
    return found, reference.losses, [unit.name for unit in onefold.engine_of(model).units]


SERVER = "libraries"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_at_every_stage_as_in_ddp(name: str) -> None:
    results = run_ranks(2, compare_architecture, name, timeout=180.0)
    problems = [
        f"rank {rank}: {sentence}"
        for rank, (found, _, _) in enumerate(results)
        for sentence in found
    ]
    assert not problems, f"{name}: {len(problems)} differences:\n" + "\n".join(problems[:40])
    losses = results[0][1]
    assert all(loss == loss for loss in losses) and len(set(losses)) == len(losses), (
        f"{name}: losses {losses}"
    )
    units = results[0][2]
    assert len(units) >= 2, f"{name}: the model became one unit only: {units}"


def generated(name: str, stage: int) -> list[str]:
    """Greedy text before sharding, after it through forward passes, and inside full_params, ranks
    at lengths of their own.
    """
    import transformers

    import onefold

    transformers.logging.set_verbosity_error()
    case = type("Named", (Architecture,), {"name": name})()
    torch.manual_seed(0)
    model = case.build().eval()
    batch = case.batch(dist.get_rank(), 0)
    given = {
        key: value
        for key, value in batch.items()
        if key in ("input_ids", "attention_mask", "input_features")
    }

    def text(length: int) -> list[list[int]]:
        return model.generate(**given, max_new_tokens=length, do_sample=False).tolist()  # type: ignore[operator]

    lengths = (4, 3 + 4 * dist.get_rank())
    expected = [text(length) for length in lengths]
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0))
    problems = []
    if (seen := text(lengths[0])) != expected[0]:
        problems.append(f"through forward passes: {seen}, expected {expected[0]}")
    with onefold.full_params(model):
        seen = text(lengths[1])
    if seen != expected[1]:
        problems.append(f"inside full_params: {seen}, expected {expected[1]}")
    model.train()
    model(**batch).loss.backward()  # and training goes on
    return problems


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["Llama, tied", "GPT-2", "Mamba", "T5", "BART", "Whisper"])
def test_generation_between_steps_writes_the_same_text(name: str, stage: int) -> None:
    assert run_ranks(2, generated, name, stage) == [[], []]
