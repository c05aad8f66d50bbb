"""A wheel of Onefold in a fresh environment with torch, safetensors and numpy alone: it imports,
trains a step at stage 3, saves, loads, plans. With the extra `cli` its command plans.

Takes minutes (torch is installed once more), so it runs under `make test-all`, or by its name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"

STEP = """
import torch, onefold
from torch import nn

assert "site-packages" in onefold.__file__, onefold.__file__
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
model = onefold.shard(model, onefold.Recipe.zero(stage=3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
before = onefold.full_state_dict(model)
model(torch.randn(8, 16)).square().mean().backward()
onefold.clip_grad_norm_(model, 1.0)
optimizer.step()
optimizer.zero_grad()
after = onefold.full_state_dict(model)
assert any(not torch.equal(before[name], after[name]) for name in before)
onefold.save("step-1", model=model, optimizer=optimizer, step=1)
assert onefold.load("step-1", model=model, optimizer=optimizer).step == 1
assert onefold.plan(6e8, gpus=8, gpu="h100-80", seq=1024, micro_batch=1).recommended is not None
print("trained", torch.__version__)
"""


def pin_of(package: str) -> str:
    [line] = re.findall(rf"(?m)^{package}==\S+", CONSTRAINTS.read_text(encoding="utf-8"))
    return line


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(3600)
def test_a_wheel_beside_torch_safetensors_and_numpy_trains_a_step(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves folders in the tree it builds
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    [wheel] = tmp_path.glob("onefold-*.whl")

    run(sys.executable, "-m", "venv", tmp_path / "fresh", cwd=tmp_path)
    python = tmp_path / "fresh" / "bin" / "python"
    fresh = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*fresh, *map(pin_of, ("torch", "safetensors", "numpy")), "-c", CONSTRAINTS, cwd=tmp_path)
    run(*fresh, "--no-deps", wheel, cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)  # it asks for nothing else
    assert "trained" in run(python, "-c", STEP, cwd=tmp_path)

    run(*fresh, f"{wheel}[cli]", "-c", CONSTRAINTS, cwd=tmp_path)
    command = [tmp_path / "fresh" / "bin" / "onefold", "plan", "llama-3-8b"]
    assert "stage" in run(*command, "--gpus", "8", "--gpu", "h100-80", cwd=tmp_path)
