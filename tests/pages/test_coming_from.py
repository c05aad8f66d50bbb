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
from typing import Any

import pytest
import torch
import torch.distributed as dist
from printed import DS_CONFIG, ROOT, Block, Given, Model, blocks_of

import onefold
from on_ranks import on_ranks
from onefold.deepspeed import recipe_from

PAGE = ROOT / "docs" / "coming-from.md"


def pairs() -> list[tuple[Block, Block]]:
    """(the other library's block, Onefold's), in the order of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    ends = [n for n, line in enumerate(lines, 1) if re.match(r'<div class="grid"|</div>', line)]
    titled = [block for block in blocks_of(PAGE) if block.title]
    found = []
    for begin, end in zip(ends[::2], ends[1::2], strict=True):
        inside = [block for block in titled if begin < block.line < end]
        found += list(zip(inside[::2], inside[1::2], strict=True))
    assert 2 * len(found) == len(titled), "a block outside of a pair"
    return found


PAIRS = pairs()
OF_TORCH = [pair for pair in PAIRS if pair[0].title in ("DDP", "FSDP2")]
OF_DEEPSPEED = [
    pair for pair in PAIRS if pair[0].title == "DeepSpeed" and pair[0].language == "python"
]


def trained(block: Block, folder: Path) -> dict[str, Any]:
    """The block's weights at its end, whole."""
    if dist.get_rank() == 0:
        folder.mkdir()
        (folder / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    dist.barrier()
    with contextlib.chdir(folder):
        torch.manual_seed(0)
        given = Given(block.text, dist.get_rank(), dist.get_world_size())
        if "onefold.load(" in block.text:  # a checkpoint that was saved before
            onefold.save("runs/a/step-1", model=given["model"], optimizer=given["optim"], step=1)
        exec(compile(block.text, str(block), "exec"), given)
        dist.barrier()
    if "onefold" in block.text:
        return onefold.full_state_dict(given["model"])
    state = given["model"].state_dict()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


@on_ranks(2)
@pytest.mark.parametrize("pair", OF_TORCH, ids=lambda pair: str(pair[0]))
def test_both_sides_run_and_train_to_the_same_weights(
    pair: tuple[Block, Block], folder: Path
) -> None:
    theirs, ours = trained(pair[0], folder / "theirs"), trained(pair[1], folder / "ours")
    near = {"rtol": 1e-5, "atol": 1e-7}
    if dist.get_rank() == 0:
        assert theirs.keys() == ours.keys()
        torch.testing.assert_close(ours, theirs, **near)
    if "torch.save(" in pair[0].text and dist.get_rank() == 0:
        first, second = (torch.load(folder / side / "step-1.pt") for side in ("theirs", "ours"))
        assert first["model"].keys() == second["model"].keys()
        torch.testing.assert_close(second["optimizer"], first["optimizer"], **near)


@on_ranks(2)
@pytest.mark.parametrize("pair", OF_DEEPSPEED, ids=lambda pair: str(pair[0]))
def test_onefolds_side_of_deepspeed_runs(pair: tuple[Block, Block], folder: Path) -> None:
    ast.parse(pair[0].text)
    after = trained(pair[1], folder / "ours")
    torch.manual_seed(0)
    before = Model().state_dict()
    if dist.get_rank() == 0:
        assert after.keys() == before.keys()
        steps = "engine.step()" in pair[1].text
        assert not steps or any(not torch.equal(after[key], before[key]) for key in before)


def test_a_configuration_and_the_options_of_the_tables_mean_the_recipe_beside_them() -> None:
    for theirs, ours in PAIRS:
        assert ours.title == "Onefold", theirs
        if theirs.language == "json":
            names: dict[str, Any] = {"Recipe": onefold.Recipe}
            exec(compile(ours.text, str(ours), "exec"), names)
            assert recipe_from(json.loads(theirs.text)) == names["recipe"], theirs
    assert {"DDP", "FSDP2", "DeepSpeed"} == {pair[0].title for pair in PAIRS} and len(PAIRS) >= 8
    for cell in re.findall(r"(?m)^\| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8")):
        for code in re.findall(r"`((?:\w+=[^`]+))`", cell):
            onefold.Recipe.zero(**({"stage": 3} | eval(f"dict({code})", {"torch": torch})))
