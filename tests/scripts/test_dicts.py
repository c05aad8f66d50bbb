"""Whole state dicts, whole parameters, and modules that save under other names."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import onefold
from on_ranks import on_ranks
from reference import built, differences, first
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STAGES = (0, 1, 2, 3)


def gpt(stage: int, tied: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """A sharded model, and the state dict that it had before."""
    model = built(lambda: TinyGPT(tied=tied))
    model.register_buffer("scale", torch.tensor([1.5, 2.5]))
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0)), before


@on_ranks(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_full_state_dict_is_the_models_on_rank_0(stage: int, tied: bool) -> None:
    model, before = gpt(stage, tied)
    for _ in range(2):
        state = onefold.full_state_dict(model)
        assert list(state) == (list(before) if dist.get_rank() == 0 else [])
        assert not first(differences(before, state))
        assert not any(t.requires_grad or isinstance(t, nn.Parameter) for t in state.values())
        for tensor in state.values():
            tensor.add_(1)  # the host's copy is nobody else's


@on_ranks(2)
@pytest.mark.parametrize(("stage", "other"), [(0, 3), (1, 2), (3, 1)])
def test_a_full_state_dict_loads_at_any_stage(stage: int, other: int) -> None:
    model, _ = gpt(stage)
    model(tokens_of(dist.get_rank())).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    trained = onefold.full_state_dict(model)
    again, _ = gpt(other)
    onefold.load_full_state_dict(again, first(trained))
    assert not differences(trained, onefold.full_state_dict(again))
    assert model(tokens_of(5)).item() == again(tokens_of(5)).item()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_inside_full_params_a_model_is_whole_and_outside_as_before(stage: int) -> None:
    model, before = gpt(stage)
    tokens = tokens_of(1)
    expected = model(tokens).item()
    with onefold.full_params(model) as whole, torch.no_grad():
        assert whole is model
        assert not differences(before, model.state_dict())
        assert model.logits(tokens).shape == (2, 12, 61)
        assert model(tokens).item() == expected
        pickle.loads(pickle.dumps(model.blocks[1].state_dict()))
        copy.deepcopy(model.head.state_dict())
    if stage:  # without write=True nothing of this lasts; at stage 0 nothing is another's
        with onefold.full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    assert model(tokens).item() == expected
    with pytest.raises(KeyError), onefold.full_params(model):
        raise KeyError("an error of the user's own")
    assert not first(differences(before, onefold.full_state_dict(model)))
    model(tokens).backward()


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_changes_inside_full_params_with_write_last(stage: int) -> None:
    model, before = gpt(stage, tied=True)
    with onefold.full_params(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if dist.get_rank() == 0 else 5.0)  # rank 0's are everybody's
        model.norm.weight.data = model.norm.weight.data * 2
        model.norm.bias = nn.Parameter(model.norm.bias.detach() + 1)
        model.blocks[1].load_state_dict({k: v + 1 for k, v in model.blocks[1].state_dict().items()})
    expected = {n: t if n == "scale" else t * 2 for n, t in before.items()}
    expected["norm.weight"] = expected["norm.weight"] * 2
    expected["norm.bias"] = expected["norm.bias"] + 1
    expected |= {n: t + 1 for n, t in expected.items() if n.startswith("blocks.1.")}
    assert not first(differences(expected, onefold.full_state_dict(model)))
    if stage:
        with (
            pytest.raises(ValueError, match=r"'norm.weight'.*unshard"),
            onefold.full_params(model, write=True),
        ):
            model.norm.weight.data = torch.zeros(3)
        with pytest.raises(KeyboardInterrupt), onefold.full_params(model, write=True):
            model.norm.weight.data = torch.zeros(3)
            raise KeyboardInterrupt


@on_ranks(3)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_keeps_its_face_its_marks_and_rank_0s_values(stage: int) -> None:
    class Marked(nn.Parameter):
        pass

    torch.manual_seed(dist.get_rank())
    model: Any = TinyMLP()
    model.register_buffer("noise", torch.randn(3))
    model.enter.bias = Marked(model.enter.bias.detach())
    model.enter.weight.mup_scale = 2.0

    def face(p: Tensor) -> Any:
        return p.shape, p.ndim, p.size(), p.numel(), p.nelement(), p.stride(), p.dtype, p.is_leaf

    before = dict(model.named_parameters())
    faces = {name: face(p) for name, p in before.items()}
    values: list[Any] = [{n: t.clone() for n, t in model.state_dict().items()}]
    dist.broadcast_object_list(values)
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0))
    held = {}
    for name, p in model.named_parameters():
        assert p is before[name] and face(p) == faces[name] == face(p.data)
        start, stop = p.onefold.interval
        assert (p.onefold.name, tuple(p.onefold.shape)) == (name, tuple(p.shape))
        assert torch.equal(p.onefold.gather(), values[0][name])
        assert stage == 0 or name in repr(p)
        held[name] = stop - start
    assert isinstance(model.enter.bias, Marked) and model.enter.weight.mup_scale == 2.0
    everybodys: list[Any] = [None] * 3
    dist.all_gather_object(everybodys, held)
    for name, p in model.named_parameters():
        assert sum(h[name] for h in everybodys) == p.numel() * (1 if stage else 3)
    seen: list[Any] = []
    model.enter.register_forward_pre_hook(lambda module, _: seen.append(module.weight.mup_scale))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(features_of(0, 4, 7)).square().mean().backward()
    optimizer.step(lambda: seen.append(model.enter.weight.shape))
    assert seen == [2.0, faces["enter.weight"][0]]
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    with onefold.full_params(model):
        assert torch.equal(model.noise, values[0]["noise"])


# -- modules that save under other names -----------------------------------------------------------

WIDTH = 6


class FusedProjection(nn.Module):
    """One weight for queries, keys and values; its state dict has three, transposed, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(3, WIDTH))
        self.register_state_dict_post_hook(apart)
        self.register_load_state_dict_pre_hook(together)

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.qkv.view(3, WIDTH, WIDTH)[0].t() + (x @ self.qkv.t()).sum() * 1e-3
        return (out + self.bias.sum(0)).to(x.dtype)


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
        self.enter, self.attention = nn.Linear(7, WIDTH), FusedProjection()
        self.leave = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.attention(torch.tanh(self.enter(x)))))


