"""The values of a whole model: how `shard()` gives them to the units, and how they are read and
written between passes. Values travel by the moves of runtime/parts.py.

| question                                                               | file     |
|------------------------------------------------------------------------|----------|
| How does each unit get its first values? What are whole values?        | `start`  |
| What is in a state dict, and how is a whole one read and written?      | `dicts`  |
"""
