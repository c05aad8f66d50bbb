"""Room `offload`: state, gradients and activations on the host or a disk, and their optimizer step.

| question                                   | files, in the order to read them                                   |
|--------------------------------------------|--------------------------------------------------------------------|
| Where are offloaded shards stored?         | `tiers`, `storage` (host), `nvme_storage` and `nvme` (files)       |
| Who steps them, and when?                  | `stepper`, `step`, `in_backward`                                     |
| How do activations go to the host?         | `engine_activations`, `activations`, `saved`                       |
| Which host memory holds the copies?        | `arena`, `heap`                                                    |
| What is refused before the run?            | `nvme_storage`                                                     |
"""
