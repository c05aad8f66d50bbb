"""The values of a whole model: given to its units by `shard()`, read and written between passes.

| question                                     | files, in the order to read them   |
|----------------------------------------------|------------------------------------|
| How does each unit get its first values?     | `start`, `elsewhere`, `materialize`, `values` |
| What are whole values, and state dicts?      | `values`, `dicts`, `contents`      |
| How do whole values travel?                  | `stream`                           |
| How does a model come out of its shards?     | `unsharding`                       |
"""
