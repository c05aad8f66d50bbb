"""Room `tracing`: run a module's forward and backward pass on fake tensors, and record what it
keeps in memory and what it computes.
"""
