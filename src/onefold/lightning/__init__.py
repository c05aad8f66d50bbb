"""Lightning on Onefold: a strategy for its Trainer.

trainer = L.Trainer(strategy=onefold.lightning.Strategy(stage=3), devices=8)
trainer.fit(module, data)

Importing this module registers the names "onefold" (stage 3), "onefold_stage_1", "onefold_stage_2" and
"onefold_stage_3": `L.Trainer(strategy="onefold_stage_2")`.
"""

try:
    from onefold.lightning.strategy import Strategy, register
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lightning":
        raise
    raise ModuleNotFoundError(
        "onefold.lightning needs the package lightning, which is not installed: pip install"
        " 'lightning>=2.6'. It extends `lightning.pytorch`; the package pytorch_lightning has other"
        " classes of the same names, which do not take it.",
        name=error.name,
    ) from error

register()

__all__ = ["Strategy"]
