"""axolotl on Onefold: a plugin that axolotl's YAML names.

plugins: [onefold.integrations.axolotl.Plugin]
onefold: {stage: 3}                  # or a stage, or the path of a JSON file: what onefold.hf takes

axolotl's own trainer then trains by that recipe (`onefold.hf.TrainerMixin`). The plugin supports
supervised fine-tuning only. Leave out `fsdp_config` and `deepspeed`.

This module imports axolotl. No other part of Onefold imports it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from onefold.integrations.hf import TrainerMixin
from onefold.integrations.hf.arguments import recipe_of

#: Keys of the YAML that ask for another engine, or for a trainer that the plugin does not support.
_OTHERS = ("deepspeed", "fsdp", "fsdp_config", "rl", "reward_model", "process_reward_model")


class Options(BaseModel):
    """The key that the plugin adds to axolotl's YAML."""

    onefold: int | str | dict[str, Any] | None = None


class Plugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """The plugin, as axolotl loads it."""

    def get_input_args(self) -> str:
        return f"{__name__}.Options"

    def get_trainer_cls(self, cfg: Any) -> type:
        """Return axolotl's trainer class with the recipe of `cfg.onefold`.

        Raises:
            ValueError: there is no recipe, or the YAML asks for another engine as well.
        """
        others = [name for name in _OTHERS if cfg.get(name)]
        if others:
            raise ValueError(
                f"axolotl's configuration has {', '.join(others)} beside the plugin of Onefold,"
                " which shards by itself and serves supervised fine-tuning: leave it out, or leave"
                " the plugin out."
            )
        given = cfg.get("onefold")
        if given is None:
            raise ValueError(
                "axolotl's configuration names the plugin of Onefold and no recipe: add"
                " `onefold: {stage: 3}`."
            )
        plain = dict(given) if hasattr(given, "items") else given
        recipe = recipe_of(plain if isinstance(plain, (dict, int)) else None, _said(plain))
        from axolotl.core.trainers.base import AxolotlTrainer

        class Trainer(TrainerMixin, AxolotlTrainer):  # type: ignore[misc, unused-ignore]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, recipe=recipe, **kwargs)

        return Trainer


def _said(text: Any) -> Any:
    """Return an object with a recipe given as text, in place of training arguments."""
    return SimpleNamespace(onefold=text if isinstance(text, str) else None)
