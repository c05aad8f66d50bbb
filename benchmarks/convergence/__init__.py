"""Does it learn as well? Fine-tuning, training from scratch and QLoRA with each part of ZeRO++
alone and with all, beside plain stage 3.

    python -m benchmarks.convergence                                        # every case, every side
    python -m benchmarks.convergence --cases scratch --sides plain qgz      # some; the reference is always among them
    python -m benchmarks.convergence --resume                               # go on: sides that have ended are kept

Ranks stand in two pretended nodes on this machine, so that codecs and groups do what they would
between nodes. All sides of a case start from the same weights and read the same samples in the same
order; at the end all are asked for the loss of the same held-out text. A side is within if its loss
differs from the reference's by no more than the case allows.

    settings.py   cases and sides
    worker.py     one rank of one side
    rows.py       runs -> rows: how far each side ends from the reference
    __main__.py   the command: options, tables, curves
"""
