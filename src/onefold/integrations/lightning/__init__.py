"""Lightning's Trainer over `onefold.shard`: what `onefold.lightning` offers.

| file        | holds                                                                  |
|-------------|------------------------------------------------------------------------|
| strategy    | `Strategy`: shards the module, hands its steps and checkpoints on      |
| checkpoints | a Lightning checkpoint as a folder of shards, and as one file          |
| precision   | which recipe a Trainer's `precision=` means                            |
| refusals    | what cannot go together, in a sentence                                 |
| ema         | `EMA`: an average of weights as a callback                             |

Imports Lightning; nothing else of Onefold imports this.
"""

from onefold.integrations.lightning.ema import EMA
from onefold.integrations.lightning.strategy import Strategy, register

register()

__all__ = ["EMA", "Strategy"]
