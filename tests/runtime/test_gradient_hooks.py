"""Gradient hooks on a sharded parameter would never fire: nothing is silently ignored."""

import pytest

from models import TinyMLP
from ranks import run_ranks


def hooks_after_sharding(stage: int) -> list[str]:
    import onefold

    said = []
    parameter = next(onefold.shard(TinyMLP(), onefold.Recipe.zero(stage)).parameters())
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        try:
            getattr(parameter, name)(lambda grad: None)
        except onefold.ShardedParameterError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_hook_that_would_never_fire_is_refused(stage: int) -> None:
    for said in run_ranks(2, hooks_after_sharding, stage):
        assert len(said) == 2 and all("enter.weight" in text and "never fire" in text for text in said), said


def hooks_before_sharding() -> str:
    import onefold

    model = TinyMLP()
    model.enter.weight.register_hook(lambda grad: grad)
    try:
        onefold.shard(model, onefold.Recipe.zero(1))
    except ValueError as error:
        return str(error)
    return ""


def test_a_gradient_hook_from_before_is_not_lost_silently() -> None:
    for said in run_ranks(2, hooks_before_sharding):
        assert "enter.weight" in said and "remove" in said, said
