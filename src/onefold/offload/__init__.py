"""Room `offload`: state, gradients and activations on the host or a disk, and their optimizer step.

| question                                   | files, in the order to read them                                   |
|--------------------------------------------|--------------------------------------------------------------------|
| Where are offloaded shards stored?         | `storage`, and `nvme` (files)                                      |
| Who steps them, and when?                  | `step`                                                             |
| How do activations go to the host?         | `activations`                       |
| What is refused before the run?            | `storage`                                                     |
"""
