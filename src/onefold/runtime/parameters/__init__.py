"""Sharded parameters as user code sees them between passes: the shape of the whole parameter, but
only this rank's interval of its data and gradient.

| question                                                        | file        |
|-----------------------------------------------------------------|-------------|
| What does a parameter show, and what does code in a pass get?   | `parameter` |
| What is an interval?                                            | `interval`  |
| What does a function of torch do on one?                        | `operators` |
| `.grad`, `.data`, hooks, writes; elements that are elsewhere    | `values`    |
"""
