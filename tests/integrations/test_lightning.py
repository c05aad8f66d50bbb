"""onefold.lightning.Strategy beside Lightning's DDPStrategy: on two ranks, on the host."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from needed import skip_without
from ranks import absolute_path, run_ranks

skip_without("lightning")
sys.path.append(str(Path(__file__).parent))
# Lightning takes seconds to import, so tests do it and not this module: all workers collect it

STAGES: dict[str, Any] = {"ddp": "ddp"} | {str(stage): {"stage": stage} for stage in range(4)}
#: What each kind of run asks the Trainer for, and how far its losses may be from DDP's.
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({"validate": True}, 0),
    "accumulated": ({"accumulate_grad_batches": 2}, 1e-6),
    "clipped": ({"gradient_clip_val": 0.1}, 1e-6),
    "mixed": ({"precision": "bf16-mixed"}, 0),
    "scaled": ({"scaled": True}, 0),
    "bf16": ({"precision": "bf16-true"}, 2e-2),
    "double": ({"precision": "64-true"}, 0),
}
#: Kinds that one stage stands for: what they share with the others is the stage's, not theirs.
ONCE = {"double": "3", "bf16": "2", "scaled": "3"}


def test_losses_are_those_of_ddp_at_every_stage(
    tmp_path: Path, sample: Callable[[Iterable[Any], int], list[Any]]
) -> None:
    from lightning_trials import runs

    kinds = {"plain", "clipped", *sample(KINDS, 4)}
    cases = [
        {"name": f"{kind} {stage}", "strategy": strategy, **asked}
        for kind, (asked, _) in KINDS.items()
        for stage, strategy in STAGES.items()
        if kind in kinds and (stage == "ddp" or ONCE.get(kind, stage) == stage)
    ]
    seen = run_ranks(2, runs, cases, str(tmp_path), server="libraries")[0]
    assert seen["clipped ddp"]["loss"][1:] != seen["plain ddp"]["loss"][1:]
    for case in cases:
        name, (kind, _) = case["name"], case["name"].split()
        ours, ddp, far = seen[name], seen[f"{kind} ddp"], KINDS[kind][1]
        assert len(ours["loss"]) == 4 and ours["loss"] == pytest.approx(ddp["loss"], rel=far, abs=0)
        assert ours["val_loss"] == pytest.approx(ddp["val_loss"], rel=far, abs=0), name
        assert len(ours["val_loss"]) == (2 if kind == "plain" else 0)  # one is a sanity check's
        assert ours["logged"] == pytest.approx(ddp["logged"], rel=far), name
        assert ours["rate"] == ddp["rate"], name
        assert ours["weights"].keys() == ddp["weights"].keys(), name
        if kind != "bf16":
            torch.testing.assert_close(ours["weights"], ddp["weights"], rtol=0, atol=2 * far)


def test_checkpoints_go_on_at_other_stages_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    """A folder of shards, one file, and DDP's own file: each at another stage, and by DDP."""
    from lightning_trials import resumed, saved

    first = run_ranks(2, saved, str(tmp_path), server="libraries")
    again, alone = (run_ranks(n, resumed, str(tmp_path), server="libraries") for n in (2, 1))
    assert (tmp_path / "folder" / "epoch=0.ckpt" / "rank-00001.safetensors").exists()
    assert (tmp_path / "folder" / "last.ckpt").resolve().name == "epoch=1.ckpt"
    assert (tmp_path / "file" / "epoch=0.ckpt").is_file()
    theirs = torch.load(tmp_path / "ddp" / "epoch=0.ckpt", weights_only=True)
    mine = torch.load(tmp_path / "file" / "epoch=0.ckpt", weights_only=True)
    assert mine.keys() == theirs.keys()
    assert mine["state_dict"].keys() == theirs["state_dict"].keys()
    torch.testing.assert_close(mine["optimizer_states"], theirs["optimizer_states"])
    for form in ("folder", "file", "ddp"):
        for rank in range(2):
            whole = first[rank][form]
            assert len(whole) == 8 and whole == first[rank]["ddp"]
            assert again[rank][form] == whole[4:], form
        assert again[0][f"{form} steps"] == alone[0][f"{form} steps"] == 8
        means = [sum(pair) / 2 for pair in zip(*(r[form][4:] for r in first), strict=True)]
        assert alone[0][form] == pytest.approx(means, rel=1e-5)
        assert again[0][f"{form} tested"] == again[0]["folder tested"]
    assert again[0]["by ddp"] == first[0]["ddp"][4:]


