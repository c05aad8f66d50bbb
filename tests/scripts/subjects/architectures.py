"""Tiny, randomly initialized architectures of transformers, dropout and all; what they generate."""

# ruff: noqa: E501 (a row of the tables is one line)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scripts.loop import Script
from scripts.registry import ROUNDING, habit

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
#: Those that CI runs.
IN_CI = ("GPT-2", "Llama, tied", "T5", "Mamba", "Whisper", "ALBERT", "ResNet")
GENERATE = ("Llama, tied", "GPT-2", "Mamba", "T5", "BART", "Whisper")


def batch_of(kind: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int, high: int = 64) -> Tensor:
        return torch.randint(3, high, (2, length), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = tokens(10)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    makers: dict[str, Any] = {
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
    return makers[kind]()


class Architecture:
    name = ""

    def build(self) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        model_class, config_class, arguments, _ = ARCHITECTURES[self.name]
        config = getattr(transformers, config_class)(**arguments)
        return getattr(transformers, model_class)(config).train()

    def batch(self, seed: int) -> dict[str, Any]:
        return batch_of(ARCHITECTURES[self.name][3], seed)

    def optimizer(self, s: Script) -> torch.optim.Optimizer:
        return torch.optim.SGD(s.model.parameters(), lr=0.05, momentum=0.9)

    def forward(self, s: Script) -> Tensor:
        return s.model(**s.batch).loss

    def log(self, s: Script) -> None:
        """Greedy text, through forward passes and inside full_params at a length of each rank's."""
        if self.name not in GENERATE or s.step:
            return
        given = {
            k: v
            for k, v in s.batch.items()
            if k in ("input_ids", "attention_mask", "input_features")
        }
        s.module.eval()
        s.note("text", s.module.generate(**given, max_new_tokens=4, do_sample=False))
        with s.gathered():
            text = s.module.generate(**given, max_new_tokens=3 + 4 * s.rank, do_sample=False)
        s.note("text inside", text)
        s.module.train()


for _name in ARCHITECTURES:
    habit(f"transformers: {_name}", expect=ROUNDING, one=ROUNDING, rtol=1e-4, atol=1e-5, alike=True, library="transformers", slow=_name not in IN_CI)(
        type("Of", (Architecture,), {"name": _name, "__module__": __name__})
    )  # fmt: skip
