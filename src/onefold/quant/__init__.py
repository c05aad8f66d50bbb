"""Fewer bits: codecs of the wire and of frozen weights, and formats of moments.

| what                                   | where                                                |
|----------------------------------------|------------------------------------------------------|
| floats as fewer bytes                  | `codecs`                                             |
| encoded wires, encoded frozen weights  | `encoded`                                            |
| moments of optimizers in fewer bits    | `moments`, `moment_packing`                          |
| stochastic rounding to bf16            | `bf16_rounding`                                      |
| what is compiled on CUDA               | `compiled`                                           |

A new codec is a subclass of `Codec` in codecs.py, its name in `WireCodec`, `FrozenCodec` or both in
recipe/options.py (then `make options`), and its error in tests/stores/test_codecs.py. The plan and the
ledger count its `encoded_bytes`; docs/slow-links.md says what it is for.
"""
