"""Saving and loading of Onefold beside torch's distributed checkpoints (FSDP2) and DeepSpeed: one
model, one disk, one run.

    python -m benchmarks.checkpoint --deepspeed-python PYTHON     # three rounds of gpt-110m on 2 ranks, an hour or so
    python -m benchmarks.checkpoint --model gpt-tiny --rounds 1   # a minute or two: does it run?

A *turn* is one task of one peer in fresh processes. In a round every peer takes all its turns, and
rounds follow each other, so that a drift of the machine falls on all of them; the disk's own rate
is measured beside every save, with as many bytes, by the same processes.

    settings.py     what is measured: peers, turns, the order of a round
    disk.py         the disk's own rate, the page cache
    adapters.py     one class a peer: save, save behind the training, load
    worker.py       one rank of a turn that saves or loads
    pretrained.py   one rank of a turn that opens a Hugging Face folder
    rows.py         turns -> rows and goals
    report.py       the tables
    __main__.py     the command
"""
