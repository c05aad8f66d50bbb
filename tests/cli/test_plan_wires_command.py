"""`onefold plan` of groups and codecs: every option reaches the recipe, and what cannot be gets a
sentence.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from onefold.cli.plan import plan_command

PLAIN = ("gpt2", "--gpus", "16", "--link", "1g", "--seq", "64")


def command(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan_command)
    return CliRunner().invoke(app, list(arguments))


def test_every_option_is_in_the_recipe_that_comes_out() -> None:
    asked = (
        "--second-copy",
        "--gather-codec",
        "int8",
        "--reduce-codec",
        "fp8",
        "--error-feedback",
        "--wire-rounding",
        "stochastic",
    )
    found = command(*PLAIN, *asked, "--group", "4", "--frozen", "nf4", "--json")
    assert found.exit_code == 0, found.output
    said: dict[str, Any] = json.loads(found.stdout)
    wanted = {
        "stage": 3, "second_copy": True, "gather_codec": "int8", "reduce_codec": "fp8", "error_feedback": True, "group": 4,
        "wire_rounding": "stochastic", "frozen": "nf4",
    }  # fmt: skip
    assert said["recipe"].items() >= wanted.items() and said["slow_links"] is None
    assert [c["stage"] for c in said["stages"]] == [3]
    assert any("no matrix but embeddings is frozen" in note for note in said["notes"])
    hybrid = json.loads(
        command(*PLAIN, "--shard-group", "node", "--optimizer-over", "all", "--json").stdout
    )["recipe"]
    assert hybrid.items() >= {"shard_group": "node", "optimizer_over": "all", "stage": 3}.items()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--group", "0"),
            "--group 0: expected none or 'node' (the launcher's nodes), 'flat' (no groups) or the number of ranks",
        ),
        (("--shard-group", "3"), "groups of 3 ranks do not divide 16 ranks"),
        (("--shard-group", "node", "--second-copy"), "leave one of them out"),
        (("--optimizer-over", "all"), "needs a shard_group"),
        (("--second-copy", "--stage", "2"), "needs sharded parameters: stage 3"),
        (
            ("--frozen", "int8", "--offload-param", "cpu", "--offload-optimizer", "cpu"),
            "leave one of them out",
        ),
        (
            ("--offload-optimizer", "nvme:2000"),
            "nvme:2000 is 2,000 bytes: give a share of at most 1 such as 0.6, or at least 16,384",
        ),
        (("--offload-activations", "8"), "--offload-activations 8 is 8 bytes"),
    ],
)
def test_what_cannot_be_gets_a_sentence(arguments: tuple[str, ...], words: str) -> None:
    found = command(*PLAIN, *arguments)
    assert found.exit_code == 2 and words in found.stderr and "Traceback" not in found.stderr, (
        found.output
    )
