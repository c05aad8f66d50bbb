"""A program: train on two ranks and print what the loopback interface carried, beside the formula.
Run it in a network namespace of its own (`unshare -n`), where nobody else's bytes pass.

    python loopback.py STAGE MICRO_BATCHES
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch
import torch.distributed as dist
from wire import counted_sends, elements_of, formula, train_steps

from ranks import run_ranks
from zoo import TinyMLP, features_of

STEPS = 4


def loopback_bytes() -> int:
    """Bytes the interface `lo` has transmitted, every header included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("there is no interface lo")


def segments() -> dict[str, int]:
    """TCP's segments here: all that were sent, and those sent again since an answer came late."""
    names, values = (
        line.split()
        for line in Path("/proc/self/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return {name: int(values[names.index(name)]) for name in ("OutSegs", "RetransSegs")}


def carried(stage: int, micro_batches: int) -> dict[str, Any]:
    import onefold

    model = onefold.shard(TinyMLP(16, 256, 6, 16), onefold.Recipe.zero(stage, stall_timeout=30.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [features_of(i + 100 * dist.get_rank(), 2, 16) for i in range(STEPS * micro_batches)]
    # To learn the order, and be in a steady state
    train_steps(model, optimizer, batches[: 2 * micro_batches], micro_batches)
    dist.barrier()
    time.sleep(0.2)
    bytes_before, segments_before = loopback_bytes(), segments()
    dist.barrier()
    with counted_sends() as given:
        train_steps(model, optimizer, batches, micro_batches)
    dist.barrier()
    time.sleep(0.2)
    sent, after = loopback_bytes() - bytes_before, segments()
    numel, turn = elements_of(onefold.engine_of(model).units)
    return {
        "sent": sent,
        "expected": STEPS * 2 * formula(stage, numel, 2, micro_batches, turn=turn),
        "numel": numel,
        # What explains a difference: bytes that this rank gave away, and TCP's segments.
        "given": {"payload": given.payload, "control": given.control, "others": given.others},
        "segments": {name: count - segments_before[name] for name, count in after.items()},
    }


if __name__ == "__main__":
    print(json.dumps(run_ranks(2, carried, int(sys.argv[1]), int(sys.argv[2]))[0]))
