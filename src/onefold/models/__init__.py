"""Room `models`: what `--model` names, as a module with its tokenizer.

names      what it can be, where it lies, told before torch is imported; the one download of it
build      the module, and recomputation and compilation of its blocks
adapters   `--lora`
"""