@on_ranks(2)
@pytest.mark.parametrize(("stage", "options"), [(0, {}), (3, {}), (2, {"precision": "bf16"})])
def test_state_dicts_and_checkpoints_of_modules_with_hooks_are_those_without_shard(
    stage: int, options: Any, folder: Path
) -> None:
    def sharded(seed: int) -> Any:
        recipe = onefold.Recipe.zero(stage, **options)
        return onefold.shard(built(Fused, seed), recipe, units=("attention",))

    def same(model: Any, wanted: Any) -> bool:
        return not first(differences(wanted, onefold.full_state_dict(model)))

    expected = {name: value.clone() for name, value in built(Fused).state_dict().items()}
    model = sharded(0)
    assert same(model, expected)
    other = sharded(1)
    assert onefold.load_full_state_dict(other, first(copy.copy(expected))) == ([], [])
    assert same(other, expected)
    # A part of it: what is not there stays
    third, mine = sharded(2), built(Fused, 2).state_dict()
    given = {name: value for name, value in expected.items() if "leave" not in name}
    left = onefold.load_full_state_dict(third, first(given), strict=False)
    assert left == (["leave.bias", "leave.weight"], [])
    assert same(third, {n: mine[n] if "leave" in n else v for n, v in expected.items()})
    with pytest.raises(ValueError, match="2 names are missing"):
        onefold.load_full_state_dict(third, first(given))
    # Averages have the model's names too
    average, elsewhere = onefold.ema.EMA(model), onefold.ema.EMA(third)
    elsewhere.load_state_dict(average.state_dict())
    assert not first(differences(average.state_dict(), elsewhere.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(features_of(0, 4, 7)).square().mean().backward()
    optimizer.step()
    onefold.save(folder / "at", model=model, optimizer=optimizer)
    fourth = sharded(3)
    onefold.load(folder / "at", model=fourth)
    assert same(fourth, onefold.full_state_dict(model)) and not first(same(fourth, expected))


class Doubled(nn.Linear):
    """Stores half of its weight."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = 2 * state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, *rest)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_models_own_code_of_loading_runs(stage: int) -> None:
    weight, bias = torch.arange(16.0).view(4, 4), torch.ones(4)
    model = onefold.shard(Doubled(4, 4), onefold.Recipe.zero(stage))
    given = first({"weight": weight.clone(), "bias": bias})
    assert onefold.load_full_state_dict(model, given) == ([], [])
    expected = {"weight": weight * 2, "bias": bias}
    assert not first(differences(expected, onefold.full_state_dict(model)))


class Counting(nn.Linear):
    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_extra_states_of_modules_are_rank_0s_on_every_rank(stage: int) -> None:
    model, other = (onefold.shard(Counting(4, 4), onefold.Recipe.zero(stage)) for _ in range(2))
    model.seen = 3 - dist.get_rank()  # type: ignore[assignment]
    state = onefold.full_state_dict(model)
    assert not first(state) or state["_extra_state"] == {"seen": 3}
    with pytest.raises(ValueError, match="1 are unknown"):
        onefold.load_full_state_dict(other, first({**state, "odd": torch.ones(1)}))
    assert other.seen == 0
    assert onefold.load_full_state_dict(other, first(state)) == ([], [])
    assert other.seen == 3


class Renewed(nn.Linear):
    """Stores half of its weight; older versions, a quarter. It counts the extra states that it is given."""

    _version, given = 2, 0

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        factor = 4 if metadata.get("version", 1) < 2 else 2
        state[prefix + "weight"] = factor * state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "weight"] = state[prefix + "weight"] / 2

    def get_extra_state(self) -> Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: Any) -> None:
        self.given += 1


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_whole_state_dict_loads_as_of_the_version_that_saved_it(stage: int) -> None:
    model, other = (
        onefold.shard(built(lambda: Renewed(4, 4), seed), onefold.Recipe.zero(stage))
        for seed in (0, 1)
    )
    state = onefold.full_state_dict(model)
    onefold.load_full_state_dict(other, first(state))
    assert not first(differences(state, onefold.full_state_dict(other)))
    if dist.get_rank() == 0:  # and loading has not told the next module to assign
        again = built(lambda: Renewed(4, 4), 1)
        weight = again.weight
        again.load_state_dict(state)
        assert again.weight is weight
    average = onefold.ema.EMA(model).state_dict()
    if dist.get_rank() == 0:
        plain = AveragedModel(built(lambda: Renewed(4, 4), 1))
        plain.load_state_dict(average)
        assert not differences(average, plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("hooks", [False, True])
def test_an_average_is_loaded_as_it_was_saved_and_changes_nothing_else(
    stage: int, hooks: bool
) -> None:
    def make() -> nn.Module:
        layer = Renewed(7, WIDTH)
        return nn.Sequential(layer, FusedProjection()) if hooks else nn.Sequential(layer)

    first_model, second = (
        onefold.shard(built(make, seed), onefold.Recipe.zero(stage)) for seed in (0, 1)
    )
    average, other = onefold.ema.EMA(first_model), onefold.ema.EMA(second)
    state = average.state_dict()
    before = onefold.full_state_dict(second)
    for given in (state, first(AveragedModel(built(make)).state_dict())):
        other.load_state_dict(given)
        assert not first(differences(state, other.state_dict()))
    assert not first(differences(before, onefold.full_state_dict(second)))
    assert second[0].given == 0  # type: ignore[index]


# -- weights that rest encoded ---------------------------------------------------------------------


def adapted(seed: int = 0, group: Any = None, **options: Any) -> Any:
    """Matrices of blocks are frozen; vectors train."""
    model = built(TinyGPT, seed)
    for p in model.parameters():
        p.requires_grad_(p.dim() < 2)
    return onefold.shard(model, onefold.Recipe.zero(3, **options), group=group)


@on_ranks(2)
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_encoded_weights_compute_what_they_decode_to_and_survive_files(name: str, folder: Path) -> None:  # fmt: skip
    model, original = adapted(frozen=name), adapted()
    decoded = onefold.full_state_dict(model)
    plain = adapted()
    onefold.load_full_state_dict(plain, first(decoded))
    changed = first(differences(onefold.full_state_dict(original), decoded))
    assert changed is None or (changed and not any("tokens" in line for line in changed)), changed
    curves = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01)
        curves.append([])
        for step in range(3):
            loss = each(tokens_of(10 * step + dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curves[-1].append(loss.item())
    assert curves[0] == curves[1]
    expected = onefold.full_state_dict(model)
    onefold.save(folder / "saved", model=model)
    onefold.export(model, str(folder / "exported"))
    alone, _ = dist.new_subgroups(1)  # whose one rank encodes what two have encoded apart
    for other in (adapted(1, frozen=name), adapted(1), adapted(1, alone, frozen=name)):
        onefold.load(folder / "saved", model=other)
        assert not first(differences(expected, onefold.full_state_dict(other)))
    onefold.load_pretrained(again := adapted(1, frozen=name), str(folder / "exported"))
    assert not first(differences(expected, onefold.full_state_dict(again)))
