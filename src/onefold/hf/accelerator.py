"""accelerate's Accelerator for sharded models.

It leaves a sharded model as it is. If the recipe shards parameters, it also shards the models that
a Trainer only evaluates, such as DPO's reference model or a reward model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn

import onefold
from onefold.hf import loading
from onefold.recipe import Recipe
from onefold.runtime.hooks import is_sharded


class ShardingAccelerator(Accelerator):
    """The class that a Trainer's accelerator gets. It keeps its attributes.

    Attributes:
        onefold_recipe: the recipe of the model that is trained.
        onefold_model: a weak reference to it, once it is sharded.
    """

    onefold_recipe: Recipe
    onefold_model: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    _onefold_once = False

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare a model as accelerate does, but do not move, cast or wrap a sharded one."""
        divides = self.onefold_recipe.parameters.sharded or loading.is_put_off(model)
        if evaluation_mode and divides and not is_sharded(model):
            model.requires_grad_(False)  # and its weights are not quantized
            loading.shard(model.eval(), self.onefold_recipe.replace(frozen=None), self.device)
        if not is_sharded(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer as accelerate does, but leave its states where they are stored."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, gradients stay local if the recipe reduces them at the boundary."""
        with onefold.no_sync(model) if is_sharded(model) else super().no_sync(model):
            yield

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as accelerate does, but rows of ranks that compute with the same data once.

        accelerate would count each of them, and cut a last batch at the wrong place.

        Raises:
            NotImplementedError: there are such ranks, and objects in place of tensors.
        """
        self._onefold_once = True
        try:
            gathered = super().gather_for_metrics(input_data, use_gather_object)
            if self._onefold_once and _first_of_each_data_rank(self):  # `gather` was not called
                raise NotImplementedError(
                    "gather_for_metrics was given objects, and several ranks compute with the same"
                    " data: give tensors, and leave use_gather_object (eval_use_gather_object) out."
                )
            return gathered
        finally:
            self._onefold_once = False

    def gather(self, tensor: Any) -> Any:
        """Gather a tensor, or tensors, from all ranks. Collective."""
        gathered = super().gather(tensor)
        firsts = _first_of_each_data_rank(self) if self._onefold_once else []
        self._onefold_once = False
        if not firsts:
            return gathered

        def once(t: Tensor) -> Tensor:
            return t.view(self.num_processes, -1, *t.shape[1:])[firsts].flatten(0, 1)

        return recursively_apply(once, gathered)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the state dict. Collective.

        A sharded model's is whole on rank 0 and empty elsewhere.
        """
        if is_sharded(model):
            return onefold.full_state_dict(model)
        return super().get_state_dict(model, unwrap)


def _first_of_each_data_rank(accelerator: ShardingAccelerator) -> list[int]:
    """Return the first of the ranks that compute with each part of the data; [] if each has a part
    of its own.
    """
    model = accelerator.onefold_model()
    mesh = onefold.engine_of(model).mesh if model is not None else None
    if mesh is None or not mesh.several or len(mesh.ranks) != accelerator.num_processes:
        return []
    data_of = mesh.data_of
    data = [data_of[rank] for rank in range(accelerator.num_processes)]
    return [data.index(at) for at in sorted(set(data))]
