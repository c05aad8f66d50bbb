"""The values of a whole model: how `shard()` gives them to the units, and how they are read and
written between passes.

| question                                                               | file     |
|------------------------------------------------------------------------|----------|
| How does each unit get its first values? What are whole values?        | `start`  |
| What is in a state dict, and how is a whole one read and written?      | `dicts`  |
| How are whole values sent, and how does a model become a plain one again? | `stream` |
"""
