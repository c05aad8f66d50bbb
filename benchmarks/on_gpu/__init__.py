"""What `benchmarks/gpu.py` is made of: its chapters, and the ranks that they start.

Chapters by file:

    chapters.py      check, numbers and overlap
    first.py         block, exchange, copies, communicators, lost, compile, sums: the first hour, as
                     `onefold doctor --check` measures it
    turns.py         ranks, step, host, memory and fp32: sides take turns
    offload.py       offload: state on the host and on NVMe, with a trace of the copies
    largest.py       largest: the largest model that a side trains
    groups.py        groups: groups of ranks and codecs, with streams and without

What they share:

    comparison.py    which sides each chapter of turns.py compares, and its table
    report.py        what is known by now, as gpu.json and gpu.md
    run.py           one side in fresh processes; losses compared
    worker.py        one rank of run.py
    turns_worker.py  one rank of turns.py

What `ranks`, `step`, `host`, `memory` and `fp32` train is a side of benchmarks/offload.
"""
