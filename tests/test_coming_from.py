"""docs/coming-from.md keeps its word: the code of both sides of each pair runs, on two ranks, and
both train to the same weights.

Pairs stand in one `<div class="grid">` each, with the library's name as the title of a block.
DeepSpeed is no dependency: its blocks are only parsed, its configurations are read.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.integrations.deepspeed import recipe_from
from ranks import run_ranks
from test_documentation import DS_CONFIG, Block, Model, batches, blocks_of

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
RANKS = 2


def pairs_of(page: Path) -> list[tuple[Block, Block]]:
    """(the other library's block, Onefold's), in the order of the page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    grids = [n for n, line in enumerate(lines, 1) if line.startswith('<div class="grid"')]
    ends = [n for n, line in enumerate(lines, 1) if line == "</div>"]
    assert len(grids) == len(ends)
    blocks = blocks_of(page)
    pairs = []
    for begin, end in zip(grids, ends, strict=True):
        inside = [block for block in blocks if begin < block.line < end]
        pairs += list(zip(inside[::2], inside[1::2], strict=True))
    assert sum(map(len, pairs)) == len([b for b in blocks if b.title]), "a block outside of a pair"
    return pairs


PAIRS = pairs_of(PAGE)
OF_TORCH = [pair for pair in PAIRS if pair[0].title in ("DDP", "FSDP2")]
CONFIGURATIONS = [pair for pair in PAIRS if pair[0].language == "json"]
OF_DEEPSPEED = [
    pair for pair in PAIRS if pair[0].title == "DeepSpeed" and pair[0].language == "python"
]


def given(text: str) -> dict[str, Any]:
    """What a block may use without making it."""
    torch.manual_seed(0)
    model = Model()
    rank = dist.get_rank()
    names: dict[str, Any] = {
        "torch": torch,
        "onefold": onefold,
        "Recipe": onefold.Recipe,
        "model": model,
        "loader": batches(6)[rank::RANKS],
        "micro_batches": batches(6)[rank::RANKS],
        "MyModel": Model,
        "config": SimpleNamespace(),
        "state": Model().state_dict(),
    }
    if "onefold.load(" in text:  # a checkpoint that was saved before
        onefold.shard(model, onefold.Recipe.zero(3))
        names["optim"] = torch.optim.AdamW(model.parameters(), lr=3e-4)
        onefold.save("runs/a/step-1", model=model, optimizer=names["optim"], step=1)
    return names


def run(text: str, folder: str, name: str) -> dict[str, torch.Tensor]:
    """The block's weights at its end, whole, on each rank that has them."""
    with contextlib.chdir(folder):
        names = given(text)
        dist.barrier()
        exec(compile(text, name, "exec"), names)
        dist.barrier()
        model = names["model"]
        if "onefold" in text:
            return onefold.full_state_dict(model)
        state = model.state_dict()
        return {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in state.items()
        }


def both(theirs: str, ours: str, folder: str) -> tuple[Any, Any]:
    first, second = Path(folder) / "theirs", Path(folder) / "ours"
    for one in (first, second):
        one.mkdir(exist_ok=True)
    return run(theirs, str(first), "theirs"), run(ours, str(second), "ours")


@pytest.mark.parametrize("pair", OF_TORCH, ids=lambda pair: str(pair[0]))
def test_both_sides_run_and_train_to_the_same_weights(
    pair: tuple[Block, Block], tmp_path: Path
) -> None:
    theirs, ours = run_ranks(RANKS, both, pair[0].text, pair[1].text, str(tmp_path))[0]
    assert theirs.keys() == ours.keys()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    if "torch.save(" in pair[0].text:
        saved = [torch.load(tmp_path / side / "step-1.pt") for side in ("theirs", "ours")]
        assert saved[0]["model"].keys() == saved[1]["model"].keys()
        assert saved[0]["optimizer"]["param_groups"] == saved[1]["optimizer"]["param_groups"]
        torch.testing.assert_close(
            saved[1]["optimizer"]["state"], saved[0]["optimizer"]["state"], rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("pair", CONFIGURATIONS, ids=lambda pair: str(pair[0]))
def test_a_configuration_means_the_recipe_beside_it(pair: tuple[Block, Block]) -> None:
    names: dict[str, Any] = {"Recipe": onefold.Recipe}
    exec(compile(pair[1].text, str(pair[1]), "exec"), names)
    assert recipe_from(json.loads(pair[0].text)) == names["recipe"]


def ours_alone(text: str, folder: str) -> dict[str, torch.Tensor]:
    if dist.get_rank() == 0:
        (Path(folder) / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    dist.barrier()
    return run(text, folder, "ours")


@pytest.mark.parametrize("pair", OF_DEEPSPEED, ids=lambda pair: str(pair[0]))
def test_onefolds_side_of_deepspeed_runs(pair: tuple[Block, Block], tmp_path: Path) -> None:
    ast.parse(pair[0].text)
    assert pair[1].title == "Onefold"
    trained = run_ranks(RANKS, ours_alone, pair[1].text, str(tmp_path))[0]
    torch.manual_seed(0)
    before = Model().state_dict()
    assert trained.keys() == before.keys()
    if "engine.step()" in pair[1].text:
        assert any(not torch.equal(trained[key], before[key]) for key in before)


def test_the_page_has_pairs_for_each_library() -> None:
    titles = [pair[0].title for pair in PAIRS]
    assert {"DDP", "FSDP2", "DeepSpeed"} == set(titles) and len(titles) >= 8
    assert all(pair[1].title == "Onefold" for pair in PAIRS)


def test_options_in_the_tables_are_arguments_of_the_recipe() -> None:
    """`name="value"` in a table's right column builds a recipe, or is an argument of shard()."""
    rows = re.findall(r"(?m)^\| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8"))
    for cell in rows:
        for code in re.findall(r"`((?:\w+=[^`]+))`", cell):
            arguments: dict[str, Any] = {}
            exec(compile(f"arguments = dict({code})", code, "exec"), {"torch": torch}, arguments)
            options = arguments["arguments"]
            onefold.Recipe.zero(**({"stage": 3} | options))
