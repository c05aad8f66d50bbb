"""Closed forms that a plan uses where there is no code to trace, each with its paper. What papers
print beyond them is in `benchmarks/validation/formulas`.
"""
