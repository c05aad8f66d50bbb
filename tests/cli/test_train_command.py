"""`onefold train` as a user runs it: through the command, over real ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from started_runs import left_behind, rows_of, started, wait_for_step

pytestmark = pytest.mark.one_in(2)

SERVER = "libraries"
BYTES = ["--tokenizer", "bytes", "--seq", "64", "--device", "cpu"]
TINY = ["--model", "llama:tiny", *BYTES]
#: Starts without transformers, where what is asked of a run has nothing to do with its model.
SMALL = ["--model", "small_lm:plain", *BYTES]


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    with started(folder, *arguments) as process:
        out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def events(out: str) -> dict[str, list[dict[str, Any]]]:
    """{event: its rows}; fails where stdout holds anything but JSON lines."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in out.splitlines():
        row = json.loads(line)
        found.setdefault(row["event"], []).append(row)
    return found


def test_a_run_ends_with_a_model_that_transformers_opens_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    code, out, err = run(
        tmp_path, *TINY, "--steps", "4", "--nproc", "2", "--eval-every", "2", "--output", "run"
    )
    assert code == 0, err
    said = events(out)
    assert (
        said["plan"][0]["stage"] == 1
        and said["plan"][0]["ranks"] == 2
        and said["plan"][0]["reason"]
    )
    assert [row["step"] for row in said["step"]] == [1, 2, 3, 4]

    rows = rows_of(tmp_path / "run")
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

    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "run" / "model"))
    assert sum(p.numel() for p in model.parameters()) == said["plan"][0]["parameters"]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert (tmp_path / "run" / "train.yaml").is_file()
    assert left_behind(tmp_path / "tmp") == []


def test_ctrl_c_lets_the_step_finish_saves_and_exits_with_130(tmp_path: Path) -> None:
    with started(
        tmp_path, *SMALL, "--steps", "100000", "--nproc", "2", "--output", "run"
    ) as process:
        wait_for_step(process, 3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in err and "Error" not in err, err
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["done"] and rows[-1]["stopped"] and rows[-1]["steps"] == rows[-2]["step"] >= 3
    assert rows[-1]["model"] is None and not (tmp_path / "run" / "model").exists()
    assert (tmp_path / rows[-1]["checkpoint"] / "manifest.json").is_file()
    assert json.loads(out.splitlines()[-1])["event"] == "done"
    assert left_behind(tmp_path / "tmp") == []


@pytest.mark.slow
def test_a_rank_that_fails_is_told_once_and_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom torch import nn\n"
        "def build():\n"
        "    if os.environ['RANK'] == '1': raise RuntimeError('no weights today')\n"
        "    return nn.Linear(2, 2)\n"
    )
    code, _, err = run(
        tmp_path, "--model", "mine:build", "--tokenizer", "bytes", "--nproc", "2", "--steps", "1"
    )
    assert code == 1
    assert err.count("RuntimeError: no weights today") == 1 and "mine.py, line 4" in err
    assert left_behind(tmp_path / "tmp") == []


@pytest.mark.slow
def test_smollm2_is_fine_tuned_and_opens_again_with_its_tokenizer(tmp_path: Path) -> None:
    code, out, err = run(
        tmp_path,
        "--steps", "2", "--nproc", "2", "--seq", "64", "--micro-batch", "1", "--eval-every", "0",
        "--output", "run", "--stage", "3",
    )  # fmt: skip
    assert code == 0, err
    losses = [row["loss"] for row in events(out)["step"]]
    assert 2 < losses[0] < 4.5, losses

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(tmp_path / "run" / "model")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    asked = tokenizer("The capital of France is", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**asked, max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in answer
