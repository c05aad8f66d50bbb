"""A DeepSpeed configuration as people write it: which recipe it is, what becomes of each key, and
what is refused with which words. One table each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import onefold
from ds.engines import adam, json_of, made, served
from on_ranks import on_ranks
from onefold.cli.app import app
from onefold.deepspeed import recipe_from
from reference import built
from zoo import TinyMLP

CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    """A configuration with these keys of "zero_optimization"; `aio` goes beside it."""
    aio = {"aio": keys.pop("aio")} if "aio" in keys else {}
    return {"zero_optimization": {"stage": stage, **keys}, **aio, "gradient_clipping": 1.0}


# -- recipes ---------------------------------------------------------------------------------------

#: The keys of ZeRO++.
QUANTIZED = {
    "zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True,
    "zero_quantized_nontrainable_weights": True,
}  # fmt: skip
#: (a configuration, the arguments of `Recipe.zero` that it stands for; the stage is 3 without one)
RECIPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"stage": 0}),
    ({"zero_optimization": {"stage": "2"}}, {"stage": 2}),
    ({"zero_optimization": {"stage": 2.0, "reduce_bucket_size": 5e8, "prefetch_bucket_size": 0},
      "bfloat16": {"enabled": True}, "communication_data_type": "FP32",
      "data_types": {"grad_accum_dtype": "fp32"}},
     {"stage": 2, "precision": "bf16", "prefetch": 0, "wire": "fp32", "accumulate_dtype": "fp32"}),
    ({**zero(2, overlap_comm=False), "fp16": {"enabled": True}}, {"stage": 2, "precision": "fp16", "in_flight": 0}),
    (zero(overlap_comm=False), {"prefetch": 0, "in_flight": 0}),
    ({**zero(1), "fp16": {"enabled": True, "auto_cast": False}}, {"stage": 1, "precision": "fp16", "cast_inputs": False}),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "optimizer": adam()},
     {"stage": 0, "precision": "bf16", "master_dtype": "bf16", "moments": "fp32"}),
    (zero(offload_optimizer=CPU), {"offload_optimizer": "cpu"}),
    (zero(0, offload_optimizer=CPU), {"stage": 0, "offload_optimizer": "cpu"}),
    (zero(offload_optimizer=CPU, offload_param=CPU), {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    (zero(offload_optimizer=NVME, offload_param={"device": "nvme", "nvme_path": "/other"}),
     {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": ["/nvme", "/other"]}),
    (zero(cpu_offload=True, cpu_offload_param=True), {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    (zero(offload_optimizer={"device": "none", "pin_memory": True}, offload_param={}), {}),
    (zero(2, offload_optimizer=CPU, offload_param=CPU), {"stage": 2, "offload_optimizer": "cpu"}),
    (zero(offload_optimizer=NVME, sub_group_size=10_000_000), {"offload_optimizer": "nvme", "nvme": ["/nvme"], "chunk": 9_998_336}),
    (zero(offload_optimizer=NVME, sub_group_size=math.inf), {"offload_optimizer": "nvme", "nvme": ["/nvme"]}),
    (zero(**QUANTIZED), {"second_copy": True, "group": 2, "gather_codec": "int8", "reduce_codec": "int4", "frozen": "int8"}),
    (zero(zero_quantized_weights=True), {"gather_codec": "int8"}),
    (zero(2, **QUANTIZED), {"stage": 2}),
    # Keys of capabilities that are not built, which ask for nothing
    ({**zero(1, zero_hpz_partition_size=1, zero_quantized_gradients=False, cpu_offload=False, mics_shard_size=-1),
      "amp": {"enabled": False}, "sparse_gradients": False, "elasticity": None, "torch_autocast": {"enabled": False, "dtype": "int8"},
      "msamp": {"enabled": 0}, "tensor_parallel": {"autotp_size": 1}, "inference": {"tensor_parallel": {"tp_size": 1}}},
     {"stage": 1}),
    # 0 and 1 are booleans
    ({**zero(2, overlap_comm=0, cpu_offload=1), "bf16": {"enabled": 1}},
     {"stage": 2, "in_flight": 0, "offload_optimizer": "cpu", "precision": "bf16"}),
]  # fmt: skip


def test_a_configuration_is_the_recipe_that_it_stands_for() -> None:
    for config, arguments in RECIPES:
        kept = repr(config)
        assert recipe_from(config) == onefold.Recipe.zero(**{"stage": 3, **arguments}), config
        assert repr(config) == kept, "the caller's dict is left alone"


# -- what becomes of each key ----------------------------------------------------------------------


def explained(config: Mapping[str, Any] | str, folder: Path) -> dict[str, Any]:
    """What `onefold config explain --json` tells: {"keys": [...], "refusal": ..., "remarks": ...}."""
    file = folder / "ds.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    found: dict[str, Any] = json.loads(
        CliRunner().invoke(app, ["config", "explain", str(file), "--json"]).output
    )
    return found


HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True}, "overlap_comm": True,
        "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True, "ignore_unused_parameters": False,
    },
    "gradient_clipping": "auto", "steps_per_print": math.inf, "train_batch_size": "auto", "wall_clock_breakdown": False,
}  # fmt: skip


#: (configuration, a sentence about it among the notes of its recipe; "" if there is none)
NOTES: list[tuple[dict[str, Any], str]] = [
    ({}, "gradient_clipping is not set: gradients are clipped to norm 1.0, as in DeepSpeed 0.19.8"),
    ({"gradient_clipping": 0}, ""),
    (HUGGING_FACE | {"gradient_clipping": 1.0}, "stage3_max_live_parameters"),
    ({"optimizer": {"type": "Adam"}, "gradient_clipping": 1.0}, "not part of a recipe: optimizer, gradient_clipping;"),
    ({"my_project": 1, "gradient_clipping": 0}, "unknown, without effect: my_project"),
    ({"overlap_comm": 1, "gradient_clipping": 0}, "unknown, without effect: overlap_comm"),
    (zero(offload_optimizer=NVME, offload_param={"device": "nvme", "nvme_path": "/other"}), "striped over /nvme and /other"),
    (zero(1, offload_optimizer=NVME), "keeps them on the host at stage 1"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "so they are bf16 too"),
]  # fmt: skip


def test_a_recipe_says_what_of_the_configuration_has_no_effect() -> None:
    for config, words in NOTES:
        notes = [
            note
            for note in recipe_from(config).notes
            if "not part of a recipe: gradient_clipping" not in note
        ]
        assert any(words in note for note in notes) if words else not notes, (config, notes)


# -- refused ---------------------------------------------------------------------------------------

#: (configuration, words of the sentence). NotImplementedError behind those whose words end in "!".
REFUSED: list[tuple[Any, str]] = [
    # misspelt or misplaced
    ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge=2: .*did you mean 'stage'"),
    ({"gradient_acumulation_steps": 2}, "did you mean 'gradient_accumulation_steps'"),
    ({"BF16": {"enabled": True}}, "did you mean 'bf16'"),
    ({"optimizer": {"type": "AdmW"}}, "Did you mean 'AdamW'"),
    ({"optimizer": adam(weigth_decay=0.1)}, "Did you mean 'weight_decay'"),
    (zero(offload_optimizer={"devise": "cpu"}), "did you mean 'device'"),
    # wrong values
    (zero(4), "zero_optimization.stage=4: expected less than or equal to 3"),
    ({"zero_optimization": {"stage": "two"}}, "stage='two': expected a valid integer"),
    ({"bf16": {"enabled": 2}}, r"bf16\.enabled=2: expected a valid boolean"),
    ({"bf16": True}, "bf16=True: expected a valid dictionary"),
    ({"optimizer": {"params": {}}}, "expected an object with 'type'"),
    ({"train_batch_size": 1.5}, "train_batch_size=1.5: expected a valid integer"),
    ({"gradient_clipping": -1}, "gradient_clipping=-1: expected greater than or equal to 0"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "set the other to false"),
    ({"communication_data_type": "int8"}, "expected 'fp32', 'bf16' or 'fp16'"),
    ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "dtype='int8': there is no such dtype"),
    # optimizers and schedules
    ({"optimizer": adam(max_grad_norm=1.0)}, "gradient_clipping"),
    ({"optimizer": {"type": "Lamb", "params": {}}}, "not part of torch: build it yourself"),
    ({"optimizer": {"type": "LBFGS", "params": {}}}, "looks at all parameters"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}, "total_num_steps is not set"),
    ({"scheduler": {"type": "OneCycle", "params": {}}}, r"not built: .*lr_scheduler\.OneCycleLR"),
    # tiers
    (zero(offload_optimizer={"device": "nvme"}), 'device="nvme" has no folder.*"nvme_path"'),
    (zero(offload_optimizer={**CPU, "ratio": 1.5}), "ratio=1.5: expected less than or equal to 1"),
    (zero(offload_optimizer=CPU, offload_param=NVME), "three times as many bytes.*offload_optimizer.device too"),
    (zero(cpu_offload=True, offload_optimizer=NVME), "cpu_offload means .*'nvme': remove cpu_offload"),
    (zero(offload_optimizer=NVME, aio={"use_gds": True}), "aio.use_gds=True.*passes through host memory!"),
    # ZeRO++, for four ranks
    (zero(zero_hpz_partition_size=3), r"zero_hpz_partition_size=3 does not divide 4 ranks\."),
    ({**zero(zero_quantized_gradients=True), "data_types": {"grad_accum_dtype": "bf16"}}, "leave accumulate_dtype out"),
    (zero(zero_quantized_nontrainable_weights=True, offload_optimizer=CPU, offload_param=CPU), "leave one of them out"),
    # batch sizes that do not fit, for four ranks
    *(({"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps},
       r"x gradient_accumulation_steps x 4 ranks")
      for train, micro, steps in ((33, 4, 2), (33, 4, None), (33, None, 2), (2, None, None), (2, 4, None))),
    # capabilities that are not built
    (zero(zenflow={"topk_ratio": 0.1}), "trains differently!"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel!"),
    ({"data_efficiency": {"enabled": 1}}, "data_efficiency!"),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, "removed!"),
    (3, "expected a dict or the path"),
]  # fmt: skip


def test_what_cannot_be_is_refused_in_the_words_of_the_file() -> None:
    for config, words in REFUSED:
        given = (
            {k: v for k, v in config.items() if v is not None}
            if isinstance(config, dict)
            else config
        )
        error = NotImplementedError if words.endswith("!") else ValueError
        with pytest.raises(error, match=f"(?s){words.rstrip('!')}"):
            recipe_from(given, 4)
            pytest.fail(f"{config} passes")


#: (text of a file, words of the sentence)
TEXTS = [
    ('{\n  "fp16": {"enabled": true},\n', "not JSON.*line 3"),
    ('{"fp16": {}, "fp16": {}}', "'fp16' twice"),
    ("[1]", "holds a list"),
]


def test_a_file_that_is_no_object_of_json_says_where(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    with pytest.raises(FileNotFoundError, match="there is no DeepSpeed configuration at"):
        recipe_from(str(file))
    for text, words in TEXTS:
        file.write_text(text)
        with pytest.raises(ValueError, match=f"(?s){words}"):
            recipe_from(str(file))
            pytest.fail(f"{text!r} passes")


AS_WRITTEN = """
# a comment
train_batch_size: 32     // another
zero_optimization: {
    stage: 3             /* and
                            one of two lines */
    overlap_comm: true
    offload_optimizer: {"device": "cpu"}
}
optimizer:
{
    type: AdamW
    params: {lr: 1e-3, betas: [0.9, 0.95,], eps: 0.00000001}
}
"""


def test_hjson_is_read_if_its_package_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "ds.hjson"
    file.write_text(AS_WRITTEN)
    if importlib.util.find_spec("hjson") is None:
        with pytest.raises(ValueError, match=r"(?s)not JSON.*pip install hjson"):
            recipe_from(file)
        return
    values = {key["path"]: key["value"] for key in explained(AS_WRITTEN, tmp_path)["keys"]}
    assert values == {
        "train_batch_size": 32, "zero_optimization.stage": 3, "zero_optimization.overlap_comm": True,
        "zero_optimization.offload_optimizer.device": "cpu", "optimizer.type": "AdamW",
        "optimizer.params.lr": 1e-3, "optimizer.params.betas": [0.9, 0.95], "optimizer.params.eps": 1e-8,
    }  # fmt: skip
    for text, words in (("a: 1\na: 2\n", "'a' twice"), ('{"a: 1}', "not JSON.*Nor is it Hjson")):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"(?s){words}"):
            recipe_from(file)


# -- initialize ------------------------------------------------------------------------------------


@on_ranks(1)
def test_the_served_initialize_raises_deepspeeds_errors_and_leaves_open_what_libraries_fill_in(
    folder: Path,
) -> None:
    ds = served()
    with pytest.raises(AssertionError, match="was given no model"):
        ds.initialize(config=json_of(1))
    with pytest.raises(ds.DeepSpeedConfigError, match="did you mean 'zero_optimization'"):
        ds.initialize(model=built(TinyMLP), config=json_of(1, zero_optimisation={"stage": 1}))
    for section, words in (
        ("AdamW", "='AdamW': expected"),
        ({"type": "SGD", "params": [1]}, r"\.params="),
    ):
        with pytest.raises(ds.DeepSpeedConfigError, match=f"^optimizer{words}"):
            ds.initialize(model=built(TinyMLP), config=json_of(1, optimizer=section))
    file = folder / "ds.json"
    file.write_text(json.dumps(json_of(1)))
    args = argparse.Namespace(deepspeed_config=str(file), local_rank=0)
    assert ds.initialize(args=args, model=built(TinyMLP))[0].zero_optimization_stage() == 1
    model, kept = built(TinyMLP), repr(HUGGING_FACE)
    engine, *others = ds.initialize(model=model, config=HUGGING_FACE)
    assert others == [None, None, None] and engine.module.training, "a reference model"
    assert repr(HUGGING_FACE) == kept
    model = built(TinyMLP)
    with pytest.raises(ValueError, match=r"optimizer\.params\.lr"):
        ds.initialize(model=model, model_parameters=model.parameters(), config=HUGGING_FACE)


#: (type, params, class of torch, some of its defaults)
OPTIMIZERS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("Adam", {}, "AdamW", {"weight_decay": 0.0, "fused": True}),
    (
        "Adam",
        {"adam_w_mode": False, "weight_decay": 0.1},
        "Adam",
        {"weight_decay": 0.1, "fused": True},
    ),
    ("AdamW", {"torch_adam": True, "lr": 1e-3}, "AdamW", {"lr": 1e-3, "foreach": None}),
    ("SGD", {"lr": 1, "momentum": 0.9}, "SGD", {"lr": 1.0, "momentum": 0.9}),
    ("adagrad", {"lr": 0.1}, "Adagrad", {"lr": 0.1}),
    ("Lion", {"lr": 0.01}, "Lion", {"lr": 0.01}),
]


@on_ranks(1)
def test_an_optimizer_by_name_is_torchs_with_deepspeeds_defaults() -> None:
    for kind, params, name, expected in OPTIMIZERS:
        engine = made(1, optimizer={"type": kind, "params": params})
        assert type(engine.optimizer).__name__ == name and engine.optimizer_name() == kind.lower()
        assert {key: engine.optimizer.defaults[key] for key in expected} == expected


# -- as objects ------------------------------------------------------------------------------------

#: ((batch size, micro-batch, accumulation), what they become on two ranks or the words of the error)
BATCHES: list[tuple[tuple[int | None, ...], Any]] = [
    ((32, 16, 1), (32, 16, 1)),
    ((32, 8, None), (32, 8, 2)),
    ((32, None, 2), (32, 8, 2)),
    ((None, 8, 2), (32, 8, 2)),
    ((None, 16, None), (32, 16, 1)),
    ((33, 17, 2), "train_batch_size=33, but 17 x 2 x 2 = 68"),
    ((None, None, 2), "the configuration has no batch size"),
]


@on_ranks(2)
def test_batch_sizes_follow_from_each_other() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for given, expected in BATCHES:
        config = {
            name: value for name, value in zip(names, given, strict=True) if value is not None
        }
        if isinstance(expected, str):
            with pytest.raises(AssertionError, match=re.escape(expected)):
                served().DeepSpeedConfig(config)
            continue
        read = served().DeepSpeedConfig(config)
        assert tuple(getattr(read, name) for name in names) == expected
        config["optimizer"] = adam()
        engine = served().initialize(model=built(TinyMLP), config=config)[0]
        assert engine.get_batch_info() == expected


def test_the_served_section_has_what_scripts_ask_of_buckets_and_pipelined_reads() -> None:
    from onefold.deepspeed.schema import DeepSpeedZeroConfig, DeepSpeedZeroOffloadOptimizerConfig

    assert DeepSpeedZeroConfig(reduce_bucket_size=1).reduce_bucket_size == 1
    assert not DeepSpeedZeroConfig().pipeline_loading_checkpoint
    with pytest.raises(ValueError, match="reduce_bucket_size"):
        DeepSpeedZeroConfig(reduce_bucket_size=0)
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline
    assert not DeepSpeedZeroOffloadOptimizerConfig().pipeline
