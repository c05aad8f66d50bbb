"""Lightning on Onefold: a strategy for its Trainer.

trainer = L.Trainer(strategy=onefold.lightning.Strategy(stage=3), devices=8)
trainer.fit(module, data)

Importing this module registers the names "onefold" (stage 3), "onefold_stage_1", "onefold_stage_2" and
"onefold_stage_3": `L.Trainer(strategy="onefold_stage_2")`.
"""

from onefold.lightning.strategy import Strategy, register

register()

__all__ = ["Strategy"]
