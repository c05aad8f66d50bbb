"""Configurations as people write them (Hjson, 0 and 1), and as objects of DeepSpeed's names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onefold.integrations.deepspeed.config import explain, read_deepspeed
from onefold.integrations.deepspeed.config.hjson import HjsonError, parsed
from onefold.integrations.deepspeed.names import communication, files, groups, operators
from onefold.integrations.deepspeed.names.configuration import DeepSpeedConfig
from onefold.integrations.deepspeed.names.errors import DeepSpeedConfigError
from onefold.integrations.deepspeed.names.training import initialize
from onefold.integrations.deepspeed.names.zero_config import (
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from ranks import run_ranks

AS_WRITTEN = """
# a comment
train_batch_size: 32     // another
zero_optimization: {
    stage: 3,            /* and
                            one of two lines */
    overlap_comm: true
    offload_optimizer: {"device": "cpu"}
}
optimizer:
{
    type: AdamW
    params: {lr: 1e-3, betas: [0.9, 0.95,], eps: 0.00000001}
}
'a key': "it's", wall_clock_breakdown: false
text: words, that # go on to the end of the line
empty: null
block:
    '''
    first
      second
    '''
"""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        **more,
    }


# -- Hjson -----------------------------------------------------------------------------------------


def test_hjson_is_read_with_comments_without_quotes_and_without_commas() -> None:
    assert parsed(AS_WRITTEN) == {
        "train_batch_size": 32,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu"},
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8},
        },
        "a key": "it's",
        "wall_clock_breakdown": False,
        "text": "words, that # go on to the end of the line",
        "empty": None,
        "block": "first\n  second",
    }
    # What JSON says it says, too
    value = {"a": [1, -2.5, 'x\n"y"', None, True, {}], "b": {"c": []}}
    assert parsed(json.dumps(value)) == parsed(json.dumps(value, indent=2)) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1', "expected '}', and the text ends in line 1, column 8"),
        ("{a 1}", "expected a colon behind 'a' in line 1, column 4"),
        ('{"a: 1}', "a text in quotes has no end in its line in line 1, column 2"),
        ("a: 1\n{} x", "expected the name of a key in line 2, column 1"),
        ("{} x", "there is more behind the end of the object in line 1, column 4"),
        ("a:\n/* x", "a comment /* has no end in line 2, column 1"),
        ("a: ''' x", "a text in three quotes has no end in line 1, column 4"),
        ("{a: }", "expected a value in line 1, column 5"),
    ],
)
def test_what_is_not_hjson_says_where(text: str, said: str) -> None:
    with pytest.raises(HjsonError) as found:
        parsed(text)
    assert str(found.value) == said


def test_a_configuration_may_be_hjson_and_a_broken_one_says_both(tmp_path: Path) -> None:
    file = tmp_path / "ds.hjson"
    file.write_text("# mine\n" + "train_batch_size: 4\nzero_optimization: {stage: 2}\n")
    read = read_deepspeed(str(file), 2)
    assert read.stage == 2 and read.batch.train == 4 and read.batch.micro == 2
    file.write_text("train_batch_size: 4\ntrain_batch_size: 8\n")
    with pytest.raises(ValueError, match="'train_batch_size' twice in one object"):
        read_deepspeed(str(file))
    file.write_text('{"train_batch_size": 4')
    with pytest.raises(ValueError, match=r"is not JSON: .* Nor is it Hjson: expected '}'"):
        read_deepspeed(str(file))


# -- 0 and 1 ---------------------------------------------------------------------------------------


def test_0_and_1_are_false_and_true_wherever_a_boolean_is_meant() -> None:
    for number, value in ((0, False), (1, True)):
        given = config(
            zero_allow_untested_optimizer=number,
            wall_clock_breakdown=number,
            dataloader_drop_last=number,
            zero_optimization={"stage": 2, "overlap_comm": number, "cpu_offload": number},
            bf16={"enabled": number},
        )
        read = read_deepspeed(given, 1)
        assert read.wall_clock_breakdown is value and read.drop_last is value
        assert read.precision == ("bf16" if value else None)
        arguments = read.recipe_arguments
        assert arguments.get("overlap", True) is value
        assert arguments.get("offload_optimizer") == ("cpu" if value else None)
    read_deepspeed(config(data_efficiency={"enabled": 0}), 1)
    with pytest.raises(NotImplementedError, match="data_efficiency"):
        read_deepspeed(config(data_efficiency={"enabled": 1}), 1)
    with pytest.raises(ValueError, match=r"bf16\.enabled=2: expected true or false"):
        read_deepspeed(config(bf16={"enabled": 2}), 1)


def test_a_tag_is_compared_as_the_configuration_says_and_no_other_way() -> None:
    assert read_deepspeed(config(), 1).tag_validation == "warn"
    read = read_deepspeed(config(checkpoint={"tag_validation": "FAIL", "parallel_write": {}}), 1)
    assert read.tag_validation == "fail"
    assert [path for path, _ in read.without_effect] == ["checkpoint.parallel_write"]
    with pytest.raises(ValueError, match=r"checkpoint\.tag_validation='foo': expected one of"):
        read_deepspeed(config(checkpoint={"tag_validation": "foo"}), 1)
    keys = {k.path: k.outcome for k in explain(config(checkpoint={"tag_validation": "Warn"})).keys}
    assert keys["checkpoint.tag_validation"] == "served"


# -- objects ---------------------------------------------------------------------------------------


def batch_sizes(train: Any, micro: Any, accumulation: Any) -> Any:
    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    try:
        made = DeepSpeedConfig({k: v for k, v in given.items() if v is not None})
    except AssertionError as error:
        return str(error)
    found = (made.train_batch_size, made.train_micro_batch_size_per_gpu)
    return (*found, made.gradient_accumulation_steps)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((32, 16, 1), (32, 16, 1)),
        ((32, 8, None), (32, 8, 2)),
        ((32, None, 2), (32, 8, 2)),
        ((None, 8, 2), (32, 8, 2)),
        ((32, None, None), (32, 16, 1)),
        ((None, 16, None), (32, 16, 1)),
        ((33, 17, 2), "train_batch_size=33, but 17 x 2 x 2 = 68"),
        ((33, None, 2), "train_batch_size=33 is not divisible by 2 micro-batches"),
        ((32, 18, None), "train_batch_size=32 does not divide into micro-batches of 18"),
        ((None, None, 2), "the configuration has no batch size"),
    ],
)
def test_batch_sizes_of_a_deepspeed_config_follow_from_each_other(
    given: Any, expected: Any
) -> None:
    for found in run_ranks(2, batch_sizes, *given):
        assert found.startswith(expected) if isinstance(expected, str) else found == expected


def test_a_deepspeed_config_says_what_the_file_says() -> None:
    made = DeepSpeedConfig(config(zero_optimization={"stage": 2}, bf16={"enabled": True}))
    assert made.zero_enabled and made.zero_optimization_stage == 2 and made.bfloat16_enabled
    assert made.optimizer_name == "adamw" and made.optimizer_params == {"lr": 0.01}
    assert made.scheduler_name is None and made.world_size == 1
    assert made.checkpoint_tag_validation_enabled and not made.checkpoint_tag_validation_fail
    with pytest.raises(AttributeError, match=r"DeepSpeedConfig\.elasticity_enabled is not served"):
        _ = made.elasticity_enabled
    made.train_batch_size, made.train_micro_batch_size_per_gpu = 7, 2
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size=7"):
        made._configure_train_batch_size()


def test_the_zero_section_as_an_object_has_deepspeeds_defaults() -> None:
    plain = DeepSpeedZeroConfig()
    assert plain.stage == 0 and plain.overlap_comm is False and plain.offload_param is None
    assert plain.prefetch_bucket_size == plain.stage3_prefetch_bucket_size == 5 * 10**7
    made = DeepSpeedZeroConfig(
        stage=3, stage3_max_reuse_distance=12, cpu_offload=1, offload_param={"device": "nvme"}
    )
    assert made.overlap_comm is True and made.max_reuse_distance == 12
    assert isinstance(made.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert isinstance(made.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert made.offload_param.device == OffloadDeviceEnum.nvme
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save  # fmt: skip
    with pytest.raises(ValueError, match="reduce_bucket_size=0"):
        DeepSpeedZeroConfig(reduce_bucket_size=0)
    with pytest.raises(ValueError, match="did you mean 'overlap_comm'"):
        DeepSpeedZeroConfig(overlap_com=True)


# -- initialize ------------------------------------------------------------------------------------


def test_wrong_arguments_are_the_errors_that_deepspeed_raises() -> None:
    with pytest.raises(AssertionError, match="was given no model"):
        initialize(config=config())
    with pytest.raises(DeepSpeedConfigError, match="did you mean 'zero_optimization'"):
        initialize(model=build(), config=config(zero_optimisation={"stage": 1}))
    model = build()
    outside = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(outside, lambda step: 1.0)
    with pytest.raises(ValueError, match="lr_scheduler is a LambdaLR over an optimizer that was"):
        initialize(model=model, config=config(), lr_scheduler=schedule)


def test_a_schedule_may_be_an_object_a_class_or_a_function_and_wins_over_the_file() -> None:
    lr_scheduler = torch.optim.lr_scheduler
    model = build()
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    file = config(scheduler={"type": "WarmupLR", "params": {}})
    made = lr_scheduler.StepLR(own, 30)
    assert initialize(model=model, config=file, optimizer=own, lr_scheduler=made)[3] is made
    kind: Any = lr_scheduler.ConstantLR
    assert isinstance(initialize(model=build(), config=file, lr_scheduler=kind)[3], kind)
    found = initialize(
        model=build(), config=file, lr_scheduler=lambda o: lr_scheduler.StepLR(o, 30)
    )[3]
    assert isinstance(found, lr_scheduler.StepLR)


def test_the_first_releases_name_of_the_file_option_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(zero_optimization={"stage": 1})))
    args = argparse.Namespace(deepscale_config=str(file), local_rank=0)
    assert initialize(args=args, model=build())[0].zero_optimization_stage() == 1


def test_no_group_may_be_joined_only_where_there_is_one() -> None:
    with pytest.raises(RuntimeError, match="dist_init_required=False, and there is no process"):
        communication.init_distributed(dist_init_required=False)
    with pytest.raises(RuntimeError, match="there is no process group"):
        initialize(model=build(), config=config(), dist_init_required=False)


def joined_twice() -> list[int]:
    for required in (True, False, None):
        communication.init_distributed(dist_init_required=required)
    return [communication.get_rank(), communication.get_world_size()]


def test_a_group_that_exists_is_joined_again_without_a_word() -> None:
    assert run_ranks(2, joined_twice) == [[0, 2], [1, 2]]


# -- small names -----------------------------------------------------------------------------------


def test_compiled_operators_are_answered_for_by_what_they_are_for() -> None:
    assert operators.COMPATIBLE[operators.CPUAdamBuilder.NAME]
    assert operators.FusedAdamBuilder().is_compatible()
    assert not operators.FusedLambBuilder().is_compatible()
    assert all(getattr(operators, name).NAME in operators.COMPATIBLE for name in operators.BUILDERS)
    with pytest.raises(NotImplementedError, match=r"CPUAdamBuilder\.load\(\): Onefold has no"):
        operators.CPUAdamBuilder().load()


def test_groups_by_expert_of_a_model_without_experts_are_its_groups() -> None:
    split = groups.split_params_into_different_moe_groups_for_optimizer
    params = list(build().parameters())
    made = split({"params": iter(params), "name": "all"})
    assert len(made) == 1 and made[0]["name"] == "all" and made[0]["params"] == params
    params[1].allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="belongs to an expert"):
        split([{"params": params}])


def test_names_of_deepspeeds_files_and_versions_of_torch_are_told() -> None:
    assert files.get_model_ckpt_name_for_rank("a", "00") == "a/mp_rank_00_model_states.pt"
    assert (
        files.get_zero_ckpt_name_for_rank("a", 3, 0)
        == "a/zero_pp_rank_3_mp_rank_00_optim_states.pt"
    )
    assert files.required_torch_version(min_version=1.4)
    assert files.required_torch_version(min_version="2.10", max_version="9.0")
    assert not files.required_torch_version(max_version="2.0")
    with pytest.raises(ValueError, match="give min_version"):
        files.required_torch_version()
