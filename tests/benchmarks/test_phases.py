"""benchmarks/phases.py: which files a phase enters, and how long an import takes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks import phases


def test_a_run_names_the_files_of_each_phase_beside_fsdp2s(tmp_path: Path) -> None:
    assert phases.main(["--rounds", "1", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "phases.json").read_text())
    rows = {row["side"]: row for row in result["rows"]}
    this, fsdp2 = rows["this"]["files"], rows["fsdp2"]["files"]
    assert "shard.py" in this["shard"] and "runtime/gather.py" in this["forward"]
    assert "runtime/reduce.py" in this["backward"] and "runtime/gather.py" not in this["save"]
    assert "optim/step_hooks.py" in this["step"] and "checkpoint/saving.py" in this["save"]
    assert any("fully_shard" in file for file in fsdp2["shard"])
    assert set(rows["this"]["all"]) == set().union(*this.values())
    times = {name: row["median"] for name, row in result["import_s"].items()}
    assert times["this, import onefold"] < times["torch"] < times["this, onefold.shard"]


def test_files_are_counted_whose_functions_are_entered(tmp_path: Path) -> None:
    (tmp_path / "called.py").write_text("def work():\n    return other()\n\ndef other(): ...\n")
    (tmp_path / "imported.py").write_text("class Empty:\n    number = 1\n")
    files: set[str] = set()
    sys.path.insert(0, str(tmp_path))
    try:
        called = importlib.import_module("called")
        with phases.recorded(f"{tmp_path}/", files):
            importlib.import_module("imported")
            called.work()
    finally:
        sys.path.remove(str(tmp_path))
    assert files == {"called.py"}
    assert sys.getprofile() is None
