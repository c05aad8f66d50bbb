"""The recipe refuses, when it is built, what no run could mean, and lists what has no effect: each
in a sentence.
"""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

import pytest
import torch

import onefold
from onefold import Placement, Recipe, Row
from zoo import TinyMLP

R, S = Placement.REPLICATED, Placement.SHARDED
SWITCHES = ("reshard_after_forward", "overlap", "cast_inputs")
COUNTS = ("prefetch", "in_flight")
BOOLEANS_ONLY = (1, 0, "yes", "False", None)
COUNTS_ONLY = (-1, 1.0, "2", True, None)


def refusal(**arguments: Any) -> str:
    """What Recipe.zero says to `arguments`."""
    with pytest.raises(ValueError) as caught:
        Recipe.zero(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("stage", [4, -1, 3.0, "3", True, False, None, (3,)], ids=repr)
def test_a_stage_is_one_of_four_whole_numbers(stage: Any) -> None:
    said = refusal(stage=stage)
    assert f"stage={stage!r}" in said and "0, 1, 2 or 3" in said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_four_stages_are_three_placements(stage: int) -> None:
    recipe = Recipe.zero(stage)
    placements = (
        recipe.parameters.placement,
        recipe.gradients.placement,
        recipe.optimizer.placement,
    )
    assert placements == (R,) * (3 - stage) + (S,) * stage
    assert recipe.stage == stage


@pytest.mark.parametrize(
    "precision", ["fp8", "bfloat16", "FP32", torch.bfloat16, 16, True], ids=repr
)
def test_an_unknown_precision_is_told_the_known_ones(precision: Any) -> None:
    said = refusal(stage=2, precision=precision)
    assert f"precision={precision!r}" in said and all(
        known in said for known in ("fp32", "bf16", "fp16")
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("prefech", "prefetch"), ("inflight", "in_flight"), ("reshard_after_foward", "reshard_after_forward"), ("unit", "units"),
        ("stall_time_out", "stall_timeout"), ("sync_buffer", "sync_buffers"), ("elementwise", "elementwise_optimizer"),
    ],
)  # fmt: skip
def test_a_misspelt_option_is_told_the_right_one(given: str, meant: str) -> None:
    assert f"Did you mean {meant!r}?" in refusal(stage=3, **{given: 1})


def test_an_option_like_no_other_is_told_all_that_there_are() -> None:
    said = refusal(stage=3, wibble=1, quux=2)
    assert (
        "quux" in said
        and "wibble" in said
        and all(known in said for known in (*SWITCHES, *COUNTS, "stall_timeout", "units"))
    )


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", BOOLEANS_ONLY, ids=repr)
def test_a_switch_is_true_or_false_and_nothing_like_it(name: str, value: Any) -> None:
    said = refusal(stage=3, **{name: value})
    assert f"{name}={value!r}" in said and "True or False" in said


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", COUNTS_ONLY, ids=repr)
def test_a_number_of_units_is_whole_and_not_negative(name: str, value: Any) -> None:
    said = refusal(stage=3, **{name: value})
    assert f"{name}={value!r}" in said and "whole number" in said


@pytest.mark.parametrize("value", [0, 0.0, -1, float("nan"), "30", None, [30]], ids=repr)
def test_a_timeout_is_seconds_above_zero(value: Any) -> None:
    said = refusal(stage=1, stall_timeout=value)
    assert f"stall_timeout={value!r}" in said and "seconds above 0" in said


@pytest.mark.parametrize("value", ["blocks.0", "Block", torch.nn.Linear], ids=str)
def test_units_are_a_list_even_of_one(value: Any) -> None:
    said = refusal(stage=3, units=value)
    assert f"units={value!r}" in said and "list" in said and f"[{value!r}]" in said


def test_units_of_a_call_are_a_list_too() -> None:
    with pytest.raises(ValueError, match=r"units='blocks\.0'.*list"):
        onefold.shard(TinyMLP(), Recipe.zero(3), units="blocks.0")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("value", ["never", "micro_batch", "step", True, 1], ids=repr)
def test_gradients_are_reduced_at_one_of_two_times(stage: int, value: Any) -> None:
    said = refusal(stage=stage, reduce_at=value)
    assert f"reduce_at={value!r}" in said and "'micro-batch'" in said and "'boundary'" in said


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_that_keep_gradients_whole_cannot_reduce_them_earlier(stage: int) -> None:
    said = refusal(stage=stage, reduce_at="micro-batch")
    assert f"stage {stage}" in said and "reduce_at='micro-batch'" in said and "stage 2 or 3" in said
    assert Recipe.zero(stage, reduce_at="boundary") == Recipe.zero(stage)


