"""Invariant 7: nothing is silently ignored. An option that cannot apply raises, or is listed once
at the start.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import onefold
from onefold import Recipe
from ranks import run_ranks
from zoo import Block, TinyGPT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stage": 4}, "stage=4.*0, 1, 2 or 3"),
        ({"stage": "3"}, "stage='3'"),
        ({"stage": True}, "stage=True"),
        ({"stage": 2, "precision": "fp8"}, "precision='fp8'.*bf16"),
        ({"stage": 0, "reduce_at": "micro-batch"}, "reduce_at='micro-batch'"),
        ({"stage": 1, "reduce_at": "micro-batch"}, "reduce_at='micro-batch'"),
        ({"stage": 2, "reduce_at": "never"}, "reduce_at='never'.*boundary"),
        ({"stage": 3, "prefetch": -1}, "prefetch=-1"),
        ({"stage": 3, "prefetch": 1.5}, "prefetch=1.5"),
        ({"stage": 3, "in_flight": -2}, "in_flight=-2"),
        ({"stage": 3, "stall_timeout": 0}, "stall_timeout=0"),
        ({"stage": 3, "wire": torch.int8}, "wire=torch.int8"),
        ({"stage": 3, "wire": torch.bfloat16}, "wire=torch.bfloat16.*Did you mean 'bf16'"),
        ({"stage": 3, "activations": 1 << 30}, "activations is now offload_activations"),
        ({"stage": 3, "prefech": 2}, "prefech.*[Dd]id you mean 'prefetch'"),
        ({"stage": 3, "reshard_after_foward": False}, "[Dd]id you mean 'reshard_after_forward'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_raises_and_says_what_to_write(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){said}"):
        Recipe.zero(**arguments)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {"reshard_after_forward": False}),
        (1, {"reshard_after_forward": False}),
        (2, {"reshard_after_forward": False}),
        (3, {"overlap": False, "prefetch": 4}),
        (3, {"overlap": False, "in_flight": 4}),
    ],
    ids=str,
)
def test_an_option_that_cannot_apply_raises_or_is_listed(
    stage: int, options: dict[str, Any]
) -> None:
    try:
        recipe = Recipe.zero(stage, **options)
    except ValueError as error:
        assert any(name in str(error) for name in options), (
            f"the error names none of {list(options)}: {error}"
        )
        return
    engine = onefold.engine_of(onefold.shard(TinyGPT(), recipe))
    listed = " ".join([*recipe.notes, recipe.describe(), engine.summary()])
    assert any(name in listed for name in options), (
        f"{options} does nothing at stage {stage} and nobody says so: {listed}"
    )


@pytest.mark.parametrize("units", [("blocks.9",), ("no_such_module",), (torch.nn.LSTM,)], ids=str)
def test_units_that_the_model_does_not_have_raise(units: tuple[Any, ...]) -> None:
    name = units[0] if isinstance(units[0], str) else units[0].__name__
    with pytest.raises(ValueError, match=re.escape(name)):
        onefold.shard(TinyGPT(), Recipe.zero(3), units=units)


def test_a_recipe_is_not_a_stage_number() -> None:
    with pytest.raises((TypeError, ValueError), match=r"Recipe"):
        onefold.shard(TinyGPT(), 3)  # type: ignore[arg-type]


def test_a_model_is_sharded_once() -> None:
    model = onefold.shard(TinyGPT(), Recipe.zero(2))
    with pytest.raises((ValueError, RuntimeError), match=r"already"):
        onefold.shard(model, Recipe.zero(2))


@pytest.mark.parametrize(
    "call",
    ["clip_grad_norm_", "full_params", "full_state_dict", "no_sync", "engine_of", "GradScaler"],
)
def test_a_model_that_is_not_sharded_is_told_so(call: str) -> None:
    arguments = (1.0,) if call == "clip_grad_norm_" else ()
    with pytest.raises((ValueError, TypeError), match=r"onefold\.shard"):
        result = getattr(onefold, call)(TinyGPT(), *arguments)
        if hasattr(result, "__enter__"):
            with result:
                pass


def inside(units: Any) -> list[str]:
    model = onefold.shard(TinyGPT(), Recipe.zero(3, stall_timeout=10.0), units=units)
    return [unit.name for unit in onefold.engine_of(model).units]


def test_units_are_the_repeated_block_when_nobody_says_otherwise() -> None:
    names = run_ranks(2, inside, None)[0]
    assert {"blocks.0", "blocks.1", "blocks.2"} <= set(names), names


def test_units_are_what_the_user_names() -> None:
    names = run_ranks(2, inside, (Block, "head"))[0]
    assert {"blocks.0", "blocks.1", "blocks.2", "head"} <= set(names), names


def summary_of(stage: int) -> str:
    model = onefold.shard(TinyGPT(), Recipe.zero(stage, stall_timeout=10.0))
    return onefold.engine_of(model).summary()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_summary_tells_units_elements_and_padding(stage: int) -> None:
    summary = run_ranks(2, summary_of, stage)[0]
    for word in ("blocks.1", "padding", "parameters", "gradients", "optimizer"):
        assert word in summary, f"{word!r} is not in the summary:\n{summary}"


def test_a_recipe_prints_its_table() -> None:
    table = Recipe.zero(3, precision="bf16").describe()
    assert all(
        word in table
        for word in ("parameters", "gradients", "optimizer", "sharded", "bfloat16", "float32")
    ), table
