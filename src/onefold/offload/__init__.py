"""Room `offload`: state, gradients and activations that rest on the host or on NVMe, and the step
of what rests there.

| question                                   | files, in the order to read them                                   |
|--------------------------------------------|--------------------------------------------------------------------|
| Where do shards rest off the device?       | `storage` (host), `nvme_storage`, `nvme` (files, reads and writes) |
| Who steps them, and when?                  | `steps`, `step`, `in_backward`                                     |
| How do activations go to the host?         | `engine_activations`, `activations`, `saved`                       |
| Which host memory do copies lie in?        | `arena`, `heap`                                                    |
| What is refused before the run?            | `preflight`                                                        |
"""