@pytest.mark.parametrize("name", ["wire", "master_dtype", "accumulate_dtype"])
@pytest.mark.parametrize(
    ("value", "meant"),
    [("bfloat16", "bf16"), (torch.bfloat16, "bf16"), (torch.float64, "fp64"), (torch.int8, ""), (torch.bool, ""), (16, ""), ("int8", "")],
    ids=repr,
)  # fmt: skip
def test_a_dtype_is_a_floating_point_one_by_its_short_name(
    name: str, value: Any, meant: str
) -> None:
    said = refusal(stage=3, **{name: value})
    assert f"{name}={value!r}: expected one of fp64, fp32, bf16, fp16" in said
    assert said.endswith(f" Did you mean {meant!r}?") if meant else "Did you mean" not in said


COMBINATIONS = list(itertools.product((R, S), repeat=3))
POSSIBLE = [(R,) * (3 - stage) + (S,) * stage for stage in range(4)]


@pytest.mark.parametrize(
    "placements", COMBINATIONS, ids=lambda rows: "-".join(p.value for p in rows)
)
def test_rows_combine_to_the_four_stages_or_say_why_not(placements: tuple[Placement, ...]) -> None:
    rows = [Row(placement, torch.float32, torch.float32) for placement in placements]
    if placements in POSSIBLE:
        assert Recipe(*rows).stage == POSSIBLE.index(placements)
        return
    with pytest.raises(
        ValueError,
        match=r"replicates the optimizer states.*Shard|keeps gradients replicated.*Shard",
    ):
        Recipe(*rows)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": Row(R, torch.float32)}, "replicates the optimizer states"),
        ({"gradients": Row(R, torch.float32)}, "keeps gradients replicated"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"overlap": "no"}, "overlap='no'"),
        ({"stall_timeout": 0}, "stall_timeout=0"),
        ({"units": "blocks"}, "units='blocks'"),
        ({"reduce_at": "never"}, "reduce_at='never'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_changed_copy_is_checked_again(changes: dict[str, Any], said: str) -> None:
    recipe = Recipe.zero(3)
    with pytest.raises(ValueError, match=re.escape(said)):
        recipe.replace(**changes)
    assert recipe == Recipe.zero(3)


WITHOUT_EFFECT: list[tuple[int, dict[str, Any], tuple[str, ...]]] = [
    *((stage, {"prefetch": 2}, ("prefetch=2", f"stage {stage}")) for stage in (0, 1, 2)),
    *(
        (stage, {"reshard_after_forward": False}, ("reshard_after_forward=False", f"stage {stage}"))
        for stage in (0, 1, 2)
    ),
    (3, {"overlap": False, "prefetch": 4}, ("prefetch=4", "overlap=False")),
    (2, {"overlap": False, "in_flight": 4}, ("in_flight=4", "overlap=False")),
]


@pytest.mark.parametrize(("stage", "options", "words"), WITHOUT_EFFECT, ids=str)
def test_an_option_without_effect_ends_in_one_note(
    stage: int, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    notes = Recipe.zero(stage, **options).notes
    assert (
        len(notes) == 1 and all(word in notes[0] for word in words) and "no effect" in notes[0]
    ), notes


def test_options_that_apply_end_in_no_note() -> None:
    options = {
        "prefetch": 2,
        "reshard_after_forward": False,
        "in_flight": 3,
        "units": ["blocks.0"],
        "stall_timeout": 5,
    }
    assert (
        Recipe.zero(
            3,
            precision="bf16",
            reduce_at="boundary",
            wire="fp32",
            sync_buffers=False,
            **options,
        ).notes
        == ()
    )
    assert Recipe.zero(1, precision="bf16", in_flight=1, cast_inputs=True, wire="bf16").notes == ()


def test_notes_are_logged_once_and_shown_with_the_recipe(caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe.zero(1, prefetch=2, reshard_after_forward=False)
    with caplog.at_level(logging.WARNING, logger="onefold"):
        onefold.shard(TinyMLP(), recipe)
    logged = [record.getMessage() for record in caplog.records if record.name == "onefold"]
    assert len(recipe.notes) == 2 and logged == list(recipe.notes)
    assert all(note in recipe.describe() for note in recipe.notes)


def test_notes_make_no_difference_between_recipes() -> None:
    assert Recipe.zero(1, prefetch=1) == Recipe.zero(1)
    assert Recipe.zero(1, prefetch=1).notes and not Recipe.zero(1).notes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sums_and_masters_stay_in_single_precision(precision: str) -> None:
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    recipe = Recipe.zero(3, precision=precision)
    assert recipe.compute_dtype == recipe.parameters.wire == recipe.gradients.wire == compute
    assert recipe.gradients.dtype == recipe.optimizer.dtype == torch.float32


@pytest.mark.parametrize("value", [True, float("inf")], ids=repr)
def test_a_timeout_is_a_finite_number_and_no_switch(value: Any) -> None:
    said = refusal(stage=1, stall_timeout=value)
    assert f"stall_timeout={value!r}" in said and "finite" in said


@pytest.mark.parametrize("value", [5, [3], ("a", None), {"a"}, {"a": 1}], ids=repr)
def test_units_are_names_or_classes_in_an_order(value: Any) -> None:
    assert f"units={value!r}" in refusal(stage=3, units=value)
    with pytest.raises(ValueError, match=re.escape(f"units={value!r}")):
        onefold.shard(TinyMLP(), Recipe.zero(3), units=value)


def test_a_list_of_units_becomes_a_tuple_however_it_is_given() -> None:
    rows = [Row(S, torch.float32, torch.float32)] * 3
    assert Recipe.zero(3, units=["a"]).units == Recipe(*rows, units=["a"]).units == ("a",)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["no", 1, 0], ids=repr)
def test_the_word_for_an_optimizer_is_true_false_or_none(value: Any) -> None:
    assert f"elementwise_optimizer={value!r}" in refusal(stage=3, elementwise_optimizer=value)


@pytest.mark.parametrize("name", ["master_dtype", "accumulate_dtype"])
def test_only_the_wire_may_have_no_dtype(name: str) -> None:
    assert f"{name}=None" in refusal(stage=3, **{name: None})
    assert Recipe.zero(3, precision="bf16", wire=None).gradients.wire == torch.bfloat16


@pytest.mark.parametrize(
    "precision", ["bfloat16", torch.bfloat16, ["bf16"], "float16", torch.float32, ""], ids=repr
)
def test_a_precision_by_another_name_is_told_its_own(precision: Any) -> None:
    said = refusal(stage=2, precision=precision)
    meant = {
        "bfloat16": "bf16",
        "torch.bfloat16": "bf16",
        "float16": "fp16",
        "torch.float32": "fp32",
    }.get(str(precision))
    assert (
        f"precision={precision!r}" in said
        and (f"Did you mean {meant!r}?" if meant else "of fp32, bf16, fp16, or None") in said
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_a_precision_the_recipe_names_no_dtype_to_compute_in(stage: int) -> None:
    recipe = Recipe.zero(stage)
    assert recipe == Recipe.zero(stage, precision=None) != Recipe.zero(stage, precision="fp32")
    assert recipe.compute_dtype is recipe.parameters.dtype is recipe.gradients.wire is None
    assert recipe.master_dtype == recipe.sums_dtype == torch.float32
    rows = {line.split()[0]: line.split()[1:] for line in recipe.describe().splitlines()[1:4]}
    placement = {3: "sharded"}.get(stage, "replicated")
    assert rows["parameters"] == [placement, "device", "model's", "-" if stage == 0 else "model's"]
    assert rows["gradients"][2:] == ["float32", "model's"] and rows["optimizer"][2:] == [
        "float32",
        "-",
    ]
    assert Recipe.zero(stage, wire="fp32").in_words("gradients") == ("float32", "float32")


@pytest.mark.parametrize("value", [True, False])
def test_casting_inputs_means_nothing_where_the_model_computes_as_it_is(value: bool) -> None:
    (note,) = Recipe.zero(3, cast_inputs=value).notes
    assert f"cast_inputs={value} has no effect" in note and "precision=None" in note
    assert Recipe.zero(3, cast_inputs=True, precision="fp16").notes == ()


def test_only_parameters_may_have_no_dtype_of_the_recipe() -> None:
    row = Row(S, torch.float32)
    assert Recipe(Row(S, None), row, row).compute_dtype is None
    for name, rows in (
        ("gradients", (row, Row(S, None), row)),
        ("optimizer", (row, row, Row(S, None))),
    ):
        with pytest.raises(ValueError, match=f"{name}.dtype=None"):
            Recipe(*rows)


@pytest.mark.parametrize("value", [1, 0, "yes", "all", "Norms", None], ids=repr)
def test_buffers_follow_all_or_those_of_norms_or_not(value: Any) -> None:
    said = refusal(stage=3, sync_buffers=value)
    assert f"sync_buffers={value!r}" in said and all(
        word in said for word in ("True", "'norms'", "False")
    )
    assert [
        Recipe.zero(3, sync_buffers=known).sync_buffers for known in (True, "norms", False)
    ] == [True, "norms", False]


def test_rows_and_what_they_are_made_of_are_checked() -> None:
    row = Row(S, torch.float32)
    for build, word in (
        (lambda: Recipe("x", row, row), "parameters='x'"),  # type: ignore[arg-type]
        (lambda: Recipe(row, row, None), "optimizer=None"),  # type: ignore[arg-type]
        (lambda: Row("sharded", torch.float32), "placement='sharded'"),  # type: ignore[arg-type]
        (lambda: Row(S, "fp32"), "dtype='fp32'"),  # type: ignore[arg-type]
        (lambda: Row(S, torch.float32, "bf16"), "wire='bf16'"),  # type: ignore[arg-type]
        (lambda: Row(S, torch.float32, tier="host"), "tier='host'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=re.escape(word)):
            build()


def test_a_changed_copy_knows_its_fields() -> None:
    with pytest.raises(ValueError, match=r"prefech.*Did you mean 'prefetch'"):
        Recipe.zero(3).replace(prefech=1)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_stay_whole_cannot_be_reduced_earlier(
    stage: int,
) -> None:
    recipe = Recipe.zero(stage)
    with pytest.raises(ValueError, match=r"reduce_at='micro-batch' cannot apply"):
        recipe.replace(reduce_at="micro-batch")
    with pytest.raises(ValueError, match=r"reduce_at='micro-batch' cannot apply"):
        Recipe(recipe.parameters, recipe.gradients, recipe.optimizer, reduce_at="micro-batch")
    assert Recipe(recipe.parameters, recipe.gradients, recipe.optimizer) == recipe


def test_the_usual_time_of_reducing_follows_the_gradient_row() -> None:
    one, two = Recipe.zero(1), Recipe.zero(2)
    assert (
        one.replace(gradients=two.gradients) == two and two.replace(gradients=one.gradients) == one
    )
    at_boundary = Recipe.zero(2, reduce_at="boundary")
    assert at_boundary.replace(prefetch=0).reduce_at == "boundary"


LATER: list[tuple[Recipe, str, tuple[str, ...]]] = [
    (
        Recipe.zero(3).replace(overlap=False, prefetch=4),
        "replaced",
        ("prefetch=4", "overlap=False"),
    ),
    (Recipe.zero(1).replace(prefetch=1), "replaced by what it was", ("prefetch=1", "stage 1")),
    (
        Recipe(Row(R, torch.float32), *[Row(S, torch.float32)] * 2, prefetch=3),
        "by rows",
        ("prefetch=3", "stage 2"),
    ),
    (Recipe.zero(2, overlap=False, prefetch=2), "for two reasons", ("prefetch=2", "stage 2")),
    (
        Recipe.zero(3, precision="fp32", cast_inputs=False),
        "without casts",
        ("cast_inputs=False", "fp32"),
    ),
    (
        Recipe.zero(0, elementwise_optimizer=True),
        "with whole parameters",
        ("elementwise_optimizer=True", "stage 0"),
    ),
]


@pytest.mark.parametrize(("recipe", "how", "words"), LATER, ids=[how for _, how, _ in LATER])
def test_an_option_without_effect_is_noted_however_the_recipe_was_made(
    recipe: Recipe, how: str, words: tuple[str, ...]
) -> None:
    assert (
        len(recipe.notes) == 1
        and all(word in recipe.notes[0] for word in words)
        and "no effect" in recipe.notes[0]
    ), recipe.notes


def test_a_note_goes_with_what_it_was_about() -> None:
    recipe = Recipe.zero(2, prefetch=2, reshard_after_forward=False)
    assert len(recipe.notes) == 2
    assert (
        len(recipe.replace(prefetch=1, reshard_after_forward=True).replace(in_flight=1).notes) == 0
    )
    assert recipe.replace(notes=("mine",)).notes[0] == "mine"
