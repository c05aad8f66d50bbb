"""axolotl on Onefold: a plugin, named in axolotl's YAML.

plugins: [onefold.integrations.axolotl.Plugin]
onefold: {stage: 3}                  # or a stage, or the path of a JSON file: what onefold.hf takes

axolotl's own trainer then trains by that recipe (`onefold.hf.TrainerMixin`). It serves supervised
fine-tuning; leave out `fsdp_config` and `deepspeed`. Imports axolotl; nothing else imports this.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from onefold.integrations.hf import TrainerMixin
from onefold.integrations.hf.arguments import recipe_of

#: Keys of the YAML that ask for another engine, or for a trainer that this one is not.
_OTHERS = ("deepspeed", "fsdp", "fsdp_config", "rl", "reward_model", "process_reward_model")


class Options(BaseModel):
    """The key that the plugin adds to axolotl's YAML."""

    onefold: int | str | dict[str, Any] | None = None


class Plugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """See this module."""

    def get_input_args(self) -> str:
        return f"{__name__}.Options"

    def get_trainer_cls(self, cfg: Any) -> type:
        """axolotl's trainer by the recipe of `cfg.onefold`.

        Raises:
            ValueError: there is no recipe, or the YAML asks for another engine besides.
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
    """A recipe as text, as training arguments would have it."""
    return SimpleNamespace(onefold=text if isinstance(text, str) else None)
