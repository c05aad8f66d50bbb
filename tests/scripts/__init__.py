"""The habits of ordinary PyTorch scripts, each run under DDP and under Onefold: what differs, what
is refused, what is the same.

    registry.py      `@habit("title", at="gradients")` over small functions written as people write them
    loop.py          the ordinary training loop that calls them and knows nothing of who wraps the model
    verdicts.py      two ranks run a habit by the reference and in each column, and say how they compare
    page.py          benchmarks/results/habits.md, from the verdicts
    subjects/        the habits, a module for each subject
    test_*.py        all of them; and what is not of this shape: refusals, operators, state dicts

`python -m tests.scripts` runs all of them, `python -m tests.scripts run "weight decay"` those with these
words in their title, and `python -m tests.scripts write` writes
benchmarks/results/habits.md.
"""
