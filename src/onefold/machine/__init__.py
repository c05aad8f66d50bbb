"""Room `machine`: this machine as it was measured, in a file (calibration.py). `onefold doctor
--calibrate` writes the file, and the plan asks it.
"""
