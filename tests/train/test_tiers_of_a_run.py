"""Where state rests, in the words of `onefold train`: read from a command line or a file, refused
in a sentence, told at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold import Tier
from onefold.processes.ranks import Ranks
from onefold.train import prepare as prepare_module
from onefold.train.config import resolve
from onefold.train.launch import check_early
from onefold.train.prepare import Run, prepare
from onefold.train.report import describe
from onefold.wording import TrainError

#: Of ranks.SERVERS.
SERVER = "libraries"

NVME = {"nvme": ("/a", "/b")}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"offload_optimizer": "nvme"}, "the recipe keeps state on NVMe but names no folder"),
        (
            {"offload_param": "cpu", "offload_optimizer": "cpu", "stage": "2"},
            "use stage 3",
        ),
        ({"offload_param": "nvme", **NVME}, "give offload_optimizer='nvme' too"),
        ({"offload_gradients": "cpu"}, "gradients go where the states are stepped"),
        ({"offload_optimizer": "fast"}, "--offload-optimizer 'fast': expected 'cpu', 'nvme'"),
        (
            {"offload_optimizer": "disk:0.5"},
            "--offload-optimizer 'disk:0.5': expected 'cpu', 'nvme'",
        ),
        ({"offload_amount": "0"}, "expected a share above 0"),
        ({"offload_amount": "nan"}, "--offload-amount 'nan': expected a number of bytes"),
        ({"offload_optimizer": True}, "--offload-optimizer True"),
        ({"offload_param": "disk"}, "--offload-param 'disk'"),
        ({"offload_activations": "8XB"}, "--offload-activations '8XB': expected a number of bytes"),
        ({"step_in_backward": True}, "offload_optimizer says where they are"),
        (
            {"step_in_backward": True, "offload_optimizer": "cpu"},
            "before all gradients are known: use --clip 0",
        ),
        (
            {"step_in_backward": True, "offload_optimizer": "cpu", "clip": 0, "precision": "fp16"},
            "before all gradients are known",
        ),
        (
            {
                "step_in_backward": True,
                "offload_optimizer": "cpu",
                "clip": 0,
                "on_nonfinite": "skip",
            },
            "before all gradients are known",
        ),
        ({"stage": "1", "reduce_at": "micro-batch"}, "use stage 2 or 3"),
    ],
    ids=repr,
)
def test_what_cannot_be_is_told_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainError) as error:
        resolve(given)
    assert words in str(error.value) and "Value error" not in str(error.value)


def test_a_folder_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"--nvme .*absent: there is no such folder"):
        check_early(resolve({"nvme": [str(tmp_path), str(tmp_path / "absent")]}))


def prepared(
    tmp_path: Path, note: Callable[[str], object] = lambda line: None, **given: Any
) -> Run:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    plain = {
        "model": "llama:tiny",
        "tokenizer": "bytes",
        "data": str(tmp_path / "text.txt"),
        "seq": 32,
        "steps": 1,
        "eval_every": 0,
    }
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"), "gloo", None)
    return prepare(resolve({**plain, **given}), alone, note)


def test_a_run_has_the_tiers_it_was_asked_for_and_says_so(tmp_path: Path) -> None:
    run = prepared(tmp_path, offload_optimizer="nvme", offload_param="nvme", nvme=[str(tmp_path)])
    assert (
        run.choice.stage == 3
        and run.recipe.optimizer.tier is run.recipe.parameters.tier is Tier.NVME
    )
    facts = describe(run)
    planned = sum(facts["predicted"]["offloaded"]["nvme"].values())
    assert run.recipe.gradients.tier is Tier.NVME
    assert "nvme" in facts["recipe"] and "on NVMe" in facts["reason"] and planned > 0
    engine = onefold.engine_of(run.model)
    assert engine.on_disk and abs(sum(engine.transfers.disk.now().values()) - planned) < planned


def test_what_the_plan_did_not_count_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, note, said = prepare_module.choose, "on a mesh groups are not counted", list[str]()
    monkeypatch.setattr(
        prepare_module, "choose", lambda *given: replace(real(*given), notes=(note,))
    )
    prepared(tmp_path, said.append)
    assert note in said


def test_a_disk_without_room_is_a_sentence_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onefold.offload import storage
    from onefold.offload.nvme import TierError

    def full(*_: Any) -> None:
        raise TierError("the disk is full.")

    monkeypatch.setattr(storage, "refuse_unless_fits", full)
    with pytest.raises(TrainError, match="the disk is full"):
        prepared(tmp_path, offload_optimizer="nvme", nvme=[str(tmp_path)])
