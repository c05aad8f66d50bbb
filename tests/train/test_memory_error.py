"""When memory runs out, the error says what was held, where, which line of the plan was wrong, and
what to change.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import onefold
from onefold import Recipe
from onefold.memory import GATHERED, GRADIENTS
from onefold.plan.schema import ACTIVATIONS, Account
from onefold.processes.ranks import Ranks
from onefold.train.config import resolve
from onefold.train.loop import train
from onefold.train.memory_error import _colder as colder
from onefold.train.memory_error import _wrong_line as wrong_line
from onefold.train.memory_error import explain, is_out_of_memory
from onefold.train.prepare import prepare
from onefold.wording import readable

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "gloo", None)


def test_the_error_names_unit_ledger_plan_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    given = {
        "model": "llama:tiny",
        "tokenizer": "bytes",
        "data": str(tmp_path / "text.txt"),
        "seq": 32,
        "steps": 3,
        "precision": "bf16",
    }
    run = prepare(resolve(given), ALONE, lambda line: None)
    block = next(u for u in onefold.engine_of(run.model).units if u.name != "(root)")
    module = block.module()
    assert module is not None
    module.register_forward_pre_hook(lambda *_: torch.empty(1 << 60, dtype=torch.uint8) and None)
    with pytest.raises(RuntimeError) as raised:
        train(run, lambda: False, lambda row: None)
    assert is_out_of_memory(raised.value)
    said = str(explain(run, raised.value))
    assert f"forward pass of unit {block.name!r}" in said, said
    assert "master weights" in said and "the plan" in said, said
    assert "--micro-batch" in said and "--activation-checkpointing full" in said, said
    # On a CPU the host is the device
    assert said.endswith("--offload-optimizer nvme --nvme FOLDER."), said


def test_what_could_still_leave_the_device_is_advised(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    given = {
        "model": "llama:tiny",
        "tokenizer": "bytes",
        "data": str(tmp_path / "text.txt"),
        "seq": 32,
        "steps": 1,
        "stage": "3",
    }
    run = prepare(resolve(given), ALONE, lambda line: None)
    disk = {"offload_optimizer": "nvme", "nvme": str(tmp_path)}
    for options, advised in (
        ({"offload_optimizer": "cpu"}, ["--offload-optimizer nvme --nvme FOLDER"]),
        ({**disk, "offload_optimizer": "nvme:0.5"}, ["--offload-optimizer nvme --nvme FOLDER"]),
        (disk, ["--offload-param nvme"]),
        ({**disk, "offload_param": "nvme"}, ["--tile 256MB (if one weight is what does not fit)"]),
        ({**disk, "offload_param": "nvme", "tile": "256MB"}, []),
    ):
        run.recipe = Recipe.zero(3, **options)
        assert colder(run) == advised, options
    run.ranks = replace(ALONE, device=torch.device("cuda"))
    run.recipe = Recipe.zero(3)
    assert colder(run) == ["--offload-optimizer cpu", "--offload-activations cpu"]


def test_other_errors_are_not_taken_for_it() -> None:
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert is_out_of_memory(MemoryError())


def test_a_line_of_the_engine_that_held_more_than_was_planned_is_named() -> None:
    planned = Account(
        peak={GATHERED: 100 << 20, ACTIVATIONS: 1 << 30},
        ledger={GATHERED: 150 << 20, GRADIENTS: 10 << 20},
    )
    said = wrong_line(planned, {GATHERED: 160 << 20, GRADIENTS: 30 << 20}, 2 << 30)
    assert (
        said == f"the plan was wrong about {GRADIENTS}: it expected at most {readable(10 << 20)}."
    )
    kept = wrong_line(planned, {GATHERED: 150 << 20, GRADIENTS: 10 << 20}, 2 << 30)
    assert "the engine's lines hold" in kept and f"{ACTIVATIONS} {readable(1 << 30)}" in kept, kept
