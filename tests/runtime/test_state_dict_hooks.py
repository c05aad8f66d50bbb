"""Modules that save their parameters in other shapes, or under other names: state dicts, and
checkpoints, are those of the model as it was before `shard()`.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from ranks import run_ranks
from zoo import features_of

WIDTH = 6


class FusedProjection(nn.Module):
    """One weight for queries, keys and values; its state dict has three, transposed, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(3, WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_state_dict_post_hook(apart)
        self.register_load_state_dict_pre_hook(together)

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.qkv.view(3, WIDTH, WIDTH)[0].t() + (x @ self.qkv.t()).sum() * 1e-3
        return ((out + self.bias.sum(0)) * self.scale).to(x.dtype)


def apart(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    parts = state.pop(prefix + "qkv").view(3, WIDTH, WIDTH)
    for name, part in zip("qkv", parts, strict=True):
        state[f"{prefix}{name}_proj.weight"] = part.t()
    state[prefix + "bias"] = state[prefix + "bias"].reshape(-1)  # another shape, the same name
    state[prefix + "formats"] = torch.tensor([3])


def together(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    names = [f"{prefix}{name}_proj.weight" for name in "qkv"]
    if names[0] in state:
        state[prefix + "qkv"] = torch.cat([state.pop(name).t() for name in names])
        state[prefix + "bias"] = state[prefix + "bias"].view(3, WIDTH)
        del state[prefix + "formats"]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, WIDTH)
        self.attention = FusedProjection()
        self.leave = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.attention(torch.tanh(self.enter(x)))))


def model_of(seed: int) -> Fused:
    torch.manual_seed(seed)
    return Fused()


def sharded(seed: int, stage: int, options: dict[str, Any]) -> Fused:
    recipe = onefold.Recipe.zero(stage, **options)
    return onefold.shard(model_of(seed), recipe, units=("attention",))


def differ(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    names = list(dict.fromkeys([*expected, *found]))
    return [
        name
        for name in names
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    ]


def as_without_shard(stage: int, options: dict[str, Any], folder: str) -> dict[str, Any]:
    first = torch.distributed.get_rank() == 0
    out: dict[str, Any] = {}
    expected = {name: value.clone() for name, value in model_of(0).state_dict().items()}
    model = sharded(0, stage, options)
    state = onefold.full_state_dict(model)
    out["full_state_dict"] = differ(state, expected) if first else list(state)
    out["order"] = list(state) == list(expected) if first else True

    other = sharded(1, stage, options)
    out["load"] = onefold.load_full_state_dict(other, copy.copy(expected) if first else None)
    out["loaded"] = differ(onefold.full_state_dict(other), expected if first else {})

    # A part of it: what is not there stays
    third, mine = sharded(2, stage, options), model_of(2).state_dict()
    given = {name: value for name, value in expected.items() if "leave" not in name}
    out["part"] = onefold.load_full_state_dict(third, given if first else None, strict=False)
    left = {name: mine[name] if "leave" in name else value for name, value in expected.items()}
    out["part loaded"] = differ(onefold.full_state_dict(third), left if first else {})
    try:
        onefold.load_full_state_dict(third, given if first else None)
    except ValueError as error:
        out["strict"] = str(error)

    # Training goes on, and a checkpoint has the model's own names
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(features_of(0, 4, 7)).square().mean().backward()
    optimizer.step()
    onefold.save(os.path.join(folder, "at"), model=model, optimizer=optimizer)
    trained = onefold.full_state_dict(model)
    fourth = sharded(3, stage, options)
    onefold.load(os.path.join(folder, "at"), model=fourth)
    out["load of a checkpoint"] = differ(onefold.full_state_dict(fourth), trained)
    out["trained"] = differ(trained, expected) if first else []
    return out


@pytest.mark.parametrize(
    ("stage", "options"), [(0, {}), (3, {}), (2, {"precision": "bf16"}), (3, {"tile": 56})]
)
def test_state_dicts_of_modules_with_hooks_are_those_without_shard(
    stage: int, options: dict[str, Any], tmp_path: Any
) -> None:
    for rank, out in enumerate(run_ranks(2, as_without_shard, stage, options, str(tmp_path))):
        assert out["full_state_dict"] == [] and out["order"]
        assert out["load"] == ([], [])
        assert out["loaded"] == []
        assert out["part"] == (["leave.bias", "leave.weight"], [])
        assert out["part loaded"] == []
        assert "2 names are missing" in out["strict"], out["strict"]
        assert out["load of a checkpoint"] == []
        assert rank or "attention.q_proj.weight" in out["trained"], out["trained"]


class NeedsValues(nn.Module):
    """Its hook looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update(
                {prefix + "largest": state[prefix + "inner.weight"].abs().max().reshape(1).tolist()}
            )
        )
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update(
                {prefix + "rows": state.pop(prefix + "inner.weight").view(4, 4).unbind()[0]}
            )
        )


def asks_for_values(folder: str) -> tuple[str, list[str]]:
    model = onefold.shard(NeedsValues(), onefold.Recipe.zero(3))
    names = sorted(onefold.full_state_dict(model))
    try:
        onefold.save(os.path.join(folder, "at"), model=model)
    except Exception as error:
        return str(error), names
    return "", names


def test_a_hook_that_asks_for_values_is_named_where_there_are_none(tmp_path: Any) -> None:
    (said, names), _ = run_ranks(2, asks_for_values, str(tmp_path))
    assert "a state dict hook of the model failed on parameters without values" in said, said
    assert names == ["inner.bias", "rows"]


class Renamed(nn.Module):
    """Reads the names that its parameters had in earlier versions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: [
                state.update({prefix + name.replace("old.", "inner."): state.pop(prefix + name)})
                for name in [key[len(prefix) :] for key in state if key.startswith(prefix + "old.")]
            ]
        )


class Doubled(nn.Linear):
    """Stores half of its weight."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = 2 * state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, *rest)


class Slotted:
    """A hook that has no attributes of its own, as one made in C."""

    __slots__ = ()

    def __call__(self, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "kernel")


class OldName(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self._register_load_state_dict_pre_hook(Slotted())


class Raising(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_load_state_dict_pre_hook(self.refuse)

    def refuse(self, *_: Any) -> None:
        raise KeyError("of another version")


def loaded_by_hooks(stage: int) -> list[Any]:
    rank = torch.distributed.get_rank()
    weight, bias = torch.arange(16.0).view(4, 4), torch.ones(4)
    seen = []
    for module, names in (
        (Renamed(), ("old.weight", "old.bias")),
        (Doubled(4, 4), ("weight", "bias")),
        (Raising(), ("weight", "bias")),
        (OldName(), ("kernel", "bias")),
    ):
        model = onefold.shard(module, onefold.Recipe.zero(stage))
        given = dict(zip(names, (weight, bias), strict=True)) if rank == 0 else None
        try:
            seen.append(onefold.load_full_state_dict(model, given))
        except ValueError as error:
            seen.append(str(error))
        whole = onefold.full_state_dict(model)
        seen.append([t.flatten().tolist() for t in whole.values()] if rank == 0 else None)
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_a_models_own_code_of_loading_runs(stage: int) -> None:
    numbers, ones = [float(n) for n in range(16)], [1.0] * 4
    first, second = run_ranks(2, loaded_by_hooks, stage)
    assert first[:2] == [([], []), [numbers, ones]]
    assert first[2:4] == [([], []), [[2 * n for n in numbers], ones]]
    assert "the model's own load_state_dict failed" in first[4] and "another version" in first[4]
    assert first[6:] == [([], []), [numbers, ones]]
    assert first[::2] == second[::2]
