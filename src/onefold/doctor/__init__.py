"""Room `doctor`: what a machine can do, measured, kept in a file and asked. Knows no plan and no
training: `onefold doctor` measures, the plan asks.
"""
