"""Checkpoints of an engine without the parameters that take no gradient, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.checkpoint import CheckpointError
from onefold.checkpoint.loading import source_of
from onefold.integrations.deepspeed import initialize
from ranks import run_ranks


def adapted(seed: int = 0, width: int = 5) -> nn.Sequential:
    """A frozen base between layers that are trained; the base is the same for every seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 5), nn.Linear(5, 3))
    torch.manual_seed(100)
    for value in model[1].parameters():
        nn.init.normal_(value)
    model[1].requires_grad_(False)
    model.register_buffer("seen", torch.tensor(float(seed)))
    return model


def engine_over(model: nn.Module, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
    }
    return initialize(model=model, config=config)[0]


def step(engine: Any, index: int) -> float:
    torch.manual_seed(10 * index + dist.get_rank())
    loss = engine(torch.randn(2, 6)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def train_and_go_on(folder: str, stage: int, other: int) -> dict[str, Any]:
    engine = engine_over(adapted(), stage)
    step(engine, 0)
    assert engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    out: dict[str, Any] = {"losses": [step(engine, 1), step(engine, 2)]}
    for strict in (True, False):
        model = adapted(seed=1)
        again = engine_over(model, other)
        path, _ = again.load_checkpoint(folder, load_module_strict=strict)
        assert path is not None and again.global_steps == 1
        out[f"again {strict}"] = [step(again, 1), step(again, 2)]
        out["buffer"] = float(model.seen)
        whole = onefold.full_state_dict(model)
        out["base"] = torch.equal(whole["1.weight"], adapted()[1].weight) if whole else True
        trained = again.module_state_dict(exclude_frozen_parameters=True)
        assert set(trained) == whole.keys() - {"1.weight", "1.bias"}
    wrong: list[str] = []
    for model in (adapted(width=7), nn.Sequential(*adapted(), nn.Linear(3, 3))):
        try:
            engine_over(model, other).load_checkpoint(folder)
        except CheckpointError as error:
            wrong.append(str(error))
    return {**out, "wrong": wrong}


@pytest.mark.parametrize(("stage", "other"), [(3, 1), (2, 3), (0, 2)])
def test_frozen_parameters_stay_out_and_what_is_loaded_leaves_them(
    stage: int, other: int, tmp_path: Path
) -> None:
    for seen in run_ranks(2, train_and_go_on, str(tmp_path), stage, other):
        assert seen["again True"] == seen["again False"]
        assert seen["again True"] == pytest.approx(seen["losses"], rel=1e-6)
        assert seen["base"] and seen["buffer"] == 0.0
        assert len(seen["wrong"]) == 2 and "shape" in seen["wrong"][0]
        assert "lacks, and are trained here (3.bias, 3.weight)" in seen["wrong"][1]
    source = source_of(tmp_path / "global_step1")
    names = {item.name for item in source.items() if item.kind == "parameter"}
    source.close()
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_it_serves_the_wrong_model_with_a_sentence(tmp_path: Path) -> None:
    """Names that only the checkpoint has, too."""
    engine = engine_over(adapted(), 3)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    small = nn.Sequential(nn.Linear(6, 5))
    with pytest.raises(
        CheckpointError, match=r"has, and this model has not \(2\.bias, 2\.weight\)"
    ):
        engine_over(small, 3).load_checkpoint(tmp_path)
