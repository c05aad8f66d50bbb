"""Models built on the meta device get their memory unit by unit, are initialized or loaded later, and
train like any other; what was never loaded is named when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
import standin
import virtual
from on_ranks import on_ranks, slow
from reference import built, differences, first, sgd, train
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STAGES = (0, 1, 2, 3)


def recipe(stage: int, **options: Any) -> onefold.Recipe:
    return onefold.Recipe.zero(stage, stall_timeout=20.0, **options)


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_meta_model_loaded_from_a_state_dict_trains_like_any_other(stage: int, tied: bool) -> None:  # fmt: skip
    with torch.device("meta"):
        model: Any = TinyGPT(tied=tied)
    plain = built(lambda: TinyGPT(tied=tied))
    onefold.shard(model, recipe(stage))
    onefold.load_full_state_dict(model, first(plain.state_dict()))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    onefold.shard(plain, recipe(stage))
    batches = [tokens_of(10 * step + dist.get_rank()) for step in range(3)]
    assert train(model, sgd(model), batches) == train(plain, sgd(plain), batches)
    wanted = onefold.full_state_dict(plain)
    assert not differences(wanted, onefold.full_state_dict(model))


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.25)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_meta_model_is_initialized_by_init_or_by_its_modules(stage: int) -> None:
    found = []
    for each in (0, stage):  # the same weights at every stage
        torch.manual_seed(7)
        with torch.device("meta"):
            model = TinyGPT()
        onefold.shard(model, recipe(each))
        found.append(onefold.full_state_dict(model))
        model(tokens_of(dist.get_rank())).backward()
    assert not differences(*found)
    for name, tensor in found[1].items():
        if name.endswith("qkv.weight"):
            assert 0.05 < tensor.std() < 0.3, "torch's Linear has about 0.13"
    half: Any = built(TinyGPT)
    expected = {name: t.clone() for name, t in half.state_dict().items()}
    with torch.device("meta"):
        half.head = nn.Linear(20, 61, bias=False)
    onefold.shard(half, recipe(stage), init=fill)
    expected["head.weight"] = torch.full((61, 20), 0.25)
    assert not differences(first(expected) or {}, onefold.full_state_dict(half))


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_other_ranks_may_bring_an_outline_of_rank_0s_model(stage: int) -> None:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = built(TinyGPT)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    onefold.shard(model, recipe(stage))
    assert not differences(first(expected) or {}, onefold.full_state_dict(model))
    model(tokens_of(dist.get_rank())).backward()


@slow
@on_ranks(4, fresh=True)
def test_a_meta_model_is_never_whole() -> None:
    """67 MB at stage 3 on 4 ranks: its shard, four blocks and 8 MiB at most."""

    from promises.formulas import give_memory_back_at_once, peak_resident, reset_peak

    give_memory_back_at_once()
    with torch.device("meta"):
        model = TinyMLP(16, 512, 16, 16)
    total = 4 * sum(p.numel() for p in model.parameters())
    onefold.shard(TinyMLP(), recipe(3))  # warm
    reset_peak()
    before = peak_resident()
    onefold.shard(model, recipe(3), init=fill)
    grown = peak_resident() - before
    model(features_of(0, 2, 16))
    assert grown <= total // 4 + 4 * (total // 16) + (8 << 20), grown


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@on_ranks(2, fresh=True)
def test_a_model_partly_on_the_meta_device_moves_to_another_device() -> None:
    virtual.start(seed=0)
    standin.register("cpu", "virtual")
    for group in (dist.new_subgroups(1)[0], standin.new_group()):
        for parameters in (True, False):
            with torch.device("meta"):
                model: Any = Model()
            model.register_buffer("table", torch.ones(2))
            if parameters:
                model.head = nn.Linear(8, 2)
            onefold.shard(model, recipe(3), group=group, init=fill, device="virtual")
            held = {t.device.type for t in (*model.parameters(), *model.buffers())}
            assert held == {"virtual"}


# -- loaded later ----------------------------------------------------------------------------------


class Own(nn.Module):
    """Parameters and buffers of its own that nothing initializes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("count", torch.zeros(2, dtype=torch.long))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.to(self.weight.dtype) @ self.weight) * self.scale * self.hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Own(8) for _ in range(3))
        self.gain = nn.Parameter(torch.empty(8))
        self.head = nn.Linear(8, 2)  # knows how to reset its parameters

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head((x * self.gain).to(self.head.weight.dtype))


def real() -> Any:
    model = built(Model)
    for p in model.parameters():
        nn.init.normal_(p)
    model.blocks[1].scale.fill_(2.0)  # type: ignore[index, operator, union-attr]
    return model


X = torch.ones(4, 8)


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises(onefold.UninitializedError) as error:
        call()
    return str(error.value)


