"""State on the host and on NVMe: Onefold beside FSDP2's and DeepSpeed's offload, on one model, the
same data and the same ranks.

    python -m benchmarks.offload --disk FOLDER --deepspeed-python PYTHON    # three rounds at two batch sizes, an hour or so
    python -m benchmarks.offload --quick                                    # one round of 256 tokens, some minutes
    python -m benchmarks.offload --only-large --disk FOLDER                 # 1.3 billion parameters in a few GiB, states on disk
    python benchmarks/gpu.py --only offload largest                         # the same questions on one CUDA GPU

A *side* is a library with its state in a certain place. All sides take turns, round after round,
each in fresh processes, so that a drift of the machine falls on all of them. On CPU ranks device
and host are the same memory: what is measured is what moving state costs in software, what the
engine holds on which tier, and what the disk gives. Beside every timed step of a side that uses the
disk a third process copies as much sequentially with O_DIRECT while the ranks wait: what the disk
gives just then.

    sides.py      what is measured: sides, how each is built, how its optimizer's step is watched
    disk.py       the plain copy
    planned.py    the host memory and the disk space that a recipe should take
    worker.py     one rank of one side in one round
    traced.py     which part of a profile's copies had a compute kernel beside it
    large.py      models too large for the memory they are given
    largest.py    the largest model of each side: one attempt
    rows.py       rounds -> rows, pairs, goals
    report.py     the tables
    __main__.py   the command
"""
