"""`onefold train` as a user runs it: through the command, over real ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.one_in(2)

ROOT = Path(__file__).parents[2]
SOURCE = os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))
SERVER = "libraries"
BYTES = ["--tokenizer", "bytes", "--seq", "64", "--device", "cpu"]
TINY = ["--model", "llama:tiny", *BYTES]
#: Starts without transformers, where what is asked of a run has nothing to do with its model.
SMALL = ["--model", "small_lm:plain", *BYTES]


@dataclass
class Place:
    """A folder of its own for one command: working directory, temporary files, and a way to find
    what it left behind.
    """

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
        clean = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        return {
            **clean,
            "PYTHONPATH": path,
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "onefold", "train", *arguments],
            cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err

    def left_behind(self) -> list[str]:
        """Temporary files and running processes of this place; what is being ended gets its
        time.
        """
        patience = time.monotonic() + 120
        while (found := self._left_now()) and time.monotonic() < patience:
            time.sleep(0.1)
        return found

    def _left_now(self) -> list[str]:
        mark = f"TMPDIR={self.folder / 'tmp'}".encode()
        found = [str(p) for p in (self.folder / "tmp").iterdir()]
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "tmp").mkdir()
    return Place(tmp_path)


def events(out: str) -> dict[str, list[dict[str, Any]]]:
    """{event: its rows}; fails where stdout holds anything but JSON lines."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in out.splitlines():
        row = json.loads(line)
        found.setdefault(row["event"], []).append(row)
    return found


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_ends_with_a_model_that_transformers_opens_and_leaves_nothing_behind(
    place: Place,
) -> None:
    code, out, err = place.run(
        *TINY, "--steps", "4", "--nproc", "2", "--eval-every", "2", "--output", "run", "--json"
    )
    assert code == 0, err
    said = events(out)
    assert (
        said["plan"][0]["stage"] == 1
        and said["plan"][0]["ranks"] == 2
        and said["plan"][0]["reason"]
    )
    assert [row["step"] for row in said["step"]] == [1, 2, 3, 4]

    rows = metrics(place.folder / "run")
    assert len(rows) == 5 and rows[-1]["done"] and not rows[-1]["stopped"]
    for row in rows[:4]:
        names = ("loss", "grad_norm", "lr", "tokens_per_s", "memory")
        assert min(row[name] for name in names) > 0, row
    assert [row["step"] for row in rows[:4] if "eval_loss" in row] == [2, 4]
    # fp32, two ranks, stage 1: 2 Psi (N - 1) / N, and the small padding of a unit's last interval.
    # After a measurement of the held-out loss the parameters are there already: it has gathered
    # them.
    psi = said["plan"][0]["parameters"] * 4
    for sent in (rows[1]["wire_bytes"], rows[1]["eval_wire_bytes"] + rows[2]["wire_bytes"]):
        assert psi <= sent <= 1.02 * psi, (psi, sent)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(place.folder / "run" / "model"))
    assert sum(p.numel() for p in model.parameters()) == said["plan"][0]["parameters"]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert (place.folder / "run" / "train.yaml").is_file()
    assert place.left_behind() == []


@contextlib.contextmanager
def started(place: Place, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = place.start(*arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=300)


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"event": "step"') and json.loads(line)["step"] >= step:
            return
    raise AssertionError(
        f"the run ended before step {step}: {process.stderr.read() if process.stderr else ''}"
    )


def test_ctrl_c_lets_the_step_finish_saves_and_exits_with_130(place: Place) -> None:
    with started(
        place, *SMALL, "--steps", "100000", "--nproc", "2", "--output", "run", "--json"
    ) as process:
        wait_for_step(process, 3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in err and "Error" not in err, err
    rows = metrics(place.folder / "run")
    assert rows[-1]["done"] and rows[-1]["stopped"] and rows[-1]["steps"] == rows[-2]["step"] >= 3
    assert rows[-1]["model"] is None and not (place.folder / "run" / "model").exists()
    assert (place.folder / rows[-1]["checkpoint"] / "manifest.json").is_file()
    assert json.loads(out.splitlines()[-1])["event"] == "done"
    assert place.left_behind() == []


@pytest.mark.slow
def test_a_rank_that_fails_is_told_once_and_ends_the_others(place: Place) -> None:
    (place.folder / "mine.py").write_text(
        "import os\nfrom torch import nn\n"
        "def build():\n"
        "    if os.environ['RANK'] == '1': raise RuntimeError('no weights today')\n"
        "    return nn.Linear(2, 2)\n"
    )
    code, _, err = place.run(
        "--model", "mine:build", "--tokenizer", "bytes", "--nproc", "2", "--steps", "1"
    )
    assert code == 1
    assert err.count("RuntimeError: no weights today") == 1 and "mine.py, line 4" in err
    assert place.left_behind() == []


@pytest.mark.slow
def test_smollm2_is_fine_tuned_and_opens_again_with_its_tokenizer(place: Place) -> None:
    code, out, err = place.run(
        "--steps", "2", "--nproc", "2", "--seq", "64", "--micro-batch", "1", "--eval-every", "0",
        "--output", "run", "--stage", "3", "--json",
    )  # fmt: skip
    assert code == 0, err
    losses = [row["loss"] for row in events(out)["step"]]
    assert 2 < losses[0] < 4.5, losses

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(place.folder / "run" / "model")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    asked = tokenizer("The capital of France is", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**asked, max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in answer
