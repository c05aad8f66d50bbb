"""examples/launch: each file says what it says to the tool it is for, and to `onefold train`.

Where the tool's own Python package is installed (skypilot, kubernetes, kubeflow-training, ray) its
own check reads the file as well; the extra `launch` has them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
FILES = {"slurm.sbatch", "jobset.yaml", "pytorchjob.yaml", "sky.yaml", "ray_train.py"}


def has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def trains(words: list[str]) -> dict[str, Any]:
    """What `onefold train` understands by `words`, which runs nothing."""
    main: Any = pytest.importorskip("typer.main")
    from onefold.cli.app import app

    assert words[:2] == ["onefold", "train"], words
    part: Any = main.get_command(app).commands["train"]
    context = part.make_context("train", words[2:])
    taken = {p.name: context.params[p.name] for p in part.params}
    assert taken["output"] and str(taken["stage"]).endswith("3"), taken
    return taken


def test_every_file_is_edited_in_three_places() -> None:
    assert {path.name for path in LAUNCH.iterdir() if path.is_file()} == FILES
    for name in FILES:
        marks = re.findall(r"EDIT (\d)", (LAUNCH / name).read_text(encoding="utf-8"))
        assert sorted(marks) == ["1", "2", "3"], name


def test_slurm_starts_a_rank_a_task(tmp_path: Path) -> None:
    """The script itself runs, with an `srun` that says what it was asked for."""
    script = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    (tmp_path / "activate").touch()
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    text = script.replace("/shared/venv/bin/activate", str(tmp_path / "activate"))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash"], input=text, env={**os.environ, "PATH": path}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[0] == "--kill-on-bad-exit=1"
    assert trains(words[1:])["grace"] == "110s"
    asked = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=?(\S*)", script))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] and asked["signal"] == "USR1@120"
    known = {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal",
        "requeue", "open-mode", "output",
    }  # fmt: skip
    assert asked.keys() == known  # of `man sbatch`


def by_torchrun(words: list[str]) -> dict[str, Any]:
    """The same of `torchrun ... -m onefold train`; and what torchrun understands."""
    from torch.distributed.run import parse_args

    assert words[0] == "torchrun"
    asked = parse_args(words[1:])
    assert asked.module and asked.training_script == "onefold"
    return {**vars(asked), **trains(["onefold", *asked.training_script_args])}


def test_skypilot_starts_onefold_on_each_machine() -> None:
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text(encoding="utf-8"))
    assert task.keys() == {"name", "num_nodes", "resources", "file_mounts", "setup", "run"}
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    text = f'torchrun() {{ printf "%s\\n" torchrun "$@"; }}\n{task["run"]}'
    done = subprocess.run(
        ["bash", "-eu"], input=text, text=True, capture_output=True,
        env={**os.environ, **nodes, "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = by_torchrun(done.stdout.splitlines())
    assert (asked["nnodes"], asked["nproc_per_node"]) == ("2", "8")
    assert asked["rdzv_endpoint"] == "10.0.0.1:29500"
    if has("sky"):
        import sky

        assert sky.Task.from_yaml(str(LAUNCH / "sky.yaml")).num_nodes == task["num_nodes"]


def test_a_jobset_starts_onefold_on_each_machine() -> None:
    job = yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))
    pods = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    asked = by_torchrun([*container["command"], *container["args"]])
    assert asked["nnodes"] == str(pods["parallelism"]) == str(pods["completions"])
    assert asked["nproc_per_node"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert asked["grace"] == "110s"
