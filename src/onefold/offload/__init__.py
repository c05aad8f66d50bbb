"""Room `offload`: state, gradients and activations that rest on the host or on NVMe, and the step
of what rests there.
"""
