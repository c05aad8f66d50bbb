"""The table of options and what is made from it agree: the signature of `Recipe.zero`, the fields of
a recipe, command lines, configuration files, the page of options.

    python tests/recipe/test_options.py     # writes the tables of docs/options.md anew
"""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import typer

from onefold import Recipe
from onefold.cli.app import app
from onefold.recipe.core import OPTIONS
from onefold.recipe.options import Option, choices_of
from onefold.train.config import TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
BEGIN = "<!-- made by `make options` from src/onefold/recipe/core.py -->"
END = "<!-- end of the options -->"
#: A value that is not the default, for options whose type does not name one.
OTHER: dict[str, Any] = {
    "reduce_at": "boundary",
    "units": ["blocks.0"], "group": 2, "shard_group": 2, "offload_optimizer": "cpu", "offload_amount": 0.5, "offload_activations": "8GB",
    "nvme": "/disk", "nvme_threads": 8, "chunk": 65536, "prefetch": 3, "in_flight": 3,
    "sync_buffers": "norms", "whole": ["*.weight"], "stall_timeout": 5.0,
}  # fmt: skip


def another(option: Option) -> Any:
    """A value that is not the default."""
    if option.name in OTHER:
        return OTHER[option.name]
    if option.type is bool:
        return not option.default
    choices = choices_of(option.type)
    assert choices, f"{option.name}: give OTHER a value that is not the default"
    return next(choice for choice in choices if choice != option.default)


# -- the signature and the fields -------------------------------------------------------------------


def test_the_signature_has_every_option_and_its_default() -> None:
    for made in (Recipe, Recipe.zero):
        parameters = dict(inspect.signature(made).parameters)
        parameters.pop("remarks")
        assert list(parameters) == list(OPTIONS) and next(iter(parameters)) == "stage"
        for name, option in OPTIONS.items():
            default, kind = parameters[name].default, parameters[name].kind
            assert default == (inspect.Parameter.empty if option.default is ... else option.default)
            assert kind is inspect.Parameter.KEYWORD_ONLY or name == "stage"


def test_every_option_reaches_the_recipe_or_is_said_to_change_nothing() -> None:
    needs: dict[str, dict[str, Any]] = {
        "optimizer_over": {"shard_group": 2},
        "offload_gradients": {"offload_optimizer": "nvme", "nvme": "/disk"},
        "offload_param": {"offload_optimizer": "cpu"},
        "offload_amount": {"offload_optimizer": "cpu"},
        "step_in_backward": {"offload_optimizer": "cpu"},
        "cast_inputs": {"precision": "bf16"},
        "nvme_threads": {"offload_optimizer": "nvme", "nvme": "/disk"},
        "chunk": {"offload_optimizer": "nvme", "nvme": "/disk"},
        "stochastic_rounding": {"moments": "bf16"},
    }
    for name in OPTIONS.keys() - {"stage"}:
        beside = needs.get(name, {})
        changed = Recipe.zero(3, **beside, **{name: another(OPTIONS[name])})
        assert changed != Recipe.zero(3, **beside) or changed.notes, name


# -- command lines and configuration files ----------------------------------------------------------


def flags_of(command: str) -> dict[str, str]:
    """{option of `onefold COMMAND`: its help}."""
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {flag: p.help or "" for p in found.params for flag in p.opts if flag.startswith("--")}


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_command_has_the_options_that_the_table_gives_it_and_no_others(command: str) -> None:
    flags = flags_of(command)
    for option in OPTIONS.values():
        assert (option.flag in flags) == (command in option.commands), option.flag
        if option.flag in flags and option.name not in ("stage", "precision"):
            assert flags[option.flag].startswith(option.help)


def test_a_configuration_file_has_the_options_of_the_command() -> None:
    fields = TrainConfig.model_fields
    for name, option in OPTIONS.items():
        assert (name in fields) == ("train" in option.commands), name
        if name in fields and name not in ("stage", "precision"):
            assert fields[name].description == option.help
            assert fields[name].default == option.default
            assert TrainConfig(**{name: option.default}).arguments() == {}


def test_none_takes_an_option_of_a_file_back() -> None:
    for option in OPTIONS.values():
        if option.commands and option.optional and option.name != "precision":
            assert option.of_text("none") is None, option.name


# -- the page ---------------------------------------------------------------------------------------


def may_be(kind: Any) -> str:
    """A type as a table shows it."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        parts = [may_be(part) for part in typing.get_args(kind) if part is not type(None)]
        return ", ".join(dict.fromkeys(parts))
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{value!r}`" for value in typing.get_args(kind))
    if kind is bool:
        return "`True`, `False`"
    return "a list" if typing.get_origin(kind) is not None else f"`{kind.__name__}`"


def tables() -> str:
    """The options in Markdown, a table under each heading."""
    lines = []
    for panel in dict.fromkeys(option.panel for option in OPTIONS.values()):
        lines += [f"### {panel}", "", "| option | may be | default | what it does | command |", "|---|---|---|---|---|"]  # fmt: skip
        for option in OPTIONS.values():
            if option.panel == panel:
                default = "" if option.default is ... else f"`{option.default!r}`"
                commands = ", ".join(option.commands)
                words = (f"`{option.name}`", may_be(option.type), default, option.help, commands)
                lines.append(f"| {' | '.join(words)} |")
        lines.append("")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "the page has no place for the options"
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def test_the_page_has_the_table_as_it_is() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "write it anew: make options"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
