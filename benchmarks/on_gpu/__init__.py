"""What `benchmarks/gpu.py` is made of: its chapters, and the ranks that they start.

    turns.py         ranks, step, host, memory and fp32: sides take turns; and what is known by now, as gpu.json and gpu.md
    comparison.py    which sides each of these compares, and its table
    turns_worker.py  one rank of them
    chapters.py      the others: check, numbers, overlap and groups; the first hour, as `onefold doctor --check` measures it
    offload.py       offload: state on the host and on NVMe, with a trace of the copies
    largest.py       largest: the largest model that a side trains
    run.py           one side in fresh processes; worker.py: one rank of it

What `ranks`, `step`, `host`, `memory` and `fp32` train is a side of benchmarks/offload.
"""
