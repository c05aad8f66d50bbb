"""The reader of DeepSpeed configurations: what it reads, what it lists, what it refuses, and with
which sentence.
"""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.integrations.deepspeed import recipe_from
from onefold.integrations.deepspeed.config import (
    BatchSizes,
    LossScaling,
    OptimizerSpec,
    read_deepspeed,
)
from onefold.integrations.deepspeed.config.keys import SECTIONS, TOP
from onefold.recipe import Recipe

# The shape of the files found in public projects: everything "auto", floats for integers, blocks
# that are switched off.
HUGGING_FACE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": math.inf,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def refused(
    config: Any, pattern: str, error: type[Exception] = ValueError, world_size: int | None = None
) -> None:
    with pytest.raises(error, match=pattern):
        read_deepspeed(config, world_size)


def test_a_hugging_face_file_is_read_and_every_key_without_effect_is_listed() -> None:
    config = read_deepspeed(HUGGING_FACE, world_size=4)
    assert config.recipe_arguments == {"stage": 3, "precision": "bf16", "overlap": True}
    assert config.batch == BatchSizes(None, None, None)
    assert (
        config.steps_per_print is None
        and config.gradient_clipping == 1.0
        and config.loss_scaling is None
    )
    assert {path.removeprefix("zero_optimization.") for path, _ in config.without_effect} == {
        "contiguous_gradients",
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save",
    }
    assert "optimizer.params.lr" in config.left_auto and "train_batch_size" in config.left_auto
    text = "\n".join(config.notes)
    assert (
        text.count("stage3_max_live_parameters") == 1
        and "accepted, without effect" in text
        and "gradient_clipping" in text
    )


def test_a_file_without_gradient_clipping_says_that_gradients_are_clipped() -> None:
    said = "gradient_clipping is not set: gradients are clipped to norm 1.0, as in DeepSpeed 0.19.8"
    assert [n for n in read_deepspeed({}).notes if n.startswith(said)]
    for given in (0, 0.5):
        read = read_deepspeed({"gradient_clipping": given})
        assert read.gradient_clipping == given and not read.notes


def test_a_recipe_comes_out_of_a_dict_a_file_and_base64(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "overlap_comm": False}, "fp16": {"enabled": True}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    expected = Recipe.zero(2, precision="fp16", overlap=False)
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    for given in (config, str(path), path, encoded):
        assert Recipe.zero(**read_deepspeed(given).recipe_arguments) == expected
    assert recipe_from(str(path)) == expected


def test_no_file_no_json_and_doubled_keys_are_said(tmp_path: Path) -> None:
    refused(
        str(tmp_path / "absent.json"), "there is no DeepSpeed configuration at", FileNotFoundError
    )
    path = tmp_path / "a.json"
    path.write_text('{\n  "fp16": {"enabled": true},\n')
    refused(path, "not JSON.*line 3.*Nor is it Hjson.*line 3")
    path.write_text('{"fp16": {}, "fp16": {}}')
    refused(path, "'fp16' twice")
    path.write_text("[1]")
    refused(path, "holds a list")
    refused(3, "expected a dict or the path")


