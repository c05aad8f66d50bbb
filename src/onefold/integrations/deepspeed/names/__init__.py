"""The modules behind `import deepspeed`, when Onefold serves that name in this process.

| file             | holds                                                                         |
|------------------|-------------------------------------------------------------------------------|
| table.py         | where each served name is found, and why each refused name is refused         |
| serving.py       | the finder on `sys.meta_path` that answers `import deepspeed`                 |
| training.py      | `deepspeed.initialize`, and what it adjusts on the model and the engine       |
| init.py          | `zero.Init`                                                                   |
| divided.py       | parameters of which each rank keeps an interval, before an engine takes them  |
| gathered.py      | `zero.GatheredParameters`                                                     |
| parameter_facts.py | `param.ds_status`, `ds_shape`, `ds_tensor` and others                       |
| parameter_offload.py | the hooks of stage 3 that TRL removes                                     |
| optimizer_kinds.py | DeepSpeed's classes of optimizers, and their flat groups                    |
| zero_config.py   | the section "zero_optimization" as an object                                  |
| configuration.py | `DeepSpeedConfig`                                                             |
| operators.py     | whether what a compiled operator is for can be used                           |
| errors.py        | exceptions that scripts catch                                                 |
| files.py, groups.py | names of files that DeepSpeed writes; parameter groups of experts          |
| access.py        | `safe_get_full_grad` and related functions                                    |
| leaves.py        | leaf modules                                                                  |
| optimizers.py    | DeepSpeed's names for its CPU and fused optimizers                            |
| lr_schedules.py  | the learning-rate schedules                                                   |
| communication.py | `init_distributed`, ranks                                                     |
| accelerator.py   | `get_accelerator`, `OnDevice`                                                 |
| recompute.py     | activation checkpointing                                                      |
| rendezvous.py    | the check that all ranks do the same with parameters of no engine             |
| whole_model.py   | the whole model from a checkpoint folder                                      |
| data.py, logs.py | loaders and nested containers; the logger                                     |

The entry point is `onefold.deepspeed`.
"""
