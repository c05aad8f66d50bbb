"""Where state rests: each row of the table of options, each refusal in its sentence, each
note.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold import Recipe, Row, Tier
from onefold.recipe.core import PLACEMENTS_OF_STAGE
from onefold.recipe.options import SECTOR, UNLIMITED, bytes_of

ROWS = ("parameters", "gradients", "optimizer")
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
NAMES: dict[str | None, Tier] = {"cpu": H, "nvme": N, None: D}
NAME_OF = {tier: name for name, tier in NAMES.items()}


def zero(stage: int = 3, **options: Any) -> Recipe:
    """A recipe with a folder on a disk, which is noted where it is not needed."""
    return Recipe.zero(stage, **{"nvme": "/nvme", **options})


def refusal(stage: int = 3, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        Recipe.zero(stage, **options)
    return str(caught.value)


def tiers(recipe: Recipe) -> tuple[Tier, Tier, Tier]:
    return recipe.parameters.tier, recipe.gradients.tier, recipe.optimizer.tier


# -- the rows of the table -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_everything_stays_on_the_device_unless_told_otherwise(stage: int) -> None:
    recipe = Recipe.zero(stage)
    assert tiers(recipe) == (D, D, D) and recipe.notes == ()
    assert (
        recipe.offload_share,
        recipe.offload_bytes,
        recipe.offload_activations,
        recipe.tile,
        recipe.nvme,
    ) == (1.0, None, None, None, ())
    assert not recipe.step_in_backward


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_tier_goes_by_its_name(name: Any) -> None:
    assert tiers(zero(offload_optimizer=name)) == (D, NAMES[name], NAMES[name])


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param", "offload_gradients"])
@pytest.mark.parametrize(
    ("other", "meant"),
    [("CPU", "'cpu'"), ("host", "'cpu'"), ("Host", "'cpu'"), ("NVMe", "'nvme'"), ("none", "None"), ("device", "None"),
     (D, "None"), (H, "'cpu'"), (N, "'nvme'")],
    ids=repr,
)  # fmt: skip
def test_a_tier_by_another_name_is_told_its_own(name: str, other: Any, meant: str) -> None:
    said = refusal(**{name: other})
    assert said.startswith(f"{name}={other!r}: expected 'cpu', 'nvme', or None")
    assert said.endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize(
    ("value", "tier", "share", "budget"),
    [
        (0.6, H, 0.6, None),
        ("0.6", H, 0.6, None),
        (1.0, H, 1.0, None),
        (1, H, 1.0, None),
        ("6GB", H, 1.0, 6 * 10**9),
        (6 * 10**9, H, 1.0, 6 * 10**9),
        (1000, H, 1.0, 1000),
        ("1", H, 1.0, None),
        ("nvme:0.6", N, 0.6, None),
        ("nvme:6GiB", N, 1.0, 6 << 30),
        ("nvme: 6 GiB", N, 1.0, 6 << 30),
        ("cpu:0.25", H, 0.25, None),
        ("nvme:5e9", N, 1.0, 5 * 10**9),
        ("nvme:1", N, 1.0, None),
        (f"cpu:{1 / 3!r}", H, 1 / 3, None),
    ],
    ids=repr,
)
def test_optimizer_states_leave_whole_in_part_or_up_to_a_budget(
    value: Any, tier: Tier, share: float, budget: int | None
) -> None:
    recipe = zero(1, offload_optimizer=value)
    assert (recipe.optimizer.tier, recipe.gradients.tier) == (tier, tier)
    assert (recipe.offload_share, recipe.offload_bytes) == (share, budget)


def test_gradients_follow_the_optimizer_unless_they_are_told_to_wait_on_the_host() -> None:
    assert tiers(zero(offload_optimizer="nvme")) == (D, N, N)
    assert tiers(zero(offload_optimizer="nvme", offload_gradients="nvme")) == (D, N, N)
    assert tiers(zero(offload_optimizer="nvme", offload_gradients="cpu")) == (D, H, N)
    assert tiers(zero(offload_optimizer="cpu", offload_gradients="cpu")) == (D, H, H)


#: (parameters, gradients, optimizer) that some run can mean; parameters leave the device at stage 3
#: alone.
STATES = {(D, D, D), (D, H, H), (D, N, N), (D, H, N)}
PARAMETERS = {(H, D, D), (H, H, H), (H, N, N), (H, H, N), (N, N, N), (N, H, N)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "rows",
    list(itertools.product(Tier, repeat=3)),
    ids=lambda rows: "-".join(t.value for t in rows),
)
def test_a_combination_of_tiers_is_built_or_refused_and_options_and_rows_agree(
    stage: int, rows: tuple[Tier, Tier, Tier]
) -> None:
    _, g, o = rows
    names = zip(("offload_param", "offload_gradients", "offload_optimizer"), rows, strict=True)
    options = {name: NAME_OF[tier] for name, tier in names}
    plain = Recipe.zero(stage)
    by_row = {
        name: replace(getattr(plain, name), tier=tier)
        for name, tier in zip(ROWS, rows, strict=True)
    }
    if rows in STATES or (stage == 3 and rows in PARAMETERS):
        assert tiers(zero(stage, **options)) == rows
        assert plain.replace(**by_row, nvme=("/nvme",)) == zero(stage, **options)
        return
    with pytest.raises(ValueError) as caught:
        plain.replace(**by_row, nvme=("/nvme",))
    said = str(caught.value)
    assert re.search(
        r"stage 3|offload_optimizer='nvme' too|gradients go where the states are stepped", said
    ), said
    if g is not D or o is D:  # without offload_gradients they follow the optimizer
        assert refusal(stage, nvme="/nvme", **options) == said


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("cpu", UNLIMITED),
        ("8GB", 8 * 10**9),
        (1 << 30, 1 << 30),
    ],
    ids=repr,
)
def test_activations_go_to_the_host_without_end_or_up_to_a_budget(
    value: Any, expected: int | None
) -> None:
    assert zero(0, offload_activations=value).offload_activations == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ("/a", ("/a",)),
        (Path("/a"), ("/a",)),
        (["/a", PurePosixPath("/b")], ("/a", "/b")),
        (("/b", "/a"), ("/b", "/a")),
    ],
    ids=repr,
)
def test_folders_are_one_or_several_in_their_order(value: Any, expected: tuple[str, ...]) -> None:
    recipe = Recipe.zero(3, nvme=value, **({"offload_optimizer": "nvme"} if expected else {}))
    assert recipe.nvme == expected and recipe.notes == ()


def test_a_tile_is_a_number_of_bytes() -> None:
    assert [zero(tile=value).tile for value in (None, "256MB", 1 << 20)] == [
        None,
        256 * 10**6,
        1 << 20,
    ]


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1), ("6GB", 6 * 10**9), ("6gb", 6 * 10**9), (" 6 GB ", 6 * 10**9), ("6GiB", 6 << 30), ("512MiB", 512 << 20),
        ("1.5KB", 1500), ("1.5kib", 1536), ("2TB", 2 * 10**12), ("1TiB", 1 << 40), ("3B", 3), ("1e9", 10**9), ("1e3MB", 10**9),
        ("1e999", UNLIMITED), ("1e30GB", UNLIMITED),
    ],
)  # fmt: skip
def test_bytes_are_written_with_decimal_or_binary_units(text: str, expected: int) -> None:
    assert bytes_of("x", text) == expected


UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(
    st.integers(1, 10**6),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from([str.lower, str.upper, str]),
)
def test_a_number_and_a_unit_is_their_product(number: int, unit: str, case: Any) -> None:
    assert bytes_of("x", f"{number}{case(unit)}") == number * UNITS[unit]
    assert bytes_of("x", number * UNITS[unit]) == number * UNITS[unit]


@given(
    st.one_of(
        st.text(max_size=12),
        st.integers(),
        st.floats(),
        st.booleans(),
        st.none(),
        st.lists(st.integers(), max_size=2),
    )
)
def test_whatever_is_given_for_bytes_is_a_number_above_0_or_refused_in_a_sentence(
    value: Any,
) -> None:
    try:
        found = bytes_of("tile", value)
    except ValueError as error:
        assert str(error).startswith(f"tile={value!r}: expected") and str(error).endswith(".")
    else:
        assert isinstance(found, int) and found > 0


NO_BYTES = [
    "",
    "GB",
    "6 G B",
    "6XB",
    "-1GB",
    "0x10",
    "6GBs",
    "1,5GB",
    True,
    float("nan"),
    float("inf"),
    [1],
    {},
]


@pytest.mark.parametrize("value", NO_BYTES, ids=repr)
@pytest.mark.parametrize("name", ["tile", "offload_activations"])
def test_what_is_no_number_of_bytes_is_told_one(name: str, value: Any) -> None:
    if name == "offload_activations" and value is True:
        assert "expected 'cpu' for as much as it takes" in refusal(**{name: value})
        return
    said = refusal(**{name: value})
    assert (
        said
        == f"{name}={value!r}: expected a number of bytes, or a text such as '6GB' or '512MiB'."
    )


@pytest.mark.parametrize("value", [0, -1, "0GB", 0.4], ids=repr)
@pytest.mark.parametrize("name", ["tile", "offload_activations"])
def test_bytes_are_more_than_none(name: str, value: Any) -> None:
    assert refusal(**{name: value}) == f"{name}={value!r}: expected more than 0 bytes."


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["offload_param", "offload_gradients"])
@pytest.mark.parametrize("value", ["gpu", "disk", "", True, 0.5, ["cpu"]], ids=repr)
def test_a_tier_by_no_name_is_told_those_there_are(name: str, value: Any) -> None:
    said = refusal(**{name: value})
    assert said.startswith(f"{name}={value!r}: expected 'cpu', 'nvme'") and "device" in said


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "a share lies above 0"),
        (-0.5, "a share lies above 0"),
        (0, "more than 0 bytes"),
        (-3, "more than 0 bytes"),
        (2, "write the unit, such as '2GB'"),
        (1.5, "1.5 is above 1, so it is no share"),
        ("nvme:3", "write the unit, such as '3GB'"),
        (True, "a share such as 0.6, or a budget such as '6GB'"),
        (
            "fast",
            (
                "a number of bytes, or a text such as '6GB' or '512MiB'; 'cpu' and 'nvme' take all"
                " of it"
            ),
        ),
        (("nvme", 0.5), "a tier and an amount in one text: 'nvme:0.5'"),
        (["cpu", "6GB"], "a tier and an amount in one text: 'cpu:6GB'"),
        (("nvme", 0.5, 1), "'cpu' and 'nvme' take all of it"),
        ("disk:0.5", "expected 'cpu', 'nvme'"),
        ("nvme:fast", "a number of bytes, or a text such as '6GB'"),
        ("nvme:", "a number of bytes, or a text such as '6GB'"),
        ("nvme:0", "a share lies above 0"),
        ({"device": "nvme", "share": 0.5}, "or both in one text: 'nvme:0.5'"),
        ({"bytes": "6GB"}, "or both in one text: 'cpu:6GB'"),
    ],
    ids=repr,
)
def test_where_optimizer_states_go_is_a_tier_a_share_or_a_budget(value: Any, words: str) -> None:
    said = refusal(1, offload_optimizer=value, nvme="/nvme")
    assert "offload_optimizer" in said and words in said


@pytest.mark.parametrize("value", ["", [], (), 3, [3], {"/a"}, [None], ["/a", ""]], ids=repr)
def test_folders_are_paths(value: Any) -> None:
    assert refusal(nvme=value).startswith(f"nvme={value!r}: expected a folder")


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_parameters_that_every_rank_computes_from_cannot_leave(stage: int, tier: str) -> None:
    said = refusal(stage, offload_param=tier, offload_optimizer=tier, nvme="/nvme")
    assert "is replicated" in said and "(stage 3)" in said and "leave offload_param out" in said


@pytest.mark.parametrize("optimizer", [None, "cpu"])
def test_parameters_on_nvme_take_the_optimizer_with_them(optimizer: str | None) -> None:
    assert "give offload_optimizer='nvme' too" in refusal(
        offload_param="nvme", offload_optimizer=optimizer, nvme="/nvme"
    )


APART = [("cpu", None), ("nvme", None), ("nvme", "cpu")]


@pytest.mark.parametrize(("gradients", "optimizer"), APART)
def test_gradients_go_where_the_states_are_stepped(gradients: str, optimizer: str | None) -> None:
    said = refusal(2, offload_gradients=gradients, offload_optimizer=optimizer, nvme="/nvme")
    assert (
        f"gradients are stored on {NAMES[gradients].value!r}" in said
        and f"states on {NAMES[optimizer].value!r}" in said
    )


@pytest.mark.parametrize(
    "options",
    [{"offload_optimizer": "nvme"}, {"offload_optimizer": "nvme", "offload_param": "nvme"}],
    ids=repr,
)
def test_nvme_needs_a_folder(options: dict[str, str]) -> None:
    assert "names no folder: give nvme=" in refusal(**options)


@pytest.mark.parametrize(
    "value", [0, -4096, 4096, 65535, 65536 + 1, 65536.0, True, "1MB"], ids=repr
)
def test_a_chunk_is_whole_sectors_and_not_few(value: Any) -> None:
    said = refusal(offload_optimizer="nvme", nvme="/nvme", chunk=value)
    assert said.startswith(f"chunk={value!r}: ") and str(SECTOR) in said


@pytest.mark.parametrize("value", [0, 65, 1.0, True, "4"], ids=repr)
def test_threads_are_from_1_to_64(value: Any) -> None:
    said = refusal(offload_optimizer="nvme", nvme="/nvme", nvme_threads=value)
    assert said == f"nvme_threads={value!r}: expected a number of threads from 1 to 64."


@pytest.mark.parametrize("value", [0, -0.1, 1.1, "0.5", True, None], ids=repr)
def test_a_share_of_a_recipe_is_above_0_and_at_most_1(value: Any) -> None:
    recipe = Recipe.zero(3, offload_optimizer="cpu")
    with pytest.raises(
        ValueError, match=re.escape(f"offload_share={value!r}: expected a share above 0")
    ):
        recipe.replace(offload_share=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "6GB", True], ids=repr)
def test_the_budget_of_a_recipe_is_whole_bytes(value: Any) -> None:
    recipe = Recipe.zero(3, offload_optimizer="cpu")
    with pytest.raises(
        ValueError, match=re.escape(f"offload_bytes={value!r}: expected a number of bytes above 0")
    ):
        recipe.replace(offload_bytes=value)


@pytest.mark.parametrize("value", [0, -1, "much", True], ids=repr)
def test_a_budget_of_activations_is_checked_in_a_changed_copy_too(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"offload_activations={value!r}: expected")):
        Recipe.zero(3).replace(offload_activations=value)
    assert Recipe.zero(3).replace(offload_activations="8GB").offload_activations == 8 * 10**9


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ({"activations": 1 << 30}, "activations is now offload_activations"),
        ({"offload_share": 0.6}, "offload_share is now offload_optimizer=0.6"),
        ({"offload_bytes": 1 << 30}, "offload_bytes is now offload_optimizer='6GB'"),
    ],
    ids=repr,
)
def test_a_former_spelling_is_told_what_is_written_now(former: dict[str, Any], now: str) -> None:
    assert now in refusal(**former)


def test_stepping_behind_the_backward_pass_needs_something_to_step() -> None:
    assert "offload_optimizer says where they are" in refusal(step_in_backward=True)
    assert "True or False" in refusal(offload_optimizer="cpu", step_in_backward=1)
    assert Recipe.zero(2, offload_optimizer="cpu", step_in_backward=True).step_in_backward


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("offload_optimiser", "offload_optimizer"),
        ("offload_params", "offload_param"),
        ("offload_gradient", "offload_gradients"),
    ],
)
def test_a_misspelt_tier_is_told_the_right_one(given_name: str, meant: str) -> None:
    assert f"Did you mean {meant!r}?" in refusal(**{given_name: "cpu"})


# -- notes, and what a recipe says of itself -------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nvme": "/nvme"}, ["nvme"]),
        ({"nvme": "/nvme", "offload_optimizer": "cpu", "chunk": 65536}, ["chunk", "nvme"]),
        ({"nvme_threads": 8}, ["nvme_threads"]),
        ({"offload_optimizer": "nvme", "nvme": "/nvme", "chunk": 65536, "nvme_threads": 8}, []),
        ({"offload_optimizer": 0.5}, []),
    ],
    ids=repr,
)
def test_an_option_about_a_tier_that_nothing_rests_on_is_noted_once(
    options: dict[str, Any], named: list[str]
) -> None:
    notes = Recipe.zero(2, **options).notes
    assert sorted(note.partition("=")[0] for note in notes) == sorted(named)
    assert all("has no effect" in note for note in notes)


@pytest.mark.parametrize("field", [{"offload_share": 0.5}, {"offload_bytes": 100}], ids=repr)
def test_an_amount_of_states_that_stay_is_noted(field: dict[str, Any]) -> None:
    (note,) = Recipe.zero(2).replace(**field).notes
    assert note.startswith(next(iter(field))) and "has no effect" in note


def test_parameters_without_their_optimizer_are_noted_to_be_the_frozen_ones() -> None:
    notes = Recipe.zero(3, offload_param="cpu").notes
    assert (
        len(notes) == 1
        and "moves frozen parameters only" in notes[0]
        and "without offload_optimizer" in notes[0]
    )
    assert Recipe.zero(3, offload_param="cpu", offload_optimizer="cpu").notes == ()


def test_a_note_goes_when_something_rests_there() -> None:
    recipe = Recipe.zero(2, nvme="/nvme")
    assert (
        recipe.notes
        and not recipe.replace(
            gradients=replace(recipe.gradients, tier=N), optimizer=replace(recipe.optimizer, tier=N)
        ).notes
    )


def test_a_recipe_describes_its_tiers() -> None:
    recipe = zero(
        offload_optimizer="nvme:0.5", offload_param="nvme", offload_activations="8GB", tile="256MB", step_in_backward=True,
    )  # fmt: skip
    said = recipe.describe()
    assert said.count("nvme") >= 3 and "/nvme" in said
    for words in (
        "50% of the states off the device",
        "in the backward pass",
        "up to 8,000,000,000 bytes",
        "above 256,000,000 bytes",
    ):
        assert words in said
    assert "off the device" not in zero(offload_optimizer="cpu").describe()
    assert "1,000 bytes of states a rank" in zero(offload_optimizer=1000).describe()
    assert "activations on the host" in zero(offload_activations="cpu").describe()


shares = st.floats(0, 1, exclude_min=True)
budgets = st.integers(2, UNLIMITED - 1)
optimizers = st.one_of(
    st.sampled_from([None, "cpu", "nvme"]),
    shares,
    budgets,
    st.builds("{}:{!r}".format, st.sampled_from(["cpu", "nvme"]), st.one_of(shares, budgets)),
)


@given(
    st.sampled_from([0, 1, 2, 3]), optimizers, st.sampled_from([None, "cpu", "nvme"]), st.sampled_from([None, "cpu", "nvme"]),
    st.sampled_from([None, "cpu", "1GB"]), st.sampled_from(["fp32", "bf16", "fp16"]),
)  # fmt: skip
def test_what_is_built_keeps_the_order_of_coldness_and_its_placements(
    stage: int, optimizer: Any, gradients: Any, parameters: Any, activations: Any, precision: str
) -> None:
    options = {
        "offload_optimizer": optimizer,
        "offload_gradients": gradients,
        "offload_param": parameters,
        "nvme": "/nvme",
    }
    try:
        recipe = Recipe.zero(stage, precision=precision, offload_activations=activations, **options)
    except ValueError as error:
        assert len(str(error)) > 60 and str(error).endswith((".", ")")), error
        return
    order = [D, H, N]
    p, g, o = (order.index(tier) for tier in tiers(recipe))
    assert g <= o and (p <= o or o == 0) and (g == 0) == (o == 0)
    assert (
        recipe.parameters.placement,
        recipe.gradients.placement,
        recipe.optimizer.placement,
    ) == PLACEMENTS_OF_STAGE[stage]
    assert recipe.stage == stage and 0 < recipe.offload_share <= 1
    assert recipe.replace() == recipe
    assert all(
        isinstance(row, Row) for row in (recipe.parameters, recipe.gradients, recipe.optimizer)
    )
