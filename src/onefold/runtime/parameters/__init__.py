"""Sharded parameters as user code sees them between passes: the shape of the whole parameter, but
only this rank's interval of its data and gradient.

| question                                                        | files, in the order to read them |
|-----------------------------------------------------------------|----------------------------------|
| What does a parameter show, and what does it ask of the engine? | `parameter`, `values`            |
| What is an interval?                                            | `interval`                       |
| What does a function of torch do on one, by its schema?         | `schema`                         |
| How does it do that?                                            | `operators`                      |
| What if its shard has no storage on the device?                 | `values`                         |
| What does code in a pass, or outside of one, get of a whole?    | `access`                         |
| Who hears of its gradient, and of writes to it?                 | `gradient_hooks`, `values`       |
"""
