"""One rank of one peer in one round, started by `launch.run_ranks`.

Order matters: libraries are imported and exercised on a toy, the memory baseline is taken, and only
then is the model built. What the kernel counts beyond the baseline is the model's, its training
state's and the library's buffers.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch.distributed as dist

from benchmarks import probes
from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting


def prepare(job: dict[str, Any]) -> None:
    adapters.prepare(job["peer"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up, time. Memory in MiB beyond the baseline, bytes as counters, seconds as a list
    of steps.
    """
    peer, setting, rank = job["peer"], Setting(**job["setting"]), dist.get_rank()
    # Code, lazy imports included, is resident before the baseline
    model.touch(lambda toy, whole: adapters.build(peer, toy, whole), setting)
    probes.give_back_free_heap()
    resettable = probes.reset_peak()
    baseline = probes.resident_mib()

    started = time.perf_counter()
    trainer = adapters.build(peer, setting, model.build(setting.model))
    built = time.perf_counter() - started
    losses = [trainer.step(model.batches(setting, step, rank)) for step in range(setting.warmup)]
    set_up_peak = probes.difference(probes.peak_resident_mib(), baseline)

    gc.collect()
    probes.give_back_free_heap()  # what building the model left behind is not part of a step's peak
    data = [model.batches(setting, setting.warmup + step, rank) for step in range(setting.steps)]
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
        "loopback_bytes": probes.interface_bytes_sent("lo"),
    }
