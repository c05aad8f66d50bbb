"""Invariant 8: import is quick and harmless; two engines in one process do not touch each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import looks
import onefold
from on_ranks import on_ranks
from ranks import absolute_path
from reference import adamw, sgd, train
from zoo import TinyMLP, features_of

# Of the processor's time, not of the clock's, and as a share of torch's own. That of a short import
# is longer beside others too (their data is in the caches), so the least of many counts, each in a
# process of its own that has torch already.
TIMED = """
import gc, json, os, time
gc.disable()  # one pass over all that torch has made takes longer than this import, and may or may not fall into it
start = time.process_time()
import torch, torch.distributed
torchs = time.process_time() - start

def import_it():
    inlet, outlet = os.pipe()
    if os.fork() == 0:
        start = time.process_time()
        import onefold
        onefold.shard, onefold.Recipe  # names are loaded when they are first asked for
        os.write(outlet, json.dumps(time.process_time() - start).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(inlet, 100))

print(json.dumps(min(import_it() for _ in range(20)) / torchs))
"""

WATCHED = """
import json, logging, os, signal, sys, threading, warnings
import torch, torch.distributed, torch.nn.parallel
from pathlib import Path

def snapshot():
    homes = {"torch": torch, "Tensor": torch.Tensor, "Module": torch.nn.Module, "Parameter": torch.nn.Parameter,
             "Linear": torch.nn.Linear, "Embedding": torch.nn.Embedding, "Optimizer": torch.optim.Optimizer,
             "AdamW": torch.optim.AdamW, "distributed": torch.distributed, "clip": torch.nn.utils.clip_grad,
             "checkpoint": torch.utils.checkpoint, "autograd": torch.autograd, "functional": torch.nn.functional}
    seen = {f"{home}.{name}": id(value) for home, thing in homes.items() for name, value in list(vars(thing).items())
            if callable(value) or type(value) is property}
    seen |= {"threads": threading.active_count(), "environment": hash(frozenset(os.environ.items())),
             "handlers": str([signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]), "hook": id(sys.excepthook),
             "logging": str(logging.getLogger().handlers), "warnings": str(warnings.filters), "path": str(sys.path),
             "dtype": str(torch.get_default_dtype()), "torch threads": torch.get_num_threads(),
             "files": str(sorted(p.name for p in Path(".").iterdir())), "seed": torch.initial_seed()}
    return seen

before, modules = snapshot(), set(sys.modules)
import onefold
onefold.shard, onefold.Recipe, onefold.StallError
after = snapshot()
changed = sorted(k for k in before if before[k] != after.get(k)) + sorted(set(after) - set(before))
print(json.dumps({"changed": changed, "new": sorted({m.split(".")[0] for m in set(sys.modules) - modules})}))
"""


def run_program(program: str, folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        | {"PYTHONPATH": absolute_path()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", f"importing onefold says: {done.stderr}"
    return json.loads(done.stdout)


@pytest.mark.slow
def test_import_takes_little_over_torchs_own(tmp_path: Path) -> None:
    share = min(run_program(TIMED, tmp_path) for _ in range(2))  # the first writes the bytecode
    assert share < 0.1, (
        f"import onefold takes {share:.3f} of what torch's own import takes, at most a tenth is"
        " allowed"
    )


def test_import_changes_nothing_and_loads_nothing_heavy(tmp_path: Path) -> None:
    seen = run_program(WATCHED, tmp_path)
    assert seen["changed"] == [], (
        "importing onefold changed these names of torch, or this state of the process"
    )
    heavy = {
        "transformers",
        "accelerate",
        "lightning",
        "peft",
        "typer",
        "rich",
        "pydantic",
        "yaml",
        "matplotlib",
        "deepspeed",
        "numpy.f2py",
    }
    assert not heavy & set(seen["new"]), (
        f"importing onefold loads {sorted(heavy & set(seen['new']))}"
    )


LAZY = """
import json, sys
import onefold
torch_came_with_it = "torch" in sys.modules
from onefold.runtime.hooks import engine_of
print(json.dumps([torch_came_with_it, callable(onefold.shard), onefold.shard.__name__, sorted(set(onefold.__all__) - set(dir(onefold))),
                  [n for n in onefold.__all__ if not hasattr(onefold, n)], onefold.engine_of is engine_of]))
"""


def test_import_by_itself_loads_no_torch_and_every_name_is_there_when_it_is_asked_for(
    tmp_path: Path,
) -> None:
    """The command tells of a wrong option, and ends on Ctrl-C, before torch is imported."""
    assert run_program(LAZY, tmp_path) == [False, True, "shard", [], [], True]


#: What optim/steps.py puts around methods of torch's, which have no hooks there.
AROUND = {
    "Module.zero_grad", "Optimizer.load_state_dict", "Optimizer.profile_hook_step",
    "Optimizer.state_dict", "Optimizer.zero_grad",
}  # fmt: skip


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [0, 3])
def test_sharding_patches_nothing_of_torch_but_what_one_file_lists(stage: int) -> None:
    homes: list[Any] = [
        torch, torch.Tensor, nn.Module, torch.optim.Optimizer, torch.optim.AdamW, dist, nn.functional
    ]  # fmt: skip
    before = [dict(vars(home)) for home in homes]
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage))
    train(model, adamw(model), [features_of(0, 4, 7)])
    changed = {
        f"{home.__name__}.{name}"
        for home, names in zip(homes, before, strict=True)
        for name in names
        if callable(names[name]) and vars(home).get(name) is not names[name]
    }
    assert changed == AROUND


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_engines_do_not_touch_each_other(stage: int) -> None:
    recipe = onefold.Recipe.zero(stage)
    busy, idle = onefold.shard(TinyMLP(), recipe), onefold.shard(TinyMLP(), recipe)
    looks.watch(idle)
    held = looks.held(idle)
    train(busy, sgd(busy), [features_of(step, 4, 7) for step in range(3)])
    assert looks.engine(busy) is not looks.engine(idle)
    assert looks.held(idle) == held and looks.sent(idle) == {}
    assert all(p.grad is None for p in idle.parameters())
