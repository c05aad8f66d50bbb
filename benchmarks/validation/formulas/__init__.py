"""The published closed forms, each with its paper and section. Plain arithmetic on numbers: no
tensors, no engine.

Units everywhere: bytes, elements, FLOP, seconds. Ψ is `numel`, N is `ranks`. Bytes per parameter
are an input, never a constant: 16, 18 and 20 are all in print (`states.CONVENTIONS`).
"""
