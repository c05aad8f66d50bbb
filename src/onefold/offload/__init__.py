"""Room `offload`: state, gradients and activations on the host or NVMe, and their optimizer step.

| question                                   | files, in the order to read them                                   |
|--------------------------------------------|--------------------------------------------------------------------|
| Where are offloaded shards stored?         | `storage` (host), `nvme_storage`, `nvme` (files, reads and writes) |
| Who steps them, and when?                  | `stepper`, `step`, `in_backward`                                     |
| How do activations go to the host?         | `engine_activations`, `activations`, `saved`                       |
| Which host memory holds the copies?        | `arena`, `heap`                                                    |
| What is refused before the run?            | `preflight`                                                        |
"""