def in_part(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    part = {name: t for name, t in state.items() if "blocks.1" not in name}
    onefold.load_full_state_dict(model, first(part), strict=False)
    assert "'blocks.1.weight', 'blocks.1.scale'" in said_by(lambda: model(X))
    onefold.load_full_state_dict(model, first(state))


def in_full_params(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    """As `.data` and in place; parameters on rank 0 alone, whose values are everybody's."""
    with onefold.full_params(model, write=True), torch.no_grad():
        for name, p in model.named_parameters() if dist.get_rank() == 0 else ():
            if name != "gain":
                p.data.copy_(state[name])
        for name, b in model.named_buffers():
            b.copy_(state.get(name, torch.ones(1)))
    said = said_by(lambda: model(X))
    assert "'gain'" in said and "blocks" not in said
    with onefold.full_params(model, write=True), torch.no_grad():
        model.gain.copy_(state["gain"])


def from_checkpoint(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    onefold.save(folder / "saved", model=onefold.shard(real(), recipe(1)))
    onefold.load(folder / "saved", model=model)


def directly(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    """Every rank writes into what it has, as initializing loops do."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(0.5)
            state[name] = torch.full_like(state[name], 0.5)
        for name, b in model.named_buffers():
            b.copy_(state.get(name, torch.ones(1)))


@on_ranks(2)
@pytest.mark.parametrize("way", [in_part, in_full_params, from_checkpoint, directly])  # fmt: skip
@pytest.mark.parametrize("stage", STAGES)
def test_a_meta_model_is_loaded_after_it_was_sharded(stage: int, way: Any, folder: Path) -> None:
    with torch.device("meta"):
        model: Any = Model()
    onefold.shard(model, recipe(stage))
    uses: list[Callable[[], Any]] = [
        lambda: model(X),
        lambda: onefold.full_state_dict(model),
        lambda: onefold.save(folder / "none", model=model),
        lambda: onefold.export(model, str(folder / "out")),
        lambda: onefold.full_params(model).__enter__(),
        lambda: onefold.unshard(model),
    ]
    for use in uses:
        said = said_by(use)
        assert "'gain'" in said and "built on the meta device" in said
    assert "'blocks.1.weight'" in said_by(lambda: model.blocks[1].weight.onefold.gather())
    assert not [*folder.glob("none*")]
    for block in model.blocks:
        block.hidden = torch.ones(1)  # in no state dict: assigned
    state = {name: t.clone() for name, t in real().state_dict().items()}
    way(model, state, folder)
    like = real()
    like.load_state_dict(state)
    torch.testing.assert_close(model(X), like(X))
    assert not differences(first(state) or {}, onefold.full_state_dict(model))
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"frozen": "int8"}, {"offload_optimizer": "cpu", "offload_param": "cpu"}],
    ids=str,
)
def test_what_rests_encoded_or_off_the_device_is_loaded_later_too(options: Any) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    for name, p in model.named_parameters():
        p.requires_grad_("frozen" not in options or "bias" in name)
    onefold.shard(model, recipe(3, **options), init=lambda module: None)
    assert "0." in said_by(lambda: model(X))
    like = built(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    state = {name: t for name, t in like.state_dict().items() if name.startswith("0.")}
    onefold.load_full_state_dict(model, state, strict=False)
    said = said_by(lambda: model(X))
    assert "'2." in said and "'0." not in said
    onefold.load_full_state_dict(model, like.state_dict())
    torch.testing.assert_close(model(X), like(X), atol=0.05, rtol=0.05)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_an_initializer_that_leaves_something_out_is_noticed(stage: int) -> None:
    def forgets(module: nn.Module) -> None:
        for name, p in module.named_parameters(recurse=False):
            if name != "gain":
                p.data.fill_(0.5)  # no version counter tells

    with torch.device("meta"):
        model: Any = Model()
    onefold.shard(model, recipe(stage), init=forgets)
    said = said_by(lambda: model(X))
    assert "'gain'" in said and "weight'" not in said


@on_ranks(1)
def test_one_process_is_told_too_and_trains_once_everything_has_a_value() -> None:
    with torch.device("meta"):
        model: Any = Model()
    onefold.shard(model, recipe(0))
    for use in (lambda: model(X), lambda: model.blocks[1](X), model.state_dict):
        assert "never given a value" in said_by(use)
    state = {name: t.clone() for name, t in real().state_dict().items()}
    model.load_state_dict(state)
    for block in model.blocks:
        block.hidden = torch.ones(1)
    plain = real()
    batches = [torch.full((4, 8), float(step)) for step in range(3)]
    plain.load_state_dict(state)
    for each in (model, plain):
        optimizer = sgd(each)
        for batch in batches:
            each(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not differences(plain.state_dict(), model.state_dict())


@on_ranks(2)
def test_rank_0_alone_may_save_what_every_rank_has_written(folder: Path) -> None:
    with torch.device("meta"):
        model: Any = Model()
    onefold.shard(model, recipe(0))
    for block in model.blocks:
        block.hidden = torch.ones(1)
    directly(model, {name: t.clone() for name, t in real().state_dict().items()}, folder)
    if dist.get_rank() == 0:
        model.state_dict()
    model(X).sum().backward()
