"""What `save_checkpoint` and `load_checkpoint` do by their options, on two ranks beside plain
PyTorch: parts that are left out, tags, the model loaded from its own checkpoint.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.integrations.deepspeed.checkpoints import TagMismatch
from onefold.integrations.deepspeed.names import access
from onefold.integrations.deepspeed.names.gathered import GatheredParameters
from onefold.integrations.deepspeed.names.training import initialize
from onefold.integrations.deepspeed.names.whole_model import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from ranks import run_ranks


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model[1].requires_grad_(False)
    return model


def engine_of(stage: int, seed: int = 0, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 8}},
        "gradient_clipping": 0.0,
        **more,
    }
    return initialize(model=build(seed), config=config)[0]


def batch(rank: int, step: int) -> Tensor:
    return torch.arange(12.0).view(2, 6) / 10 + rank + step / 3


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(dist.get_rank(), step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine: Any) -> list[list[float]]:
    """The whole trained parameters, in fp32."""
    wholes = [access.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return [w.flatten().tolist() for w in wholes if w is not None]


# -- parts -----------------------------------------------------------------------------------------


def loaded_in_parts(folder: str, stage: int) -> dict[str, Any]:
    first = engine_of(stage)
    train(first, range(3))
    first.save_checkpoint(folder, client_state={"epoch": 2})
    out: dict[str, Any] = {"saved": weights(first), "on": train(first, range(3, 5))}
    for name, options in {
        "all": {},
        "no states": {"load_optimizer_states": False},
        "no schedule": {"load_lr_scheduler_states": False},
        "module": {"load_module_only": True},
    }.items():
        again = engine_of(stage, seed=1)
        path, client = again.load_checkpoint(folder, **options)
        out[name] = {
            "path": Path(path).name,
            "client": client,
            "weights": weights(again),
            "steps": again.global_steps,
            "moment": access.safe_get_full_optimizer_state(
                next(iter(again.module.parameters())), "exp_avg"
            ),
            "on": train(again, range(3, 5)),
            "lr": again.get_lr()[0],
        }
    return out | {"lr": first.get_lr()[0]}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_not_to_be_loaded_stays_as_it_is(stage: int, tmp_path: Path) -> None:
    for seen in run_ranks(2, loaded_in_parts, str(tmp_path), stage):
        for name in ("all", "no states", "no schedule", "module"):
            one = seen[name]
            assert one["weights"] == seen["saved"], name
            assert one["path"] == "global_step3" and one["client"] == {"epoch": 2}
            assert one["steps"] == (0 if name == "module" else 3)
            assert (one["moment"] is None) == (name in ("no states", "module"))
            assert (one["lr"] == seen["lr"]) == (name in ("all", "no states"))
        assert seen["all"]["on"] == seen["on"]
        assert seen["no states"]["on"][1] != seen["on"][1]
        # The first loss depends on the weights alone
        assert all(seen[name]["on"][0] == seen["on"][0] for name in ("no states", "module"))


# -- tags ------------------------------------------------------------------------------------------


def tagged(folder: str, mode: str | None) -> Any:
    kept: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    more = {} if mode is None else {"checkpoint": {"tag_validation": mode}}
    engine = engine_of(2, **more)
    try:
        engine.save_checkpoint(folder, tag=f"of-rank-{dist.get_rank()}")
    except TagMismatch as error:
        assert isinstance(error, AssertionError)
        return str(error), []
    return sorted(os.listdir(folder)), [line for line in kept if "different tags" in line]


@pytest.mark.parametrize("mode", [None, "Warn", "IGNORE", "Fail"])
def test_tags_that_ranks_disagree_about_are_the_first_ranks_or_refused(
    mode: str | None, tmp_path: Path
) -> None:
    seen = run_ranks(2, tagged, str(tmp_path), mode)
    if mode == "Fail":
        for said, _ in seen:
            assert "'of-rank-0' on rank 0, 'of-rank-1' on rank 1" in said
        assert not os.listdir(tmp_path)
        return
    assert {"latest", "of-rank-0"} <= set(seen[0][0]) and "of-rank-1" not in seen[0][0]
    assert (tmp_path / "latest").read_text() == "of-rank-0"
    assert len(seen[0][1]) == (0 if mode == "IGNORE" else 1) and not seen[1][1]


def test_the_script_beside_a_checkpoint_can_be_run_by_its_owner(tmp_path: Path) -> None:
    engine_of(0).save_checkpoint(str(tmp_path))
    assert os.stat(tmp_path / "zero_to_fp32.py").st_mode & stat.S_IXUSR


# -- the engine's model from its own checkpoint ----------------------------------------------------


def loaded_whole(folder: str, stage: int) -> dict[str, Any]:
    engine = engine_of(stage, bf16={"enabled": True})
    train(engine, range(3))
    engine.save_checkpoint(folder)
    saved = weights(engine)
    train(engine, range(3, 5))
    out: dict[str, Any] = {"moved": weights(engine) != saved}
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    out["file"] = [
        whole[n].flatten().tolist() for n, p in engine.module.named_parameters() if p.requires_grad
    ]
    params = list(engine.module.parameters())
    with GatheredParameters(params):
        inside = load_state_dict_from_zero_checkpoint(engine.module, folder)
        assert inside is engine.module
        shown = [p.flatten().tolist() for p in params if p.requires_grad]
        dtypes = {p.dtype for p in params}
    out["inside"] = shown == saved, dtypes == ({torch.float32} if stage else dtypes)
    out["after"] = weights(engine) != saved
    assert load_state_dict_from_zero_checkpoint(engine.module, folder) is engine.module
    out["weights"], out["saved"] = weights(engine), saved
    out["loss"] = train(engine, range(5, 6))
    return out


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trained_engines_model_takes_its_weights_from_its_checkpoint_in_fp32(
    stage: int, tmp_path: Path
) -> None:
    for one in run_ranks(2, loaded_whole, str(tmp_path), stage):
        assert one["moved"] and one["after"]
        assert one["file"] == one["saved"] == one["weights"]
        assert one["inside"] == (True, True)
        assert one["loss"][0] > 0
