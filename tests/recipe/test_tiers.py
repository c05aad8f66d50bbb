"""Where state rests: what each option becomes in a recipe, in every combination; numbers of bytes; the
placements of the stages.
"""

from __future__ import annotations

import itertools
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold import Recipe, Row, Tier
from onefold.recipe.options import UNLIMITED, bytes_of

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
ROWS = ("parameters", "gradients", "optimizer")
NAME_OF = {H: "cpu", N: "nvme", D: None}
#: (parameters, gradients, optimizer) that some run can mean; parameters leave the device at stage 3
#: alone.
STATES = {(D, D, D), (D, H, H), (D, N, N), (D, H, N)}
PARAMETERS = {(H, D, D), (H, H, H), (H, N, N), (H, H, N), (N, N, N), (N, H, N)}


def rows_of(recipe: Recipe) -> list[Row]:
    return [getattr(recipe, name) for name in ROWS]


def tiers(recipe: Recipe) -> tuple[Tier, ...]:
    return tuple(row.tier for row in rows_of(recipe))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_says_what_is_divided_and_in_which_dtypes(stage: int) -> None:
    recipe = Recipe.zero(stage)
    assert [row.sharded for row in rows_of(recipe)] == [False] * (3 - stage) + [True] * stage
    assert recipe.stage == stage and tiers(recipe) == (D, D, D) and recipe.notes == ()
    assert recipe == Recipe.zero(stage, precision=None) != Recipe.zero(stage, precision="fp32")
    assert (
        recipe.parameters.dtype is None
        and recipe.optimizer.dtype == recipe.gradients.dtype == torch.float32
    )
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for precision, dtype in names.items():
        cast = Recipe.zero(stage, precision=precision)
        assert cast.parameters.dtype == cast.gradients.wire == dtype
        assert cast.gradients.dtype == cast.optimizer.dtype == torch.float32
    assert recipe.reduces_at == ("boundary" if stage < 2 else "micro-batch")
    late = Recipe.zero(stage, reduce_at="boundary").replace(prefetch=0)
    assert late.reduces_at == "boundary"


def test_a_combination_of_tiers_is_built_or_refused() -> None:
    for stage, wanted in itertools.product(range(4), itertools.product(Tier, repeat=3)):
        _, gradients, optimizer = wanted
        names = ("offload_param", "offload_gradients", "offload_optimizer")
        options = {n: NAME_OF[tier] for n, tier in zip(names, wanted, strict=True)}
        if wanted in STATES or (stage == 3 and wanted in PARAMETERS):
            assert tiers(Recipe.zero(stage, nvme="/nvme", **options)) == wanted
        elif gradients is not D or optimizer is D:  # else they follow the optimizer
            with pytest.raises(ValueError):
                Recipe.zero(stage, nvme="/nvme", **options)


def test_optimizer_states_leave_whole_in_part_or_up_to_a_budget() -> None:
    for where, amount, share, budget in (
        (None, None, 1.0, None), ("cpu", None, 1.0, None), ("nvme", None, 1.0, None), ("cpu", 0.6, 0.6, None), ("cpu", 1, 1.0, None),
        ("nvme", "6GB", 1.0, 6 * 10**9), ("cpu", 1000, 1.0, 1000), ("nvme", 0.25, 0.25, None),
    ):  # fmt: skip
        recipe = Recipe.zero(1, offload_optimizer=where, offload_amount=amount, nvme="/nvme")
        tier = {name: tier for tier, name in NAME_OF.items()}[where]
        assert tiers(recipe) == (D, tier, tier), "gradients follow"
        assert (recipe.offload_share, recipe.offload_bytes) == (share, budget)


def test_folders_and_budgets_are_taken_as_people_write_them() -> None:
    folders = {"/a": ("/a",), Path("/a"): ("/a",), ("/b", PurePosixPath("/a")): ("/b", "/a")}
    for value, expected in folders.items():
        recipe = Recipe.zero(3, nvme=value, offload_optimizer="nvme")
        assert recipe.nvme == expected and recipe.notes == ()
    budgets = {None: None, "cpu": UNLIMITED, "8GB": 8 * 10**9, 1 << 30: 1 << 30}
    for value, number in budgets.items():
        assert Recipe.zero(0, offload_activations=value).offload_activations == number
    assert Recipe.zero(3, units=["a"]).units == ("a",)


def test_a_recipe_describes_its_tiers() -> None:
    said = Recipe.zero(
        3, nvme="/nvme", offload_optimizer="nvme", offload_param="nvme", step_in_backward=True,
        offload_activations="8GB", moments="int4",
    ).describe()  # fmt: skip
    for words in ("nvme=('/nvme',)", "step_in_backward=True", "activations=8000000000", "'int4'"):
        assert words in said


# -- bytes -----------------------------------------------------------------------------------------

UNITS = {"": 1, "B": 1} | {
    f"{letter}{binary}B": (1024 if binary else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for binary in ("", "i")
}


@given(
    st.integers(1, 10**6),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from([str.lower, str.upper, str]),
    st.sampled_from(["{}{}", " {} {} "]),
)
def test_a_number_and_a_unit_is_their_product(
    number: int, unit: str, case: Any, spaced: str
) -> None:
    assert bytes_of("x", spaced.format(number, case(unit))) == number * UNITS[unit]
    assert bytes_of("x", number * UNITS[unit]) == number * UNITS[unit]


anything = st.one_of(
    st.text(max_size=12),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.integers()),
)


@given(anything)
def test_whatever_is_given_for_bytes_is_a_number_above_0_or_refused(value: Any) -> None:
    try:
        found = bytes_of("limit", value)
    except ValueError as error:
        assert str(error).startswith(f"limit={value!r}: expected") and str(error).endswith(".")
    else:
        assert isinstance(found, int) and found > 0
