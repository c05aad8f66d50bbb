"""Helpers that the commands share: make options from tables, report errors and exit."""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

from onefold.recipe.core import OPTIONS
from onefold.recipe.options import Option, choices_of

Command = typing.TypeVar("Command", bound=Callable[..., Any])


def option(
    text: str,
    panel: str | None = None,
    *flags: str,
    shown: bool = False,
    words: Any = None,
    known: str = "",
) -> Any:
    """Make a command's option, for `Annotated`.

    Args:
        flags: the option's names, if they do not follow from the parameter's name.
        shown: whether the help shows the default.
        words: the type of its values. A long list of `Literal` values goes after the description,
            where the help can wrap it; that leaves room for the names of options.
        known: text at the end of the help.
    """
    choices = typing.get_args(words) if typing.get_origin(words) is Literal else ()
    listed = ", ".join(map(str, choices))
    long = len(listed) > 16
    return typer.Option(
        *flags,
        help=f"{text} One of {listed}.{known}" if long else f"{text}{known}",
        metavar="<choice>" if long else None,
        rich_help_panel=panel,
        show_default=shown,
    )


Json = Annotated[
    bool, option("Print one JSON object, in place of words and tables.", None, "--json")
]


class _Command(TyperCommand):
    """A command that takes no empty text, no infinity and no number of more than 64 bits.

    Its help leaves out the `--no-` form of switches. With a column for that form, the names of
    options would not fit in a terminal of 80 columns.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line. See click."""
        # An empty path would be the working folder
        for before, word in zip(["", *args], args, strict=False):
            if re.fullmatch(r"(--[\w-]+=)?", word):
                name = word.rstrip("=") or before
                what = name if name.startswith("--") else "an argument"
                refuse(f"{what} is an empty text: give a value, or leave it out.", "--json" in args)
        rest: list[str] = super().parse_args(ctx, args)
        for name, value in ctx.params.items():
            if isinstance(value, int | float) and not -(1 << 63) < value < 1 << 63:
                refuse(
                    f"--{name.replace('_', '-')} {str(value)[:40]}: expected a finite number of at"
                    " most 64 bits.",
                    bool(ctx.params.get("as_json") or ctx.params.get("json")),
                )
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help. See click."""
        shown = copy.copy(self)
        shown.params = [copy.copy(parameter) for parameter in self.params]
        for one in shown.params:
            one.secondary_opts = []
        TyperCommand.format_help(shown, ctx, formatter)


def with_readable_help(part: typer.Typer) -> None:
    """Give the commands of `part` the class `_Command`, and join the lines of each paragraph.
    typer would keep the line ends of a docstring, and the terminal could not wrap them.
    """
    for command in part.registered_commands:
        assert command.callback is not None
        text = inspect.cleandoc(command.help or command.callback.__doc__ or "")
        command.help = "\n\n".join(" ".join(one.split()) for one in text.split("\n\n"))
        if command.cls in (None, TyperCommand):
            command.cls = _Command
    for group in part.registered_groups:
        assert group.typer_instance is not None
        with_readable_help(group.typer_instance)


def parameter(
    name: str, kind: Any, text: str, panel: str, default: Any = None, both: bool = True
) -> inspect.Parameter:
    """Make an option that is None if it was not given.

    Args:
        default: the value that then holds, for the help.
        both: whether a switch also has the form --no-NAME.
    """
    flag = name.replace("_", "-")
    flags = [f"--{flag}/--no-{flag}" if kind is bool and both else f"--{flag}"]
    known = "" if default is None or isinstance(default, bool) else f" (default: {default})"
    annotation = Annotated[kind | None, option(text, panel, *flags, words=kind, known=known)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def recipe_parameter(row: Option, both: bool = True) -> inspect.Parameter:
    """Make the option of one row of the recipe's table. `both`: see `parameter`."""
    names = [str(choice) for choice in choices_of(row.type)]
    kind: Any = str
    if names:
        kind = Literal[tuple([*names, "none"] if row.optional else names)]
    elif row.repeated:
        kind = list[str]
    elif row.type in (bool, int, float):
        kind = row.type
    return parameter(row.name, kind, row.help, row.panel, row.default, both)


def with_parameters(function: Command, added: Iterable[inspect.Parameter]) -> Command:
    """Add the parameters to the signature that typer reads. `function` takes them as **keywords."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [*(p for p in own if p.kind is not p.VAR_KEYWORD), *added]
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
    )
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def asked_of(words: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a command's options to arguments of `Recipe.zero`, without those at their default.

    Raises:
        ValueError: an option cannot have that value.
    """
    found = {}
    for name, word in words.items():
        if word is None or word == []:
            continue
        row = OPTIONS[name]
        try:
            value = row.of_text(word)
        except ValueError as error:
            raise ValueError(f"{row.flag} {word}: {error}") from None
        if value != row.default:
            found[name] = value
    return found


def refuse(error: Exception | str, as_json: bool, code: int = 2, kind: str = "") -> NoReturn:
    """Report an error on stderr and, with --json, as a line of JSON; exit with status `code`."""
    if as_json:
        said = {"event": "error", "kind": kind or type(error).__name__, "message": str(error)}
        print(json.dumps(said))
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(code) from None
