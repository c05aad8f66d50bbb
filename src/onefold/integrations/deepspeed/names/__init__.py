"""The name `deepspeed`, served in this process for scripts and libraries that import it.

| file          | holds                                                                           |
|---------------|---------------------------------------------------------------------------------|
| table.py      | which name is served by what, and which names are known and refused, with why   |
| serving.py    | the finder on `sys.meta_path` that answers `import deepspeed`                   |
| training.py   | `initialize`, and what stands beside an engine                                  |
| zero.py       | `zero.Init`, `zero.GatheredParameters`                                          |
| access.py     | `safe_get_full_grad` and its kin                                                |
| optimizers.py | the names of the optimizers on the host                                         |
| small.py      | communication, accelerator, logger, activation checkpointing                    |

`onefold.deepspeed` is the way in.
"""
