"""`onefold train` with everything that looks on, then `onefold report` on the folder it left: read
back piece by piece.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold.cli.app import app
from onefold.observe.report import sections

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("plotly", reason="plotly is not installed")
SOURCE = str(Path(__file__).parents[2] / "src")
STEPS, RANKS = 3, 2
#: Every figure of a step, as `onefold train` calls it: `held` is what the engine's ledger says,
#: `memory` what the process has.
FIGURES = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_ms", "exposed_ms", "wire_bytes", "held",
           "host", "nvme", "moved_bytes", "io_ms", "memory", "memory_peak"}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "onefold", "train", "--model", "llama:tiny", "--tokenizer", "bytes", "--seq", "64", "--device", "cpu",
         "--steps", str(STEPS), "--nproc", str(RANKS), "--stage", "3", "--micro-batch", "2", "--eval-every", "0",
         "--tensorboard", "--output", "run", "--json"],
        cwd=folder, env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}, check=False,
        text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run"


def rows(run: Path) -> list[dict[str, Any]]:
    return [
        row
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if not (row := json.loads(line)).get("done")
    ]


def test_every_step_has_every_figure(run: Path) -> None:
    found = rows(run)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row in found:
        assert set(row) >= FIGURES, FIGURES - set(row)
        assert row["wire_bytes"] > 0 and row["memory"] > sum(row["held"]["now"].values()) > 0
        assert row["host"] == row["nvme"] == 0
        least, most = row["own_ms"]  # of all ranks, however many there are
        assert 0 <= least <= most and row["slowest"] in range(RANKS)


def test_tensorboard_has_the_figures_of_every_step(run: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "wire_bytes", "held/now/moments"} <= set(
        events.Tags()["scalars"]
    )
    for name in ("loss", "wire_bytes"):
        written = {e.step: e.value for e in events.Scalars(name)}
        assert written == pytest.approx({row["step"]: row[name] for row in rows(run)})


def test_the_report_of_a_real_run_has_every_section(run: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert Path(said["report"]).stat().st_size > 1e6
    found = sections(run)
    assert [title.split()[0] for title in found] == [
        "Run", "Loss", "Tokens", "Predicted", "Memory", "Timeline", "MiB", "Parts", "Recipe"
    ]  # fmt: skip
    lines = {line["of one rank"]: line for line in found["Predicted and measured"]}
    for name in ("at rest", "sent in a step", "engine at its peak"):
        assert lines[name]["measured ÷ predicted"] == "1.000", (name, lines[name])
    losses: Any = found["Loss"]
    assert losses["data"][0]["y"] == pytest.approx([row["loss"] for row in rows(run)])
