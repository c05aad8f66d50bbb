"""Room `simulation`: run a step of the real engine as one rank of N, on one machine, and compare its
ledgers with the plan's walk.
"""
