"""One rank of one peer in one round: `python -m benchmarks.peers.worker JOB.json RANK`, started by
`launch.py`.

Order matters: libraries are imported and exercised on a toy, the memory baseline is taken, and only
then is the model built. What the kernel counts beyond the baseline is the model's, its training
state's and the library's buffers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.peers import adapters, model, probes
from benchmarks.peers.settings import Setting


def exit_with_the_launcher() -> None:
    """End this process when the launcher is gone: its end of our standard input closes with it,
    however it died.
    """

    def watch() -> None:
        # Not sys.stdin: its lock, held here, would be fatal to an interpreter that is ending
        while os.read(0, 1):
            pass
        os._exit(3)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def touch_libraries(peer: str, setting: Setting) -> None:
    """Let the peer train a toy for a step, so that its code, lazy imports included, is resident
    before the baseline.
    """
    toy = replace(setting, model="gpt-tiny", tokens=32)
    ids, labels = (
        part.to(toy.device) for part in model.micro_batch(toy.model, toy.tokens, 0, 0, 0, toy.ranks)
    )
    trainer = adapters.build(peer, toy, model.build(toy.model, device=toy.device))
    trainer.step([(ids, labels)] * toy.accumulation)
    del trainer
    gc.collect()


def measure(peer: str, setting: Setting, rank: int) -> dict[str, Any]:
    """Build, warm up, time. Memory in MiB beyond the baseline, bytes as counters, seconds as a list
    of steps.
    """
    touch_libraries(peer, setting)
    probes.give_back_free_heap()
    resettable = probes.reset_peak()
    baseline = probes.resident_mib()

    def batches(step: int) -> list[adapters.Batch]:
        return [
            model.micro_batch(setting.model, setting.tokens, step, micro, rank, setting.ranks)
            for micro in range(setting.accumulation)
        ]

    started = time.perf_counter()
    trainer = adapters.build(peer, setting, model.build(setting.model))
    built = time.perf_counter() - started
    losses = [trainer.step(batches(step)) for step in range(setting.warmup)]
    set_up_peak = probes.difference(probes.peak_resident_mib(), baseline)

    gc.collect()
    probes.give_back_free_heap()  # what building the model left behind is not part of a step's peak
    data = [batches(setting.warmup + step) for step in range(setting.steps)]
    dist.barrier()
    if resettable:
        probes.reset_peak()
    before = _counters(trainer)
    seconds, processor = [], time.process_time()
    for taken in data:
        start = time.perf_counter()
        losses.append(trainer.step(taken))
        seconds.append(time.perf_counter() - start)
    processor = time.process_time() - processor
    dist.barrier()
    after = _counters(trainer)
    peak = probes.difference(probes.peak_resident_mib(), baseline)
    gc.collect()
    probes.give_back_free_heap()
    rest = probes.difference(probes.resident_mib(), baseline)
    # A rank that returned would free its peer, whose sockets another rank may still be reading
    dist.barrier()
    return {
        "rank": rank,
        "losses": losses,
        "step_s": seconds,
        "cpu_s": processor,
        "build_s": built,
        "baseline_mib": baseline,
        "set_up_peak_mib": set_up_peak,
        "peak_mib": peak,
        "peak_is_of_timed_steps": resettable,
        "rest_mib": rest,
        **{name: probes.difference(after[name], before[name]) for name in after},
    }


def _counters(trainer: adapters.Peer) -> dict[str, int | None]:
    return {
        "sent_bytes": probes.socket_bytes_sent(),
        "ledger_bytes": trainer.ledger_bytes(),
        "loopback_bytes": probes.loopback_bytes_sent(),
    }


def read_job() -> tuple[dict[str, Any], Path, int]:
    """The job, its file and this process's rank, from the command line; launchers' variables and
    the number of threads are set from them. From now on this process ends with its launcher.
    """
    exit_with_the_launcher()
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job: dict[str, Any] = json.loads(path.read_text())
    world = str(job["setting"]["ranks"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world
    )
    if threads := job["setting"].get("threads", job.get("threads")):
        torch.set_num_threads(threads)
    return job, path, rank


def join_over_gloo(path: Path, rank: int, **more: Any) -> None:
    """Join the other ranks over gloo, through the file store beside the job."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path.with_name('store')}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        **more,
    )


def leave(result: dict[str, Any], path: Path, rank: int) -> NoReturn:
    """Write `rankN.json` whole, wait for the others, end this process."""
    written = path.with_name(f"rank{rank}.part")
    written.write_text(json.dumps(result))
    written.rename(path.with_name(f"rank{rank}.json"))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # What was measured is on disk; the order in which libraries take themselves apart is not our
    # subject
    os._exit(0)


def main() -> None:
    """Read the job, join the others through its file store, measure, leave."""
    job, path, rank = read_job()
    setting = Setting(**job["setting"])
    adapters.prepare(job["peer"])
    join_over_gloo(path, rank)
    leave(measure(job["peer"], setting, rank), path, rank)


if __name__ == "__main__":
    main()
