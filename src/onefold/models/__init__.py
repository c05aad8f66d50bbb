"""Room `models`: load or build `--model` as a module with its tokenizer.

names      the kinds of models and where they are stored, found without torch; downloads
build      the module, and recomputation and compilation of its blocks
adapters   `--lora`
parallel   `--tp` and `--ep`
"""