def test_values_take_the_forms_that_users_write() -> None:
    config = read_deepspeed(
        {
            "zero_optimization.stage": 2.0,
            "zero_optimization": {
                "reduce_bucket_size": 5e8,
                "allgather_bucket_size": math.inf,
                "prefetch_bucket_size": 0,
            },
            "bfloat16": {"enabled": True},
            "fp16.enabled": False,
            "communication_data_type": "FP32",
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    )
    assert config.recipe_arguments == {
        "stage": 2, "precision": "bf16", "prefetch": 0, "wire": "fp32", "accumulate_dtype": "fp32",
    }  # fmt: skip
    assert Recipe.zero(**config.recipe_arguments).gradients.wire is torch.float32
    assert read_deepspeed({"zero_optimization": True}).stage == 1
    assert read_deepspeed({}).recipe_arguments == {"stage": 0, "precision": None}


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        ({"zero_optimization": {"stge": 2}}, r"zero_optimization.stge: .*did you mean 'stage'"),
        ({"gradient_acumulation_steps": 2}, "did you mean 'gradient_accumulation_steps'"),
        ({"train_micro_batch_size": 2}, "did you mean 'train_micro_batch_size_per_gpu'"),
        ({"BF16": {"enabled": True}}, "did you mean 'bf16'"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'overlap_comm'"),
        ({"overlap_comm": True}, 'overlap_comm: this key belongs inside "zero_optimization"'),
        ({"zero_optimization": {"gradient_clipping": 1.0}}, "belongs at the top level"),
        ({"fp16": {"enabeld": True}}, "did you mean 'enabled'"),
        ({"optimizer": {"type": "AdmW"}}, "did you mean 'AdamW'"),
        (
            {"optimizer": {"type": "AdamW", "params": {"weigth_decay": 0.1}}},
            "did you mean 'weight_decay'",
        ),
        ({"scheduler": {"type": "WarmUpDecayLr", "params": {}}}, "did you mean 'WarmupDecayLR'"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
            "did you mean 'warmup_num_steps'",
        ),
    ],
)
def test_a_misspelt_or_misplaced_key_raises_with_the_right_one(
    config: dict[str, Any], pattern: str
) -> None:
    refused(config, pattern)


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        (
            {"zero_optimization": {"stage": 4}},
            r"zero_optimization.stage=4: expected a whole number from 0 to 3",
        ),
        (
            {"zero_optimization": {"stage": "2"}},
            "expected a whole number from 0 to 3; write 2 without quotes",
        ),
        ({"zero_optimization": {"stage": True}}, "stage=True: expected a whole number"),
        ({"zero_optimization": {"stage": 1.5}}, "did you mean 2"),
        ({"zero_optimization": 2}, "zero_optimization=2: expected an object"),
        (
            {"zero_optimization": {"overlap_comm": "true"}},
            "expected true or false; write true without quotes",
        ),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "expected a whole number above 0"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1: expected a number, 0 or more"),
        ({"gradient_clipping": math.inf}, "gradient_clipping=inf"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "set the other to false"),
        ({"fp16": {"loss_scale": math.nan}}, "fp16.loss_scale=nan"),
        ({"communication_data_type": "int8"}, "expected one of 'fp32', 'bf16', 'fp16'"),
        ({"optimizer": {"params": {}}}, "optimizer has no 'type'"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, "x"]}}}, r"betas\[1\]='x'"),
        ({"optimizer": {"type": "Lamb", "params": {}}}, "not part of torch: build it yourself"),
        ({"optimizer": {"type": "MuAdam", "params": {}}}, "pass it to initialize"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            "total_num_steps is not set",
        ),
        ({"zero_optimization.stage": 2, "zero_optimization": {"stage": 1}}, "given twice"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "set twice"),
        ({"fp16.enabled": True, "fp16": 3}, "not an object that could hold"),
    ],
)
def test_a_wrong_value_raises_with_what_was_expected(config: dict[str, Any], pattern: str) -> None:
    refused(config, pattern)


LATER: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "trains differently"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, "removed"),
]


@pytest.mark.parametrize(("config", "pattern"), LATER)
def test_a_key_of_a_later_capability_raises_if_it_asks(
    config: dict[str, Any], pattern: str
) -> None:
    refused(config, pattern, NotImplementedError)


def test_a_key_of_a_later_capability_that_asks_for_nothing_is_no_matter() -> None:
    config = read_deepspeed(
        {
            "zero_optimization": {
                "stage": 1, "offload_optimizer": {"device": "none"}, "offload_param": {}, "zero_hpz_partition_size": 1,
                "zero_quantized_gradients": False, "cpu_offload": False, "mics_shard_size": -1,
            },
            "amp": {"enabled": False}, "sparse_gradients": False, "elasticity": None,
            "torch_autocast": {"enabled": False},
        }
    )  # fmt: skip
    assert config.without_effect == () and config.unknown == ()


def test_the_keys_of_zeropp_become_groups_and_codecs() -> None:
    zero = {
        "stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True,
        "zero_quantized_nontrainable_weights": True,
    }  # fmt: skip
    recipe = recipe_from({"zero_optimization": zero})
    assert recipe == Recipe.zero(
        3, second_copy=True, group=2, gather_codec="int8", reduce_codec="int4", frozen="int8"
    )
    assert recipe_from(
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    ) == Recipe.zero(3, gather_codec="int8")
    below = read_deepspeed({"zero_optimization": {**zero, "stage": 2}})
    assert len(below.without_effect) == 4 and "stage 3 only" in below.without_effect[0][1]
    assert recipe_from({"zero_optimization": {**zero, "stage": 2}}) == Recipe.zero(2)


