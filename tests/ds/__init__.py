"""Scripts of DeepSpeed on Onefold. The folder is not named `deepspeed`: it would hide the name that
Onefold serves.
"""
