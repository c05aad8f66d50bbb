"""`--optimizer` by name, with its options: as torch has it, the same on any number of ranks, and a
sentence for what is not known.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.plan.job import Job
from onefold.processes.signals import Stop
from onefold.recipe.optimizers import PLANNED, TRAINED
from onefold.train.checkpoints import Keeper
from onefold.train.config import resolve
from onefold.train.launch import check_early
from onefold.train.loop import train
from onefold.train.optimizers import make, planned_as
from onefold.train.report import Reporter
from onefold.wording import TrainError
from ranks import run_ranks
from started_runs import JOB, alone, begun, losses_in_ranks, losses_on, this_rank

#: Of ranks.SERVERS.
SERVER = "libraries"

HERE = [name for name, row in TRAINED.items() if importlib.util.find_spec(row.module) is not None]
GIVEN: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer_options": "betas=0.9,0.99"},
    "adam": {"optimizer_options": "betas=0.8,0.9 eps=1e-6 amsgrad=true"},
    "nadam": {"optimizer_options": {"momentum_decay": 0.01}},
    "radam": {},
    "adamax": {},
    "sgd": {"optimizer_options": "momentum=0.9 nesterov=true", "lr": 0.1},
    "rmsprop": {"optimizer_options": "alpha=0.9 centered=true"},
    "adagrad": {"optimizer_options": "initial-accumulator-value=0.1"},
    "adadelta": {"optimizer_options": "rho=0.8", "lr": 1.0},
    "lion": {"optimizer_options": "betas=0.9,0.95"},
    "adafactor": {"optimizer_options": "d=2", "lr": 1e-2},
    "muon": {"optimizer_options": "ns_steps=4 adjust_lr_fn=original", "muon_lr": 0.01},
}
#: Muon rounds to bf16 what the sums over other ranks have rounded otherwise.
CLOSE = {"muon": 1e-3}


def variants(root: Path) -> list[dict[str, Any]]:
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    common = {
        "model": "small_lm:plain",
        "data": str(root / "text.txt"),
        "steps": 6,
        "save_every": None,
    }
    return [
        {**common, "optimizer": name, "stage": "3", **GIVEN[name], "output": str(root / name)}
        for name in HERE
    ]


def test_each_gives_on_two_ranks_what_it_gives_on_one_and_all_of_them_differ(
    tmp_path: Path, sample: Any
) -> None:
    names = sample(HERE, 2)
    jobs = [job for job in variants(tmp_path) if job["optimizer"] in names]
    two, _ = run_ranks(2, losses_in_ranks, *jobs)
    one = [losses_on(alone(), **{**job, "micro_batch": 4}) for job in jobs]
    for name, a, b in zip(names, one, two, strict=True):
        assert a == pytest.approx(b, rel=CLOSE.get(name, 1e-5)), name
        assert min(a[1:]) < a[0], (name, a)
    assert len({tuple(losses) for losses in one}) == len(names) > 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "loin"}, "--optimizer loin: Did you mean 'lion'?"),
        ({"optimizer": "sgd", "optimizer_options": "momentun=0.9"},
         "(--lr and --weight-decay are given apart). Did you mean 'momentum'?"),
        ({"optimizer_options": "lr=1"}, "(--lr and --weight-decay are given apart)"),
        ({"optimizer_options": "eps"}, "expected name=value"),
        ({"optimizer_options": "eps=small"}, "eps=small: input should be a valid number"),
        ({"optimizer": "lion", "moments": "bf16"}, "moments='bf16' is about Adam's moments"),
        ({"optimizer": "sgd", "muon_lr": 0.1}, "--muon-lr 0.1 is the rate of --optimizer muon"),
        ({"optimizer": "muon", "optimizer_options": "adjust_lr_fn=mine"},
         "adjust_lr_fn=mine: input should be 'original' or 'match_rms_adamw'"),
        ({"optimizer": "muon", "optimizer_options": "ns_steps=4.5"},
         "ns_steps=4.5: input should be a valid integer"),
        ({"optimizer": "muon", "offload_optimizer": "cpu", "step_in_backward": True, "clip": 0},
         "step_in_backward=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_before_anything_is_loaded(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainError) as error:
        check_early(resolve({"model": "llama:tiny", **options}))
    assert said in str(error.value)


def test_tensorboard_that_is_not_installed_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TrainError, match="pip install tensorboard"):
        check_early(resolve({"tensorboard": True, "data": __file__}))


def test_a_run_goes_on_with_its_optimizers_states_and_not_with_anothers(tmp_path: Path) -> None:
    job = next(job for job in variants(tmp_path) if job["optimizer"] == "sgd")
    whole = losses_on(alone(), **{**job, "steps": 6, "schedule": "constant"})

    def started(**more: Any) -> tuple[Any, Keeper]:
        given = {**JOB, **job, "steps": 6, "schedule": "constant", "resume": "auto", **more}
        config = resolve(given | {"output": str(tmp_path / "cut")})
        run, _ = begun(config, alone())
        return run, Keeper(run, tmp_path / "cut", Reporter())

    found: list[float] = []
    for most in (3, 6):
        run, keeper = started()
        enough = partial(lambda most: len(found) >= most, most)
        train(run, enough, lambda row: found.append(row["loss"]), keeper=keeper)
        keeper.close()
    assert found == whole
    other = started(optimizer_options="momentum=0.5")[0]
    assert other.optimizer.param_groups[0]["momentum"] == 0.5
    with pytest.raises(TrainError, match="holds the states of --optimizer sgd, and this run has"):
        started(optimizer="adamw", optimizer_options=None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", "amsgrad=true"),
        ("rmsprop", "alpha=0.9"),
        ("rmsprop", "momentum=0.9"),
        ("rmsprop", "momentum=0.9 centered=true"),
        ("sgd", "momentum=0.9"),
    ],
)
def test_the_plan_counts_the_states_that_options_add(name: str, options: str) -> None:
    config = resolve({"optimizer": name, "optimizer_options": options})
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = make(config, [{"params": [p]}], "cpu")
    p.grad = torch.ones(4)
    optimizer.step()
    held = sum(value.numel() == 4 for value in optimizer.state[p].values())
    assert PLANNED[planned_as(config)].elementwise_states == held
    if name == "adamw":  # and may keep them in few bits
        job = Job.of({"seq": 8, "optimizer": planned_as(config), "moments": "int8"}, "a test")
        assert job.recipe(3).moments == "int8"


def rows_with_muon(job: dict[str, Any], most: int) -> tuple[list[Any], dict[str, list[str]]]:
    """Start the run, or go on from its newest checkpoint, and stop it after about `most` steps. Returns its
    rows, and what is kept for parameters of this rank.
    """
    ranks = this_rank() if "RANK" in os.environ else alone()
    config = resolve({**JOB, **job, "resume": "auto"})
    run, _ = begun(config, ranks)
    keeper = Keeper(run, Path(job["output"]), Reporter())
    rows: list[Any] = []
    train(run, lambda: Stop.INTERRUPT * (len(rows) >= most), rows.append, keeper=keeper)
    keeper.close()
    names = {id(p): name for name, p in run.model.named_parameters()}
    kept = {names[id(p)]: sorted(state) for p, state in run.optimizer.state.items() if state}
    return rows, kept


@pytest.mark.slow
def test_muon_goes_on_on_other_ranks_with_the_embedding_and_the_head_under_adamw(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    job: dict[str, Any] = {
        "model": "small_lm:plain", "data": str(tmp_path / "text.txt"), "steps": 6, "save_every": 3,
        "optimizer": "muon", "muon_lr": 0.01, "optimizer_options": "ns_steps=4", "stage": "3", "schedule": "linear", "warmup": 2,
    }  # fmt: skip
    whole = run_ranks(2, rows_with_muon, {**job, "output": str(tmp_path / "whole")}, 6)[0]
    run_ranks(2, rows_with_muon, {**job, "output": str(tmp_path / "cut")}, 3)
    shutil.copytree(tmp_path / "cut", tmp_path / "same")
    same, _ = run_ranks(2, rows_with_muon, {**job, "output": str(tmp_path / "same")}, 6)[0]
    again = {**job, "output": str(tmp_path / "cut"), "stage": "1", "micro_batch": 1}
    other, kept = run_ranks(1, rows_with_muon, again, 6)[0]

    rows = whole[0]
    assert len(rows) == 6 and [row["step"] for row in same] == [row["step"] for row in other]
    left = [row["loss"] for row in rows[same[0]["step"] - 1 :]]
    assert len(left) > 1 and [row["loss"] for row in same] == left
    assert [row["loss"] for row in other] == pytest.approx(left, rel=1e-4)
    assert rows[-1]["loss"] < rows[0]["loss"]
    for row in rows:
        assert row["muon_lr"] == pytest.approx(10 * row["lr"])  # one schedule for both
    assert max(row["muon_lr"] for row in rows) == 0.01
    adamw, muon = ["exp_avg", "exp_avg_sq", "step"], ["momentum_buffer"]
    assert kept["embed.weight"] == kept["out.weight"] == kept["out.bias"] == adamw
    assert {tuple(kept[f"blocks.{i}.linear.weight"]) for i in range(3)} == {tuple(muon)}
