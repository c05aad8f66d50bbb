"""The modules behind `import deepspeed`, when Onefold serves that name in this process.

| file             | holds                                                                         |
|------------------|-------------------------------------------------------------------------------|
| table.py         | where each served name is found, and why each refused name is refused         |
| serving.py       | the finder on `sys.meta_path` that answers `import deepspeed`                 |
| training.py      | `deepspeed.initialize`, and what it adjusts on the model and the engine       |
| init.py          | `zero.Init`                                                                   |
| divided.py       | parameters of which each rank keeps an interval, before an engine takes them  |
| gathered.py      | `zero.GatheredParameters`                                                     |
| parameter_offload.py | `param.ds_status` at stage 3, and the hooks that TRL removes              |
| access.py        | `safe_get_full_grad` and related functions                                    |
| leaves.py        | leaf modules                                                                  |
| optimizers.py    | DeepSpeed's names for its CPU and fused optimizers                            |
| lr_schedules.py  | the learning-rate schedules                                                   |
| communication.py | `init_distributed`, ranks                                                     |
| accelerator.py   | `get_accelerator`, `OnDevice`                                                 |
| recompute.py     | activation checkpointing                                                      |
| rendezvous.py    | the check that all ranks do the same with parameters of no engine             |
| trl_digest.py    | TRL's digest of a model that was made under `zero.Init`                       |
| whole_model.py   | the whole model from a checkpoint folder                                      |
| data.py, logs.py | loaders and nested containers; the logger                                     |

The entry point is `onefold.deepspeed`.
"""
