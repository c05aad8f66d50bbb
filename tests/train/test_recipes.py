"""docs/recipes.md: each plan says what the page shows, each command's recipe trains.

python tests/train/test_recipes.py --write      writes the tables anew
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytestmark = pytest.mark.one_in(2)

#: Of ranks.SERVERS.
SERVER = "libraries"

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BLOCK = re.compile(r"<!-- plan -->\n.*?<!-- /plan -->", re.DOTALL)
#: What the small run does not take from the command: where, on what, and how many samples.
OWN = {"model", "data", "output", "seq", "global_batch", "save_every", "async_save", "resume", "lr"}
#: How the page names the links of a plan.
PLACES = {"": "", "inside": "within a node", "between": "between nodes"}
MEMORY = ("stage", "offload_param", "offload_optimizer", "moments", "activation_checkpointing")


@dataclass(frozen=True)
class Recipe:
    """One of the page: its heading, and the options of its two commands."""

    title: str
    train: dict[str, str]
    plan: list[str]


def options(words: list[str]) -> dict[str, str]:
    """{option: value}; "" for one without a value."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            found[name] = "" if following.startswith("--") else following
    return found


def recipes() -> list[Recipe]:
    found = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        block = re.search(r"```\n(.*?)```", section, re.DOTALL)
        assert block is not None, section.splitlines()[0]
        train, plan = (
            shlex.split(line) for line in block.group(1).replace("\\\n", "").splitlines()
        )
        assert "train" in train and plan[:2] == ["onefold", "plan"]
        found.append(Recipe(section.splitlines()[0], options(train), plan[2:]))
    return found


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"


def table(plan: list[str]) -> str:
    """What the plan says, as the page shows it."""
    from onefold.cli.app import app

    done = CliRunner().invoke(app, ["plan", *plan, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["recommended"]
    account = said["account"]
    seconds = account["seconds"]
    assert said["fits"] and said["stage"] == int(options(plan)["stage"])
    links = account["links"] or {"": 0}
    cells = {
        "on a card at peak": f"{gib(sum(account['peak'].values()))} of {gib(said['usable'])}",
        "on the host": gib(account["host"]) if account["host"] else "–",
        "a rank sends": ", ".join(
            f"{gib(n)} {PLACES[place]}".strip() for place, n in links.items()
        ),
        "a step takes": f"{seconds['step']:.1f} s",
        "of it waiting for the wire": f"{seconds['exposed communication']:.2f} s",
        "tokens/s": f"{account['tokens_per_s']:,.0f}",
        "MFU": f"{account['mfu']:.0%}",
    }
    rows = (" | ".join(cells), "|".join("---" for _ in cells), " | ".join(cells.values()))
    return "\n".join(f"| {row} |" for row in rows)


def written() -> str:
    """The page with tables made anew."""
    tables = iter([table(recipe.plan) for recipe in recipes()])
    return BLOCK.sub(
        lambda _: f"<!-- plan -->\n\n{next(tables)}\n\n<!-- /plan -->", PAGE.read_text()
    )


def rows_of(jobs: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Any]]]:
    """On one of several ranks: losses of each job, and what the run says of itself."""
    from onefold.train.config import resolve
    from onefold.train.loop import train
    from onefold.train.prepare import prepare
    from onefold.train.report import describe
    from started_runs import this_rank

    ranks, found = this_rank(), []
    for job in jobs:
        rows: list[dict[str, Any]] = []
        run = prepare(resolve(job), ranks, lambda line: None)
        train(run, lambda: 0, rows.append)
        tiers = {run.recipe.optimizer.tier.value, run.recipe.parameters.tier.value}
        losses = [row["loss"] for row in rows if "loss" in row]
        found.append((losses, {**describe(run), "tiers": tiers}))
    return found


def small(recipe: Recipe, model: Path, text: Path, ranks: int) -> dict[str, Any]:
    """The command's options for a small Llama on CPU ranks: two micro-batches a step."""
    taken = {name: value for name, value in recipe.train.items() if name not in OWN}
    micro = int(taken["micro_batch"])
    return {
        **taken,
        "model": str(model), "data": str(text), "tokenizer": "bytes", "output": "unused",
        "device": "cpu", "seq": 32, "global_batch": 2 * micro * ranks, "steps": 4, "lr": 3e-2,
        "eval_every": 0, "precision": "bf16",
        # Eight machines of eight: here two of two
        **({"group": 2} if ranks == 4 else {}),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_recipe_trains_a_small_llama_as_without_it(
    tmp_path: Path, ranks: int, sample: Any
) -> None:
    """Losses of the recipe beside stage 0 with everything on the device; what is asked for is on."""
    for module in ("transformers", "peft"):
        pytest.importorskip(module)
    from hf_folders import saved
    from ranks import run_ranks

    wanted = [r for r in recipes() if ("64" in r.title) == (ranks == 4)]
    assert len(wanted) == (1 if ranks == 4 else 4)
    wanted = sample(wanted, 2)
    model, text = saved(tmp_path, "files"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    jobs = []
    for recipe in wanted:
        job = small(recipe, model, text, ranks)
        plain = {name: value for name, value in job.items() if name not in (*MEMORY, "frozen")}
        jobs += [job, {**plain, "stage": "0", "group": None}]
    found = run_ranks(ranks, rows_of, jobs)[0]
    for recipe, (losses, said), (plain_losses, plain_said) in zip(
        wanted, found[::2], found[1::2], strict=True
    ):
        assert len(losses) == 4 and losses[-1] < 0.99 * losses[0], (recipe.title, losses)
        # Weights rounded to 4 bits begin elsewhere
        near = 0.05 if "frozen" in recipe.train else 0.005
        assert losses == pytest.approx(plain_losses, rel=near), recipe.title
        assert str(said["stage"]) == recipe.train["stage"] and plain_said["stage"] == 0
        assert said["accumulation"] == 2 and said["precision"] == "bf16"
        on_host = "offload_optimizer" in recipe.train
        assert said["tiers"] == {"host" if on_host else "device"}
        assert ("nf4" in said["recipe"]) is ("frozen" in recipe.train)
        if "moments" in recipe.train:
            assert f"moments={recipe.train['moments']!r}" in said["recipe"]
        share = said["trained"] / said["parameters"]
        assert share < 0.6 if "lora" in recipe.train else share == 1


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    PAGE.write_text(written())
