"""Room `machine`: this machine as it was measured, in a file. `onefold doctor --calibrate` writes the
file, and the plan asks it.

    calibration.py  Calibration: the file, and which machine this is
    flops.py        FLOPs of operations
"""
