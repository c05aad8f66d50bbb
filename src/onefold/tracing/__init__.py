"""Room `tracing`: what a module keeps and computes in a forward and a backward pass, watched on tensors
that have no contents.
"""
