"""The drill of checkpoints: a run that is killed again and again, and checkpoints that are injured
on purpose.

    python -m benchmarks.faults [--kills 200] [--injuries 200]
"""
