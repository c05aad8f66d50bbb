"""Invariant 4: between steps stage 3 holds shards only; `del model` frees everything now; no
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
from memory_probe import MIB, give_memory_back_at_once, living_bytes, resident_bytes

from ranks import absolute_path, run_ranks
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

TESTS = Path(__file__).parent.parent


def model_of(width: int = 384) -> TinyMLP:
    torch.manual_seed(0)
    return TinyMLP(16, width, 8, 16)


def one_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(features_of(dist.get_rank(), 2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def held_by_stage_3() -> list[str]:
    """After a step, an evaluation, an abandoned forward and a full_params: nothing whole is
    left.
    """
    import onefold

    before = living_bytes()
    model = onefold.shard(model_of(), onefold.Recipe.zero(3, stall_timeout=30.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    shards = 4 * sum(unit.numel for unit in onefold.engine_of(model).units) // 2
    problems = []

    def check(after: str, waiting: int = 0) -> None:
        excess = living_bytes() - before - shards - waiting
        if excess > MIB:
            problems.append(
                f"after {after}: {excess} bytes beyond the {shards} bytes of shards and {waiting}"
                " waiting for a backward pass"
            )

    check("sharding")
    for _ in range(2):
        one_step(model, optimizer)
        check("a step")
    with torch.no_grad():
        model(features_of(0, 2, 16))
    check("an evaluation")
    output = model(features_of(0, 2, 16))
    turn = sum(
        unit.gathered_bytes
        for unit in onefold.engine_of(model).units
        if unit.name in ("(root)", "blocks.7")
    )
    check("a forward whose graph is alive", waiting=turn)
    del output
    check("a forward without backward")
    with onefold.full_params(model):
        pass
    check("full_params")
    state = onefold.full_state_dict(model)
    del state
    check("full_state_dict")
    return problems


def test_stage_3_holds_only_shards_between_steps() -> None:
    assert run_ranks(2, held_by_stage_3) == [[], []]


def grown_over_steps(stage: int) -> dict[str, int]:
    import onefold

    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, stall_timeout=30.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def steps(count: int) -> None:
        for i in range(count):
            model(tokens_of(i)).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(5)
    living_bytes(), resident_bytes()  # what their own first call imports is no growth
    gc.collect()
    gc.disable()  # nothing may wait for the collector
    objects, living, resident = len(gc.get_objects()), living_bytes(), resident_bytes()
    steps(60)
    return {
        "objects": len(gc.get_objects()) - objects,
        "living": living_bytes() - living,
        "resident": resident_bytes() - resident,
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sixty_steps_leave_no_objects_and_no_bytes_behind(stage: int) -> None:
    for rank, grown in enumerate(run_ranks(2, grown_over_steps, stage)):
        assert grown["objects"] < 100, f"rank {rank}, stage {stage}: {grown}"
        assert grown["living"] < 4096, f"rank {rank}, stage {stage}: {grown}"
        assert grown["resident"] < 8 * MIB, f"rank {rank}, stage {stage}: {grown}"


def deleted(stage: int, how: str) -> dict[str, Any]:
    """Bytes and objects that outlive `del model`, with the garbage collector off."""
    import onefold

    give_memory_back_at_once()
    gc.collect()
    gc.disable()
    living, resident = living_bytes(), resident_bytes()
    model = onefold.shard(model_of(768), onefold.Recipe.zero(stage, stall_timeout=30.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if how != "unused":
        one_step(model, optimizer)
    if how == "after an error in forward":
        model.blocks[4].register_forward_pre_hook(_fail)
        with contextlib.suppress(ZeroDivisionError):
            model(features_of(0, 2, 16))
    engine, block = weakref.ref(onefold.engine_of(model)), weakref.ref(model.blocks[0])
    del optimizer, model
    return {
        "engine": engine() is not None,
        "block": block() is not None,
        "living": living_bytes() - living,
        "resident": resident_bytes() - resident,
    }


def deleted_each_way(stage: int) -> dict[str, dict[str, Any]]:
    return {
        how: deleted(stage, how) for how in ("unused", "after a step", "after an error in forward")
    }


def _fail(module: Any, inputs: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_deleted_model_releases_everything_at_once(stage: int) -> None:
    for rank, cases in enumerate(run_ranks(2, deleted_each_way, stage)):
        for how, left in cases.items():
            told = f"rank {rank}, stage {stage}, {how}: {left}"
            assert not left["engine"] and not left["block"], (
                f"objects outlive the model without the collector: {told}"
            )
            assert left["living"] < 4096, f"tensors outlive the model: {told}"
            assert left["resident"] < 24 * MIB, (
                f"memory is not given back (the model has 75 MB): {told}"
            )


def threads_and_sockets(stage: int) -> dict[str, Any]:
    import onefold

    process = psutil.Process()

    def count() -> dict[str, int]:
        return {
            "threads": process.num_threads(),
            "python threads": threading.active_count(),
            "sockets": len(process.net_connections()),
            "files": process.num_fds(),
            "children": len(process.children()),
        }

    before = count()
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, stall_timeout=30.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(2):
        model(tokens_of(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    del model, optimizer
    dist.barrier()
    after = count()
    return {key: (before[key], after[key]) for key in before}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_deleted_model_takes_its_threads_and_sockets_along(stage: int) -> None:
    for rank, counts in enumerate(run_ranks(2, threads_and_sockets, stage)):
        # One autograd thread or two may have started: they belong to torch. gloo's belong to the
        # communicator that is gone.
        assert counts["threads"][1] <= counts["threads"][0] + 2, (
            f"rank {rank}, (before, after): {counts}"
        )
        for key in ("python threads", "sockets", "children"):
            assert counts[key][1] <= counts[key][0], f"rank {rank}, (before, after): {counts}"


PROGRAM = """
    import json, os, sys, torch, torch._dynamo, torch.distributed as dist, onefold
    sys.path.insert(0, {tests!r})
    from zoo import TinyGPT, tokens_of
    started = []  # each program is forked before anything but imports has happened, and ends as the interpreter ends
    programs = [(rank, ending) for ending in ("clean", "forgotten", "error") for rank in (0, 1)]
    for rank, ending in programs:
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
    """With the process group destroyed, forgotten, or an exit in the middle: no abort, no warning,
    no file, no process.
    """
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
    command = [sys.executable, "-c", program, str(said)]
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=300
    )
    words = {
        f"{ending}-{rank}": (said / f"{ending}-{rank}").read_text()
        for ending in ("clean", "forgotten", "error")
        for rank in (0, 1)
    }
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout) == [
        0,
        0,
        0,
        0,
        3,
        3,
    ], (done, words)
    assert set(words.values()) == {""}, words
    assert list(temporary.iterdir()) == [] and list(work.iterdir()) == [], "files left behind"
