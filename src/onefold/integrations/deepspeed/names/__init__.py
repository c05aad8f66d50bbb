"""The name `deepspeed`, served in this process for scripts and libraries that import it.

| file             | holds                                                                         |
|------------------|-------------------------------------------------------------------------------|
| table.py         | which name is served by what, and which names are known and refused, with why |
| serving.py       | the finder on `sys.meta_path` that answers `import deepspeed`                 |
| training.py      | `initialize`, and what stands beside an engine                                |
| init.py          | `zero.Init`                                                                   |
| divided.py       | parameters of which each rank keeps an interval, until an engine has them     |
| gathered.py      | `zero.GatheredParameters`                                                     |
| parameter_offload.py | what is said of parameters at stage 3, and hooks that TRL takes off       |
| access.py        | `safe_get_full_grad` and its kin                                              |
| leaves.py        | leaf modules                                                                  |
| optimizers.py    | the names of the optimizers on the host                                       |
| lr_schedules.py  | the schedules                                                                 |
| communication.py | `init_distributed`, ranks                                                     |
| accelerator.py   | `get_accelerator`, `OnDevice`                                                 |
| recompute.py     | activation checkpointing                                                      |
| whole_model.py   | the whole model from a checkpoint folder                                      |
| data.py, logs.py | loaders and nested containers; the logger                                     |

`onefold.deepspeed` is the way in.
"""
