"""What `onefold train --stage auto --micro-batch auto` and `onefold.plan.recipe_for` choose off the
plain case; runs take it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import asked
from torch import nn

import onefold
from onefold.memory import GRADIENTS
from onefold.observe.runfile import read_observed
from onefold.plan import api
from onefold.plan.schema import Account
from onefold.processes.ranks import Ranks
from onefold.train.choose import Asked, choose
from onefold.train.config import resolve
from onefold.train.prepare import prepare
from onefold.train.report import observe
from onefold.wording import TrainError
from ranks import run_ranks
from zoo import TinyGPT

MIB = 1 << 20
ROOMY = 1 << 34


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No calibration: bytes are planned all the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Language(nn.Module):
    """Takes input_ids and labels, returns the loss; some hundred thousand parameters."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.inner = TinyGPT(vocabulary=257, width=width, heads=2, depth=depth, length=64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids)


def test_whole_gradients_of_accumulation_move_the_choice_from_stage_1_to_2() -> None:
    several = {"global_batch": 2 * 4 * 4}
    peaks = choose(Language(), asked(**several)).needed
    assert peaks[1] > peaks[2]
    assert (
        choose(Language(), asked(**several, free=int((peaks[1] + peaks[2]) / 2 / api.USABLE))).stage
        == 2
    )


@pytest.mark.parametrize(("name", "counted"), [("muon", "adamw"), ("adafactor", "sgd-momentum")])
def test_over_axes_optimizers_of_whole_matrices_are_counted_as_others(
    name: str, counted: str
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    layers = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers))
    whole = choose(model, replace(asked(optimizer=name), tp=2))
    other = choose(model, replace(asked(optimizer=counted), tp=2))
    assert f"over axes states of {name} are counted as {counted} has them" in whole.notes
    assert whole.needed == other.needed and whole.stage == other.stage


def test_what_does_not_fit_is_said_and_tried_all_the_same() -> None:
    chosen = choose(Language(), asked(free=MIB))
    assert chosen.stage == 3 and "may run out of memory" in chosen.reason
    assert choose(Language(), asked(stage="1", free=MIB)).stage == 1


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(TrainError, match="use 16"):
        choose(Language(), asked(micro_batch=4, global_batch=15))
    with pytest.raises(TrainError, match="does not divide"):
        choose(Language(), asked(micro_batch=0, global_batch=15))


def test_a_run_takes_what_was_chosen(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    given: dict[str, Any] = {
        "model": "llama:tiny",
        "tokenizer": "bytes",
        "data": str(tmp_path / "text.txt"),
        "seq": 32,
        "steps": 1,
    }
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"), "gloo", None)
    run = prepare(
        resolve(
            {**given, "micro_batch": "auto", "global_batch": 8, "stage": "auto", "eval_every": 0}
        ),
        alone,
        lambda line: None,
    )
    assert run.choice.stage == 0 and 8 % run.choice.micro_batch == 0
    assert run.accumulation * run.choice.micro_batch == 8
    assert (
        run.choice.predicted is not None
        and run.choice.predicted.bound >= run.choice.predicted.peak_bytes
    )


def test_the_plan_of_a_run_has_the_rows_that_the_run_will_have() -> None:
    plain: dict[str, Any] = {"stage": "2", "micro_batch": 1, "global_batch": 16}
    usual, late, coarse = (
        choose(Language(), asked(**plain, **given)).predicted
        for given in ({}, LATE, {"units": ("inner.blocks.0",)})
    )
    assert usual is not None and late is not None and coarse is not None
    assert late.wire["reduce-scatter"] * 4 == usual.wire["reduce-scatter"], (
        "once a step, not once a micro-batch"
    )
    assert late.peak[GRADIENTS] > usual.peak[GRADIENTS]
    assert coarse.ledger != usual.ledger
    with pytest.raises(TrainError, match="nothing"):
        choose(Language(), asked(**plain, units=("nothing.there",)))


LATE = {"reduce_at": "boundary"}


def test_a_run_plans_with_its_options_and_leaves_its_measured_mfu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    seen: list[Asked] = []
    monkeypatch.setattr(
        "onefold.train.prepare.choose",
        lambda model, asked: seen.append(asked) or choose(model, asked),
    )
    given: dict[str, Any] = {
        "model": "llama:tiny",
        "tokenizer": "bytes",
        "data": str(tmp_path / "text.txt"),
        "seq": 32,
        "steps": 1,
    }
    given |= {
        "stage": "2",
        "reduce_at": "boundary",
        "units": "LlamaDecoderLayer",
        "global_batch": 8,
        "micro_batch": 2,
        "eval_every": 0,
    }
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"), "gloo", None)
    run = prepare(resolve(given), alone, lambda line: None)
    assert dict(seen[0].job.options) == {"reduce_at": "boundary", "units": ("LlamaDecoderLayer",)}
    run.measured = Account(rest={"parameters": 4})
    rows = [
        {"step_ms": 10.0, "tokens_per_s": 100.0, "mfu": share}
        for share in (0.9, 0.2, 0.3, None, 0.4)
    ]
    observe(run, tmp_path / "out", rows)
    left = read_observed(tmp_path / "out").ranks[0].measured
    assert left.mfu == pytest.approx(0.3) and left.seconds["step"] == pytest.approx(0.01)


# -- onefold.plan.recipe_for -----------------------------------------------------------------------


def test_a_recipe_by_itself_fits_one_process() -> None:
    recipe = onefold.plan.recipe_for(Language(), seq=16, precision="bf16", prefetch=1)
    assert recipe.stage == 0 and recipe.compute_dtype is torch.bfloat16 and recipe.prefetch == 1
    model = onefold.shard(Language(), recipe)
    ids = torch.zeros((1, 16), dtype=torch.long)
    model(input_ids=ids, labels=ids).float().backward()


def test_a_recipe_for_what_fits_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "free_host_memory", lambda: MIB)
    with pytest.raises(ValueError, match="does not fit"):
        onefold.plan.recipe_for(Language(), seq=16)


def recipe_here(free: tuple[int, int], seq: int) -> int | None:
    """The stage that this rank gets when the ranks have this much free."""
    import torch.distributed as dist

    api.free_host_memory = lambda: 2 * free[dist.get_rank()]
    recipe = onefold.plan.recipe_for(Language(), seq=seq)
    onefold.shard(Language(), recipe)
    return recipe.stage


def test_two_ranks_agree_on_what_fits_the_one_that_has_least() -> None:
    peaks = choose(Language(), asked(ranks=2, local_ranks=2, micro_batch=1, seq=16)).needed
    tight = int((peaks[2] + peaks[3]) / 2 / api.USABLE)
    assert run_ranks(2, recipe_here, (ROOMY, ROOMY), 16) == [1, 1]
    assert run_ranks(2, recipe_here, (ROOMY, tight), 16) == [3, 3]
