"""accelerate's Accelerator, which leaves a sharded model as it is, and shards the models that a
Trainer only asks (DPO's reference, a reward model) where the recipe divides parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

import onefold
from onefold.integrations.hf import loading
from onefold.integrations.hf.arguments import divides_parameters
from onefold.recipe import Recipe
from onefold.runtime.registry import is_sharded


class ShardingAccelerator(Accelerator):
    """What a Trainer's accelerator becomes, see `adopt`.

    Attributes:
        onefold_recipe: of the model that is trained.
    """

    onefold_recipe: Recipe

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """As accelerate's; a sharded model is neither moved, cast nor wrapped."""
        divides = divides_parameters(self.onefold_recipe) or loading.is_put_off(model)
        asked = evaluation_mode and divides
        if asked and not is_sharded(model):
            shard_frozen(model, self.onefold_recipe, self.device)
        if not is_sharded(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients that the recipe reduces at the boundary stay local inside."""
        with onefold.no_sync(model) if is_sharded(model) else super().no_sync(model):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Whole on rank 0, empty elsewhere, of a sharded model. Collective."""
        if is_sharded(model):
            return onefold.full_state_dict(model)
        return super().get_state_dict(model, unwrap)


def adopt(accelerator: Any, recipe: Recipe) -> None:
    """Make a Trainer's accelerator one that knows sharded models; it keeps all it was set up
    with.
    """
    accelerator.__class__ = ShardingAccelerator
    accelerator.onefold_recipe = recipe


def shard_frozen(model: nn.Module, recipe: Recipe, device: Any) -> None:
    """Divide a model that is only evaluated. Its weights are held as they came, not quantized.
    Collective.
    """
    model.requires_grad_(False)
    loading.shard(model.eval(), recipe.replace(frozen=None), device)
