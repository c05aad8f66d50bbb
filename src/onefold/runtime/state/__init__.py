"""The values of a whole model: how `shard()` gives them to the units, and how they are read and
written between passes.

    shard()                 rank 0's weights ──── `from_first`, or a whole flat buffer ────► every rank's part
    full_state_dict()       every rank's part ──── `to_first` ────► rank 0's whole, hooks of modules run on it
    load_full_state_dict()  rank 0's whole ──── `from_first` ────► every rank's part
    full_params()           every rank's part ─ `whole_masters` ► every rank; back from rank 0

The moves, and the masters that they read and write, are in runtime/parts.py.

| question                                                               | file     |
|------------------------------------------------------------------------|----------|
| What do the ranks compare first, and what is refused?                  | `checks` |
| How does each unit get its first values? What are whole values?        | `start`  |
| What is in a state dict, and how is a whole one read and written?      | `dicts`  |
"""
