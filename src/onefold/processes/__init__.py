"""Room `processes`: the processes of a run that a command starts, independent of what they compute.

signals   requests to end a process, and its end with its parent    claim   one run at a time uses an output folder
host      this machine's launcher, cores and GPUs                   ranks   this rank, and small values between ranks
peers     notice of ranks that have ended
"""