@pytest.mark.parametrize(
    ("zero", "more", "pattern"),
    [
        (
            {"zero_hpz_partition_size": 3},
            {},
            r"zero_hpz_partition_size=3 does not divide 4 ranks: choose 1, 2, 4\.",
        ),
        (
            {"zero_hpz_partition_size": math.inf},
            {},
            "zero_hpz_partition_size=inf: expected a whole number",
        ),
        (
            {"zero_quantized_gradients": True},
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "leave grad_accum_dtype out",
        ),
        (
            {"zero_quantized_nontrainable_weights": True, "offload_param": {"device": "cpu"}},
            {},
            "leave one of them out",
        ),
    ],
)
def test_keys_of_zeropp_that_cannot_be_are_refused_in_the_files_words(
    zero: dict[str, Any], more: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(ValueError, match=pattern):
        read_deepspeed({"zero_optimization": {"stage": 3, **zero}, **more}, world_size=4)
    below = {**zero, "stage": 2, "zero_hpz_partition_size": 3}  # where they do nothing
    assert read_deepspeed({"zero_optimization": below, **more}, world_size=4).without_effect


def test_unknown_keys_are_listed_and_comments_are_no_misspellings() -> None:
    config = read_deepspeed(
        {"my_project": {"x": 1}, "comment": "c", "_stage": 1, "zero_optimization": {"speed": 9}}
    )
    assert config.unknown == ("my_project", "comment", "_stage", "zero_optimization.speed")
    assert any(note.startswith("unknown, without effect: my_project") for note in config.notes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((32, 4, 2), (32, 4, 2)),
        ((32, 4, None), (32, 4, 2)),
        ((32, None, 2), (32, 4, 2)),
        ((None, 4, 2), (32, 4, 2)),
        ((32, None, None), (32, 8, 1)),
        ((None, 8, None), (32, 8, 1)),
        ((None, None, 2), (None, None, 2)),
    ],
)
def test_batch_sizes_fill_each_other_in(
    given: tuple[int | None, ...], expected: tuple[int | None, ...]
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {
        name: value if value is not None else "auto"
        for name, value in zip(names, given, strict=True)
    }
    assert read_deepspeed(config, world_size=4).batch == BatchSizes(*expected)
    assert read_deepspeed(config).batch == BatchSizes(*given), (
        "without a world size nothing may be derived"
    )


@pytest.mark.parametrize(
    ("train", "micro", "steps"),
    [(33, 4, 2), (33, 4, None), (33, None, 2), (2, None, None), (2, 4, None)],
)
def test_batch_sizes_that_do_not_fit_raise_with_the_rule(
    train: int, micro: int | None, steps: int | None
) -> None:
    config = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    refused(config, re.escape("x gradient_accumulation_steps x 4 ranks"), world_size=4)


@pytest.mark.parametrize(
    ("type_", "params", "name", "expected"),
    [
        ("Adam", {}, "AdamW", {"weight_decay": 0.0, "fused": True}),
        (
            "Adam",
            {"adam_w_mode": False, "weight_decay": 0.1},
            "Adam",
            {"weight_decay": 0.1, "fused": True},
        ),
        ("AdamW", {"adam_w_mode": False}, "AdamW", {"weight_decay": 0.0, "fused": True}),
        ("AdamW", {"torch_adam": True, "lr": 1e-3}, "AdamW", {"lr": 1e-3, "foreach": None}),
        ("AdamW", {"foreach": True}, "AdamW", {"foreach": True, "weight_decay": 0.0}),
        (
            "Adam",
            {"betas": [0.9, 0.95], "bias_correction": True},
            "AdamW",
            {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True},
        ),
        ("SGD", {"lr": 1, "momentum": 0.9}, "SGD", {"lr": 1.0, "momentum": 0.9}),
        ("adagrad", {"lr": 0.1}, "Adagrad", {"lr": 0.1}),
    ],
)
def test_adam_means_adamw_as_in_deepspeed(
    type_: str, params: dict[str, Any], name: str, expected: dict[str, Any]
) -> None:
    spec = read_deepspeed({"optimizer": {"type": type_, "params": params}}).optimizer
    assert spec == OptimizerSpec(name, expected, type_)


def test_loss_scaling_has_deepspeeds_defaults_and_counts_only_under_fp16() -> None:
    assert read_deepspeed({"fp16": {"enabled": True}}).loss_scaling == LossScaling(
        0.0, 16, 1000, 2, False, 1.0
    )
    given = {
        "enabled": True,
        "loss_scale": 128,
        "initial_scale_power": 8,
        "hysteresis": 1,
        "min_loss_scale": 4,
        "auto_cast": False,
    }
    config = read_deepspeed({"fp16": given})
    assert config.loss_scaling == LossScaling(128.0, 8, 1000, 1, False, 4.0)
    assert config.recipe_arguments["cast_inputs"] is False and config.skip_nonfinite
    assert read_deepspeed({"fp16": {"enabled": False, "loss_scale": 128}}).loss_scaling is None
    assert not read_deepspeed(
        {"bf16": {"enabled": True, "check_grad_overflow": False}}
    ).skip_nonfinite


def test_a_recipe_says_what_of_the_file_is_not_part_of_it() -> None:
    notes = read_deepspeed({"optimizer": {"type": "Adam"}, "gradient_clipping": 1.0}).recipe_notes
    assert notes[-1].startswith("not part of a recipe: optimizer, gradient_clipping;")


def test_no_key_is_in_two_classes_and_every_section_is_in_the_table() -> None:
    for section in (TOP, *SECTIONS.values()):
        for name, key in section.items():
            assert not (key.inert and key.later), name
    assert all(TOP[name].kind == "section" for name in SECTIONS)
