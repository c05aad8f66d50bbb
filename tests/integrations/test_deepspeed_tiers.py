"""Offloading as DeepSpeed's files write it: what becomes of each key, what is listed, what is
refused.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.integrations.deepspeed import recipe_from
from onefold.integrations.deepspeed.config import DeepSpeedConfig, read_deepspeed
from onefold.integrations.deepspeed.config.keys import AIO, OFFLOAD
from onefold.recipe import Recipe, Tier

CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
#: The shape of the files that tutorials print, with a value for every key of the section.
EVERY_KEY: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            **NVME, "pin_memory": True, "buffer_count": 4, "fast_init": False, "ratio": 0.5, "pipeline_read": True,
            "pipeline_write": True, "super_offload": False, "cpuadam_cores_perc": 0.8,
        },
        "offload_param": {**NVME, "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
        "sub_group_size": 1e8,
    },
    "aio": {
        "block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True, "use_gds": False,
    },
    "gradient_clipping": 1.0,
}  # fmt: skip


def zero(stage: int = 3, **keys: Any) -> DeepSpeedConfig:
    aio = keys.pop("aio", None)
    return read_deepspeed(
        {"zero_optimization": {"stage": stage, **keys}, "aio": aio, "gradient_clipping": 1.0}
    )


def arguments(stage: int = 3, **keys: Any) -> dict[str, Any]:
    """What the file says about tiers, and that a recipe can be it."""
    found = zero(stage, **keys).recipe_arguments
    Recipe.zero(**found)
    return {name: value for name, value in found.items() if name not in ("stage", "precision")}


def refused(pattern: str, stage: int = 3, error: type[Exception] = ValueError, **keys: Any) -> None:
    with pytest.raises(error, match=pattern):
        zero(stage, **keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": "cpu"}),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, {"offload_optimizer": "cpu:0.3"}),
        ({"offload_optimizer": {"device": "CPU", "ratio": 1}}, {"offload_optimizer": "cpu"}),
        ({"offload_optimizer": NVME}, {"offload_optimizer": "nvme", "nvme": ["/nvme"]}),
        ({"offload_optimizer": {**NVME, "ratio": 0.5}}, {"offload_optimizer": "nvme:0.5", "nvme": ["/nvme"]}),
        ({"offload_optimizer": CPU, "offload_param": CPU}, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
        ({"offload_optimizer": NVME, "offload_param": CPU}, {"offload_optimizer": "nvme", "offload_param": "cpu", "nvme": ["/nvme"]}),
        ({"offload_optimizer": NVME, "offload_param": NVME}, {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": ["/nvme"]}),
        ({"cpu_offload": True}, {"offload_optimizer": "cpu"}),
        ({"cpu_offload": True, "cpu_offload_param": True}, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, {"offload_optimizer": "cpu:0.5"}),
        ({"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": "cpu"}),
        ({"offload_optimizer": {"device": "none", "pin_memory": True}, "offload_param": {}}, {}),
        ({"offload_optimizer": {"device": "auto"}, "offload_param": None}, {}),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0}}, {}),
    ],
)  # fmt: skip
def test_sections_become_tiers(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    assert arguments(3, **keys) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizer_states_leave_the_device_at_every_stage(stage: int) -> None:
    recipe = Recipe.zero(
        **zero(stage, offload_optimizer={"device": "cpu", "ratio": 0.5}).recipe_arguments
    )
    assert (recipe.optimizer.tier, recipe.gradients.tier, recipe.offload_share) == (
        Tier.HOST,
        Tier.HOST,
        0.5,
    )
    assert recipe.notes == ()


def test_every_key_of_the_sections_is_read_or_listed_with_its_reason() -> None:
    config = read_deepspeed(EVERY_KEY)
    listed = dict(config.without_effect)
    read = {
        "zero_optimization.offload_optimizer": {"device", "nvme_path", "ratio"},
        "zero_optimization.offload_param": {"device", "nvme_path"},
        "aio": {"queue_depth", "intra_op_parallelism", "use_gds"},
    }
    for section, keys in (
        *((f"zero_optimization.{n}", k) for n, k in OFFLOAD.items()),
        ("aio", AIO),
    ):
        for name in keys:
            assert (f"{section}.{name}" in listed) == (name not in read[section]), name
    assert all(len(reason) > 30 for reason in listed.values())
    assert config.unknown == () and config.left_auto == ()
    assert config.recipe_arguments == {
        "stage": 3, "precision": None, "offload_optimizer": "nvme:0.5", "offload_param": "nvme", "nvme": ["/nvme"],
        "chunk": 99_999_744, "nvme_threads": 32,
    }  # fmt: skip
    assert Recipe.zero(**config.recipe_arguments).notes == ()


def test_a_section_that_is_off_is_no_matter_but_its_keys_are_checked() -> None:
    config = zero(
        2,
        offload_optimizer={
            "device": "none",
            "pin_memory": True,
            "buffer_count": 4,
            "nvme_path": "/nvme",
        },
        offload_param={},
    )
    assert config.without_effect == () and config.notes == ()
    refused("did you mean 'pin_memory'", offload_optimizer={"device": "none", "pin_memry": True})
    refused("expected true or false", offload_param={"pin_memory": 2})


def test_the_size_of_a_sub_group_becomes_the_chunk_that_is_stepped_on_nvme() -> None:
    assert arguments(offload_optimizer=NVME, sub_group_size=8_388_608)["chunk"] == 8_388_608
    config = zero(offload_optimizer=NVME, sub_group_size=10_000_000)
    assert config.recipe_arguments["chunk"] == 9_998_336
    assert any("sub_group_size=10000000 becomes 9998336" in note for note in config.notes)
    assert arguments(offload_optimizer=NVME, sub_group_size=0)["chunk"] == 65_536


@given(st.integers(0, 10**9 - 1))
def test_a_rounded_chunk_is_one_that_a_recipe_takes_and_never_much_larger_than_asked(
    size: int,
) -> None:
    config = zero(offload_optimizer=NVME, sub_group_size=size)
    chunk = config.recipe_arguments["chunk"]
    assert Recipe.zero(**config.recipe_arguments).chunk == chunk
    assert size - 4096 < chunk <= max(size, 65_536)
    assert any("becomes" in note for note in config.notes) == (chunk != size)


@pytest.mark.parametrize("size", [1e9, 1e12, float("inf")])
def test_the_size_that_divides_nothing_leaves_the_chunk_as_it_is(size: float) -> None:
    config = zero(offload_optimizer=NVME, sub_group_size=size)
    assert "chunk" not in config.recipe_arguments
    assert [path for path, reason in config.without_effect if "divides nothing" in reason] == [
        "zero_optimization.sub_group_size"
    ]


def test_what_is_about_nvme_alone_is_listed_where_nothing_rests_there() -> None:
    config = zero(
        offload_optimizer={"device": "cpu", "nvme_path": "/nvme"},
        sub_group_size=1e8,
        aio={"queue_depth": 16, "use_gds": True},
    )
    assert config.recipe_arguments == {"stage": 3, "precision": None, "offload_optimizer": "cpu"}
    paths = {path for path, _ in config.without_effect}
    assert paths == {
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.sub_group_size",
        "aio",
    }
    refused("did you mean 'queue_depth'", aio={"queue_dept": 16})


@pytest.mark.parametrize(
    ("aio", "threads"),
    [
        ({"queue_depth": 4}, 4),
        ({"intra_op_parallelism": 2}, 16),
        ({"queue_depth": 6, "thread_count": 4}, 24),
        ({"queue_depth": 32, "intra_op_parallelism": 8}, 64),
        ({"block_size": 1048576}, None),
        ({}, None),
    ],
)
def test_transfers_at_a_time_are_the_queue_of_each_thread(
    aio: dict[str, Any], threads: int | None
) -> None:
    config = zero(offload_optimizer=NVME, aio=aio)
    assert config.recipe_arguments.get("nvme_threads") == threads
    assert any("64 are made" in note for note in config.notes) == (threads == 64)


def test_two_folders_are_striped_over_and_one_is_enough_for_both() -> None:
    other = {"device": "nvme", "nvme_path": "/other"}
    config = zero(offload_optimizer=NVME, offload_param=other)
    assert config.recipe_arguments["nvme"] == ["/nvme", "/other"]
    assert any("striped over /nvme and /other" in note for note in config.notes)
    assert arguments(offload_optimizer=NVME, offload_param={"device": "nvme"})["nvme"] == ["/nvme"]


def test_parameters_are_kept_below_stage_3_and_that_is_listed() -> None:
    config = zero(
        2, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu", "pin_memory": True}
    )
    assert "offload_param" not in config.recipe_arguments
    assert [path for path, _ in config.without_effect] == ["zero_optimization.offload_param"]


@pytest.mark.parametrize(("stage", "told"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_disk_below_stage_3_is_used_and_that_is_told(stage: int, told: bool) -> None:
    config = zero(stage, offload_optimizer=NVME)
    assert config.recipe_arguments["offload_optimizer"] == "nvme"
    assert any(f"keeps them on the host at stage {stage}" in note for note in config.notes) == told


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({"offload_optimizer": {"device": "nvme"}}, 'offload_optimizer.device="nvme" has no folder.*"nvme_path"'),
        ({"offload_optimizer": {"device": "disk"}}, "expected one of 'none', 'cpu', 'nvme'"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "ratio=1.5: expected a number from 0 to 1"),
        ({"offload_optimizer": True}, "offload_optimizer=True: expected an object"),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": NVME}, "three times as many bytes.*offload_optimizer.device too"),
        ({"offload_param": NVME}, "three times as many bytes"),
        ({"cpu_offload": True, "offload_optimizer": NVME}, 'cpu_offload=true means .*device="cpu".*\'nvme\': remove cpu_offload'),
        ({"cpu_offload_param": True, "offload_param": {"device": "none"}}, "remove cpu_offload_param"),
        ({"offload_optimizer": {"devise": "cpu"}}, "did you mean 'device'"),
        ({"offload_optimizer": {"max_in_cpu": 1}}, 'belongs inside "zero_optimization.offload_param"'),
        ({"offload_param": {"block_size": 1}}, 'belongs inside "aio"'),
        ({"nvme_path": "/nvme"}, 'belongs inside "zero_optimization.offload_optimizer"'),
        ({"aio": {"queue_depth": 0}}, "aio.queue_depth=0: expected a whole number, 1 or more"),
        ({"aio": {"single_submit": "false"}}, "write false without quotes"),
        ({"aio": {"thread_count": 1, "intra_op_parallelism": 1}}, "set twice"),
        ({"aio": 3}, "aio=3: expected an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_key(keys: dict[str, Any], pattern: str) -> None:
    refused(pattern, **keys)


def test_direct_storage_is_refused_only_where_it_would_be_used() -> None:
    refused(
        "aio.use_gds=True.*passes through host memory",
        error=NotImplementedError,
        offload_optimizer=NVME,
        aio={"use_gds": True},
    )
    assert arguments(offload_optimizer=NVME, aio={"use_gds": False})["offload_optimizer"] == "nvme"


def test_what_of_adam_has_no_effect_is_listed_and_states_of_16_bits_are_refused() -> None:
    optimizer = {"type": "Adam", "params": {"set_grad_none": True, "fp32_optimizer_states": True}}
    assert [path for path, _ in read_deepspeed({"optimizer": optimizer}).without_effect] == [
        "optimizer.params.set_grad_none"
    ]
    with pytest.raises(NotImplementedError, match=re.escape("fp32_optimizer_states=false")):
        read_deepspeed({"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}})


def test_a_recipe_from_a_file_has_the_tiers_of_the_file() -> None:
    recipe = recipe_from(EVERY_KEY)
    assert (recipe.parameters.tier, recipe.gradients.tier, recipe.optimizer.tier) == (
        Tier.NVME,
    ) * 3
    assert (recipe.nvme, recipe.nvme_threads, recipe.offload_share) == (("/nvme",), 32, 0.5)
    assert any("pin_memory" in note for note in recipe.notes)
