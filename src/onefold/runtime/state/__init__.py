"""The values of a whole model: how `shard()` gives them to the units, and how they are read and
written between passes.

| question                                   | files, in the order to read them  |
|--------------------------------------------|-----------------------------------|
| How does each unit get its first values?   | `start`, `materialize`, `values`  |
| What are whole values, and state dicts?    | `values`, `dicts`, `contents`     |
| How are whole values sent?                 | `stream`                          |
| How does a model become a plain one again? | `unsharding`                      |
"""
