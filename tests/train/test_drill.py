"""docs/drill.md runs as printed: train, kill, other ranks and another stage, resume, verify,
compare, export, open.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from started_runs import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_drill_of_the_docs_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    blocks = re.findall(
        r"```bash\n(.*?)```", (ROOT / "docs" / "drill.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(blocks) == 4
    (tmp_path / "bin").mkdir()
    for name, what in (("onefold", "-m onefold"), ("python", "")):
        (tmp_path / "bin" / name).write_text(
            f'#!/bin/sh\nexec "{sys.executable}" {what} "$@"\n', encoding="utf-8"
        )
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = environment(tmp_path / "tmp") | {"PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env=own,
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0, (
        done.stdout[-3000:] + done.stderr[-3000:] + (tmp_path / "first.log").read_text()[-2000:]
    )
    assert re.search(r"\d+ parameters", done.stdout)
    saved = sorted((tmp_path / "runs" / "drill" / "checkpoints").glob("step-*"))
    assert len(saved) >= 2 and '"world_size": 3' in (saved[-1] / "manifest.json").read_text(
        encoding="utf-8"
    )
