"""The contents of `onefold.lightning`: Lightning's Trainer on `onefold.shard`.

| file        | holds                                                                  |
|-------------|------------------------------------------------------------------------|
| strategy    | `Strategy`: shards the module, runs its steps, saves and loads         |
| checkpoints | a Lightning checkpoint as a folder of shards, and as one file          |
| precision   | which recipe a Trainer's `precision=` means                            |
| refusals    | errors for arguments that contradict each other                        |

This package imports Lightning. No other part of Onefold imports it.
"""

from onefold.integrations.lightning.strategy import Strategy, register

register()

__all__ = ["Strategy"]
