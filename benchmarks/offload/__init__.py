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

    settings.py   what is measured: sides, settings
    sides.py      how each side is built, and how its optimizer's step is watched
    disk.py       the plain copy
    planned.py    the host memory and the disk space that a recipe should take
    worker.py     one rank of one side in one round
    summary.py    rounds -> rows, pairs, goals (the JSON's schema)
    report.py     the tables
    alone.py      SmolLM2 on one process: state on the disk beside the same in memory
    traced.py     which part of a profile's copies had a compute kernel beside it
    large.py      a model too large for the memory it is given
    largest.py    the largest model of each side: one attempt
    cli.py        the command
"""
