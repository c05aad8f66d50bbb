"""Trainer with a JSON that offloads, and with fp16 and its loss scale, served by Onefold: on two
ranks, on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks import run_ranks

pytest.importorskip("accelerate")
sys.path.append(str(Path(__file__).parent))
from test_deepspeed_trainer import ADAMW
from trainer_trials import ds, runs


def offloading(stage: int, states: Any, parameters: Any = None, **more: Any) -> dict[str, Any]:
    given = ds(stage, **more)
    given["zero_optimization"]["offload_optimizer"] = states
    if parameters is not None:
        given["zero_optimization"]["offload_param"] = parameters
    return given


def test_losses_are_those_of_ddp_wherever_the_state_rests(
    tmp_path: Path, sample: Callable[[Iterable[Any], int], list[Any]]
) -> None:
    (disk := tmp_path / "disk").mkdir()
    host, nvme = {"device": "cpu", "pin_memory": True}, {"device": "nvme", "nvme_path": str(disk)}
    configs = {
        # Trainer's optimizer is replaced by DeepSpeedCPUAdam, as accelerate asks for
        "states on the host, 1": offloading(1, host),
        "states on the host, 2": offloading(2, host, **ADAMW),
        "all on the host": offloading(3, host, host),
        "none": offloading(3, {"device": "none"}, {"device": "none", "nvme_path": None}),
        "all on nvme": offloading(3, nvme, nvme, **ADAMW),
        "parameters on the host, states on nvme": offloading(3, nvme, host),
        "no optimizer of its own": offloading(3, host, host, zero_force_ds_cpu_optimizer=False),
    }
    resumed = [("all on nvme", "states on the host, 2"), ("none", "all on the host")]
    resumed = sample(resumed, 2)
    some = {name for pair in resumed for name in pair} | {*sample(configs, 3)}
    configs = {name: given for name, given in configs.items() if name in some}
    common = {"from_pretrained": True}
    saves = {"save_strategy": "steps", "save_steps": 2}
    cases = [{"name": "ddp", "save": "of ddp", **common}] + [
        {"name": name, "save": f"of {name}", "deepspeed": given, "arguments": saves, **common}
        for name, given in configs.items()
    ]
    for begun, other in resumed:
        folder = str(tmp_path / begun / "checkpoint-2")
        case = {"name": f"{begun}, then {other}", "resume": folder}
        cases.append(case | {"deepspeed": configs[other], **common})
    seen = run_ranks(2, runs, cases, str(tmp_path), server="served")[0]
    ddp = seen.pop("ddp")
    for name, ours in seen.items():
        assert ours["type"] == "DeepSpeedEngine" and len(ours["losses"]) == 4, name
        assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-6), name
        assert ours["norms"] == pytest.approx(ddp["norms"], rel=1e-5), name
    theirs = load_file(tmp_path / "of ddp" / "model.safetensors")
    for name in configs:
        mine = load_file(tmp_path / f"of {name}" / "model.safetensors")
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    assert not list(disk.rglob("*")), "nothing stays on the disk"


def test_fp16_of_the_json_scales_its_loss_and_skips_what_overflows(tmp_path: Path) -> None:
    """A first scale of 2^24 is too large for fp16: it halves where something overflows."""
    dynamic = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 20, "hysteresis": 1}
    kinds = {
        "overflows": {**dynamic, "initial_scale_power": 24, "loss_scale_window": 1000},
        "grows": {**dynamic, "initial_scale_power": 4, "loss_scale_window": 2},
        "static": {"enabled": True, "loss_scale": 64.0},
    }
    steps = {"max_steps": 8}
    cases = [{"name": "ddp", "arguments": steps}] + [
        {"name": f"{kind} {stage}", "deepspeed": ds(stage, fp16=fp16, **json),
         "arguments": {"fp16": True, **steps}}
        for kind, fp16 in kinds.items()
        for stage, json in ((2, ADAMW), (3, {}))
    ]  # fmt: skip
    seen = run_ranks(2, runs, cases, str(tmp_path), server="served")[0]
    ddp = seen["ddp"]["losses"]
    for stage in (2, 3):
        ours = {kind: seen[f"{kind} {stage}"] for kind in kinds}
        for kind in ("grows", "static"):
            assert ours[kind]["losses"] == pytest.approx(ddp, abs=0.02), kind
            assert ours[kind]["skipped"] == 0
        assert ours["static"]["scale"] == 64
        assert ours["grows"]["scale"] > 2**4
        # A step that is skipped moves neither weights nor the rate
        skipped = ours["overflows"]["skipped"]
        assert 1 <= skipped <= 7 and ours["overflows"]["scale"] == 2.0 ** (24 - skipped)
        rates = ours["overflows"]["rates"]
        assert rates[:2] == [1e-2] * 2 and rates == sorted(rates, reverse=True)
        applied = 8 - skipped  # the last one may be among them, and is not seen in the rates
        assert len(set(rates)) in (applied, applied + 1), (rates, skipped)
