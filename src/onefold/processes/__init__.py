"""Room `processes`: what holds for every process of a run that is started by a command, whatever it
computes.

    signals   who asks a process to end, and with whom it ends     claim   one run at a time has an output folder
    host      who starts ranks here, cores, GPUs                   ranks   this rank among the others, small figures
    peers     which rank has gone
"""
