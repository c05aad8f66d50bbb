"""`benchmarks/launch.py`: every rank calls a module's `measure`, and nothing outlives it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from benchmarks import launch

MODULE = """
import os
import torch.distributed as dist

def prepare(job):
    assert not dist.is_initialized()
    os.environ["SAID"] = job["word"]

def measure(job):
    if job["word"] == "wrong" and job["rank"] == 1:
        raise ValueError("boom")
    words = [None] * job["ranks"]
    dist.all_gather_object(words, f"{os.environ['SAID']} {job['rank']}")
    return {"words": words, "threads": os.environ["OMP_NUM_THREADS"]}
"""
ALONE = """
def join(job):
    pass

def measure(job):
    import torch.distributed as dist
    return {"met": dist.is_initialized(), "world": job["ranks"]}
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules that ranks can import, and a folder of its own for temporary files."""
    for name, text in {"said_by_ranks": MODULE, "said_alone": ALONE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_ranks_prepare_meet_and_answer_in_their_order(tmp_path: Path) -> None:
    found = launch.all_ranks("said_by_ranks", {"word": "here"}, 2, threads=3)
    assert found == [{"words": ["here 0", "here 1"], "threads": "3"}] * 2
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_module_may_meet_in_a_way_of_its_own() -> None:
    assert launch.all_ranks("said_alone", {}, 1) == [{"met": False, "world": 1}]


def test_a_rank_that_fails_ends_all_with_its_words() -> None:
    found = launch.run_ranks("said_by_ranks", {"word": "wrong"}, 2)
    assert found["status"] == "failed" and found["error"].startswith("rank 1 ended with status 1")
    assert "ValueError: boom" in found["error"]
    with pytest.raises(RuntimeError, match=r"(?s)said_by_ranks on 2 ranks, .*boom"):
        launch.all_ranks("said_by_ranks", {"word": "wrong"}, 2)
