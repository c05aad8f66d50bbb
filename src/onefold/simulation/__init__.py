"""Room `simulation`: a step of the real engine as one rank of N, on one machine: its ledgers beside
the plan's closed forms, and when everything runs.
"""
