"""Lightning's own DeepSpeedStrategy, served by Onefold, beside Lightning's DDP: on two ranks, on the
host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from needed import skip_without
from ranks import run_ranks

skip_without("lightning")
sys.path.append(str(Path(__file__).parent))
from lightning_name_trials import RUNS, runs


def test_losses_are_those_of_ddp_and_checkpoints_go_on_at_another_stage(
    tmp_path: Path, sample: Callable[[Iterable[Any], int], list[Any]]
) -> None:
    some = {"stage 2", "stage 3", *sample(RUNS, 3)}
    chosen = [name for name in RUNS if name in some]
    seen = run_ranks(2, runs, str(tmp_path), chosen, server="served")[0]
    for name in chosen:
        kind = next((k for k in ("accumulated", "bf16") if k in name), None)
        ours, ddp = seen[name], seen[f"ddp, {kind}" if kind else "ddp"]
        far = 2e-2 if kind == "bf16" else 1e-6
        assert ours["engine"] == "DeepSpeedEngine" and ours["steps"] == ddp["steps"] == 4, name
        assert ours["loss"] == pytest.approx(ddp["loss"], rel=far), name
        assert ours["val_loss"] == pytest.approx(ddp["val_loss"], rel=far), name
        assert ours["rate"] == ddp["rate"], name
    longer = seen["ddp, longer"]
    assert len(longer["loss"]) == 8
    for saved in ("stage 2", "stage 3"):
        again = seen[f"from {saved}"]
        assert again["loss"] == pytest.approx(longer["loss"][4:], rel=1e-6), saved
        assert again["rate"] == longer["rate"] and again["steps"] == 8
        assert (tmp_path / f"{saved}.ckpt" / "checkpoint").is_dir()
    assert seen["tested"] == seen["stage 3"]["val_loss"][-2:]
    for made in seen["converted"].values():
        assert made == {"epoch": 1, "names": True, "near": True}
