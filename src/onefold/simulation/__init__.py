"""Room `simulation`: run a step of the real engine as one rank of N, on one machine. The result
compares its ledgers with the plan's closed forms, and says when everything runs.
"""
