"""docs/tour.md keeps its word: the script is written to train.py and every command runs as printed,
one after the other; what the page says of the losses holds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from test_documentation import ROOT, blocks_of

PAGE = ROOT / "docs" / "tour.md"


def test_the_tour_runs_as_printed(tmp_path: Path) -> None:
    blocks = blocks_of(PAGE)
    [script] = [block for block in blocks if block.title == "train.py"]
    (tmp_path / "train.py").write_text(script.text, encoding="utf-8")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    said = []
    for line in [line for b in blocks if b.language == "bash" for line in b.text.splitlines()]:
        done = subprocess.run(
            ["bash", "-ec", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        said.append((line, done.stdout))

    def steps(number: int) -> list[tuple[str, str, int]]:
        found = re.findall(r"step (\d+): loss (\S+), ([\d,]+) bytes", said[number][1])
        return [(step, loss, int(held.replace(",", ""))) for step, loss, held in found]

    alone, stage_3, stage_0, saved, resumed = (steps(n) for n in (0, 1, 2, 3, 5))
    assert [step for step, *_ in alone] == ["10", "20"] and [s for s, *_ in resumed] == ["30", "40"]
    losses = [[loss for _, loss, _ in run] for run in (stage_3, stage_0, saved)]
    assert losses[0] == losses[1] == losses[2], said
    # Each rank holds half, padding aside
    assert 0.5 <= stage_3[0][2] / stage_0[0][2] < 0.51 and stage_0[0][2] < 1.01 * alone[0][2]
    assert "runs/tour: whole" in said[4][1], said[4]
    assert all("onefold plan" in line and len(text) > 500 for line, text in said[6:]) and said[6:]