def test_manual_optimization_names_loops_figures_averages_and_refusals(tmp_path: Path) -> None:
    """Each rank says what is wrong, by check."""
    from lightning_checks import all_of_it

    right = {"by_hand": [], "named": [], "around": []}
    assert run_ranks(2, all_of_it, str(tmp_path), server="libraries") == [right, right]


def test_the_example_runs_in_ranks_that_lightning_starts(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "lightning_gpt.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": absolute_path()}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("30 steps, loss ") and f"28 tensors in {tmp_path}" in said, done.stdout
    assert {f"rank-{rank:05}.safetensors" for rank in range(2)} <= {
        path.name for path in (tmp_path / "last.ckpt").iterdir()
    }


def test_what_is_overridden_is_there_and_what_is_there_is_known() -> None:
    """Fails when Lightning's interface moves: a name that is gone, or a new one to look at."""
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

    import onefold.lightning

    ours = onefold.lightning.Strategy
    own = {n for n in vars(ours) if not n.startswith("__")}
    added = {"_clip", "_module", "_run", "_shard", "_show", "recipe"}
    gone = sorted(name for name in own - added if not hasattr(DDPStrategy, name))
    assert not gone, f"DDPStrategy has no {gone} any more"
    for name in sorted(own - added):
        theirs = inspect.getattr_static(DDPStrategy, name)
        if inspect.isfunction(theirs):
            asked = set(inspect.signature(theirs).parameters) - {"args", "kwargs"}
            given = inspect.signature(getattr(ours, name)).parameters
            takes_all = any(p.kind is p.VAR_POSITIONAL for p in given.values())
            assert takes_all or asked <= set(given), f"{name} takes {asked}"
    names = {n for c in DDPStrategy.__mro__[:-1] for n in vars(c) if not n.startswith("__")}
    known = set(KNOWN.split())
    assert names - own == known, (
        f"new: {sorted(names - own - known)}, gone: {sorted(known - names)}"
    )
    assert {"_wrap_closure", "clip_grad_by_norm", "main_params"} <= set(dir(Precision))
    assert {"onefold", "onefold_stage_3_offload"} <= set(StrategyRegistry.available_strategies())
    options = inspect.signature(DDPStrategy.__init__).parameters
    assert {"process_group_backend", "timeout", "start_method"} <= set(options)


#: What Lightning's strategy has besides, and means the same here.
KNOWN = """
_configure_launcher _enable_model_averaging _get_process_group_backend _register_ddp_hooks
_reset_optimizers_and_schedulers _setup_model _setup_model_and_optimizers _setup_optimizer
accelerator all_gather backward barrier batch_to_device broadcast checkpoint_io
configure_ddp connect determine_ddp_device_ids distributed_sampler_kwargs global_rank
handles_gradient_accumulation is_distributed is_global_zero launcher lightning_module
lightning_restore_optimizer local_rank model model_sharded_context node_rank num_nodes
num_processes on_predict_end on_predict_start on_test_end on_test_start on_validation_end
on_validation_start optimizers parallel_devices post_backward post_training_step
pre_backward precision_plugin process_dataloader process_group_backend reduce
reduce_boolean_decision remove_checkpoint root_device set_world_ranks setup_distributed
setup_optimizers setup_precision_plugin world_size
"""
