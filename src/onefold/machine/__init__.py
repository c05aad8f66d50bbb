"""Room `machine`: this machine as it was measured, in a file. `onefold doctor --calibrate` writes the
file, and the plan asks it.

    calibration.py  Calibration: the file, and what it says of a pass, a move or a copy
    measured.py     the figures in it
    fit.py          lines and costs through measured points
    kernels.py      the work of a pass: FLOPs, operations and bytes, counted
    identity.py     which machine this is
"""
