"""Invariant 4: between steps stage 3 holds shards only; `del model` frees everything at once; no
process, thread, socket or temporary file survives an exit.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import looks
import onefold
from on_ranks import on_ranks
from ranks import absolute_path
from zoo import TinyMLP, features_of

TESTS = Path(__file__).parents[1]
MIB = 1 << 20


def sharded(stage: int, width: int = 384) -> tuple[Any, torch.optim.Optimizer]:
    model = onefold.shard(TinyMLP(16, width, 8, 16), onefold.Recipe.zero(stage))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def one_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(features_of(dist.get_rank(), 2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_stage_3_holds_only_shards_between_steps() -> None:
    before = looks.living()
    model, optimizer = sharded(3)
    units = dict(looks.units(model))
    shards = 4 * sum(units.values()) // 2

    def check(after: str, waiting: int = 0) -> None:
        excess = looks.living() - before - shards - waiting
        assert excess <= MIB, f"after {after}: {excess} bytes beyond {shards} of shards"

    check("sharding")
    for _ in range(2):
        one_step(model, optimizer)
        check("a step")
    with torch.no_grad():
        model(features_of(0, 2, 16))
    check("an evaluation")
    output = model(features_of(0, 2, 16))
    # The last units stay gathered for the backward pass
    check("a forward whose graph is alive", 4 * (units["(root)"] + units["blocks.7"]))
    del output
    check("a forward without backward")
    with onefold.full_params(model):
        pass
    check("full_params")
    onefold.full_state_dict(model)
    check("full_state_dict")


def _fail(module: Any, inputs: Any) -> None:
    raise ZeroDivisionError


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_deleted_model_releases_everything_at_once(stage: int) -> None:
    """With the collector off."""
    gc.collect()
    gc.disable()
    for how in ("unused", "after a step", "after an error in forward"):
        living = looks.living()
        model, optimizer = sharded(stage)
        if how != "unused":
            one_step(model, optimizer)
        if how == "after an error in forward":
            model.blocks[4].register_forward_pre_hook(_fail)
            with contextlib.suppress(ZeroDivisionError):
                model(features_of(0, 2, 16))
        engine, block = weakref.ref(looks.engine(model)), weakref.ref(model.blocks[0])
        del optimizer, model
        assert engine() is None and block() is None, how
        assert looks.living() - living < 4096, how


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_deleted_model_takes_its_threads_and_sockets_along(stage: int) -> None:
    process = psutil.Process()

    def count() -> dict[str, int]:
        return {
            "threads": process.num_threads(),
            "python threads": threading.active_count(),
            "sockets": len(process.net_connections()),
            "children": len(process.children()),
        }

    dist.barrier()
    before = count()
    dist.barrier()  # a rank that has left may have closed its sockets
    model, optimizer = sharded(stage)
    one_step(model, optimizer)
    dist.barrier()
    del model, optimizer
    dist.barrier()
    after = count()
    dist.barrier()
    # One or two of autograd may have started: they belong to torch
    assert after.pop("threads") <= before.pop("threads") + 2
    assert all(after[key] <= before[key] for key in before), (before, after)


PROGRAM = """
    import json, os, sys, torch, torch._dynamo, torch.distributed as dist, onefold
    sys.path.insert(0, {tests!r})
    from zoo import TinyGPT, tokens_of
    started = []  # each is forked before anything but imports has happened, and ends as the interpreter ends
    for rank, ending in [(rank, ending) for ending in ("clean", "forgotten", "error") for rank in (0, 1)]:
        pid = os.fork()
        if pid == 0:
            said = os.open(f"{{sys.argv[1]}}/{{ending}}-{{rank}}", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1), os.dup2(said, 2), os.close(said)
            break
        started.append(pid)
    else:
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]))
        sys.exit(0)
    dist.init_process_group("gloo", init_method=f"file://{{sys.argv[1]}}/rendezvous-{{ending}}", rank=rank, world_size=2)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, stall_timeout=60.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(2):
        model(tokens_of(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ending == "clean":
        dist.destroy_process_group()
    if ending == "error":
        raise SystemExit(3)
"""


def test_a_program_exits_by_itself_quietly_and_leaves_no_file(tmp_path: Path) -> None:
    """With the process group destroyed, forgotten, or an exit in the middle."""
    temporary, work, said = tmp_path / "tmp", tmp_path / "work", tmp_path / "said"
    temporary.mkdir(), work.mkdir(), said.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PYTHONPATH": absolute_path(),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch's own"),
    }
    program = textwrap.dedent(PROGRAM.format(tests=str(TESTS)))
    done = subprocess.run(
        [sys.executable, "-c", program, str(said)],
        cwd=work, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    words = {file.name: file.read_text() for file in said.iterdir() if "-" in file.name}
    words = {name: text for name, text in words.items() if not name.startswith("rendezvous")}
    assert (done.returncode, done.stderr) == (0, ""), (done, words)
    assert json.loads(done.stdout) == [0, 0, 0, 0, 3, 3], (done, words)
    assert len(words) == 6 and set(words.values()) == {""}, words
    assert list(temporary.iterdir()) == [] and list(work.iterdir()) == [], "files left behind"
