"""Layers larger than the device: their weights are gathered and computed with in tiles, a few rows at a
time, with equal results. Training in tiles is rows of the table of promises.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import looks
import onefold
from needed import skip_without
from on_ranks import on_ranks
from onefold.tiling.cut import rows_of_a_tile
from reference import NEAR, built, differences, train
from zoo import Checkpointing, TinyGPT, TinyMLP, features_of, tokens_of

# Bytes: 20 rows of 20 numbers in fp32; the embedding, the head and the linear layers of a TinyGPT's
# blocks take more
TILE = 1600


def sharded(model: nn.Module, tile: int | None = TILE, stage: int = 3, **options: Any) -> Any:
    recipe = onefold.Recipe.zero(stage, tile=tile, stall_timeout=20.0, **options)
    return onefold.shard(model, recipe)


def tiles_of(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, numel) for name, numel in looks.units(model) if "tiles." in name]


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_tiles_are_as_few_as_can_be_and_of_like_size(rows: int, most: int) -> None:
    found = rows_of_a_tile(rows, most)
    assert 1 <= found <= most and -(-rows // found) == -(-rows // most)
    assert rows_of_a_tile(50257, 16000) % 64 == 0, "whole blocks of rows"


# -- the same numbers ------------------------------------------------------------------------------


def passed(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradient of x, gradients of parameters by their names outside."""
    x = x.detach().requires_grad_(x.is_floating_point())
    out = module(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    found = {"out": out.detach()} | ({} if x.grad is None else {"x": x.grad})
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        whole, grad = re.sub(r"tiles\.\d+\.", "", name), p.grad.as_subclass(Tensor)
        found[whole] = torch.cat([found[whole], grad]) if whole in found else grad
    module.zero_grad()
    return found


class Scaled(nn.Embedding):
    """As embeddings of several architectures are: a factor around the lookup."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.weight.shape[1] ** 0.5


class Transposed(nn.Linear):
    """Computes with its weight by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.t() + self.bias


def conv1d() -> nn.Module:
    skip_without("transformers")
    from transformers.pytorch_utils import Conv1D

    return Conv1D(12, 40)


IDS = torch.tensor([[0, 13, 29, 7], [3, 13, 1, 29]])
LAYERS: dict[str, tuple[Callable[[], nn.Module], int, Tensor]] = {
    "linear": (lambda: nn.Linear(7, 60), 448, features_of(1, 2, 3, 7)),
    "linear, without a bias": (lambda: nn.Linear(7, 60, bias=False), 448, features_of(1, 7)),
    "embedding": (lambda: nn.Embedding(30, 5), 160, IDS),
    "embedding, padded": (lambda: nn.Embedding(30, 5, padding_idx=13), 160, IDS),
    "a scaled embedding": (lambda: Scaled(30, 20), 400, IDS),
    "a layer that reads its weight": (lambda: Transposed(30, 20), 400, features_of(3, 4, 30)),
    "GPT-2's linear layer": (conv1d, 768, features_of(1, 2, 3, 40)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_in_tiles_gives_outputs_and_gradients_within_rounding(layer: str) -> None:
    """Its gradient of x is a sum over the tiles, in another order."""
    make, tile, x = LAYERS[layer]
    plain, tiled = built(make), built(make)
    expected = passed(plain, x)
    sharded(tiled, tile, stage=0)
    assert len(tiled.tiles) > 1 and type(tiled).__name__ == type(plain).__name__
    assert differences(expected, passed(tiled, x), **NEAR) == []
    if "embedding" in layer:
        for wrong in (-1, 30):
            with pytest.raises(IndexError) as before:
                plain(torch.tensor([3, wrong]))
            with pytest.raises(IndexError, match=re.escape(str(before.value))):
                tiled(torch.tensor([3, wrong]))


class ReadAsAWhole(TinyGPT):
    """Code that computes with the weight itself, beside its module."""

    def forward(self, tokens: Tensor) -> Tensor:
        both = self.tokens.weight[:3] @ self.head.weight.t()
        return super().forward(tokens) + self.head.weight.square().mean() + both.mean()


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [lambda: TinyGPT(tied=True), ReadAsAWhole], ids=["tied", "read"])
def test_odd_uses_train_as_without_tiles(make: Any, precision: str) -> None:
    """Also a weight that two layers share, and one that is read as a whole."""
    found = []
    for tile in (None, TILE):
        model = sharded(built(make), tile, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = [tokens_of(10 * step + dist.get_rank()) for step in range(3)]
        losses = train(model, optimizer, batches, clip=1.0)
        found.append({"losses": torch.tensor(losses)})
    near = NEAR if precision == "fp32" else {"rtol": 2e-2, "atol": 1e-2}
    assert differences(*found, **near) == []


PLACES: list[dict[str, Any]] = [
    {"offload_optimizer": "cpu"},
    {"offload_optimizer": "cpu", "offload_param": "cpu"},
    {"offload_optimizer": "nvme", "offload_param": "nvme"},
]


@on_ranks(2)
def test_tiles_rest_on_any_tier_with_the_same_bits(folder: Path) -> None:
    found = []
    for place in ({}, *PLACES):
        options = place | ({"nvme": str(folder)} if "nvme" in place.values() else {})
        model = sharded(
            built(lambda: TinyGPT(vocabulary=640, depth=2)), 6400, precision="bf16", **options
        )
        looks.watch(model)
        batches = [tokens_of(10 * step + dist.get_rank(), vocabulary=640) for step in range(3)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found.append(train(model, optimizer, batches, clip=1.0))
        assert found[-1] == found[0], place
        # The one in use and the one ahead; of what lies on a disk one more is being read
        tile = 2 * max(numel for _, numel in tiles_of(model))
        assert 0 < looks.most_gathered(model, ".tiles.") <= (2 + ("nvme" in options)) * tile


# -- memory and wire -------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("checkpointing", "calls"),
    [("none", 1), ("none", 2), ("reentrant", 1), ("non-reentrant", 2)],
)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_no_more_tiles_are_gathered_than_the_one_in_use_and_those_ahead(
    prefetch: int, checkpointing: Checkpointing, calls: int
) -> None:
    """In any step, the first included, and of two forward passes before a backward pass."""
    model = sharded(
        built(lambda: TinyGPT(vocabulary=640, depth=2, checkpointing=checkpointing)),
        prefetch=prefetch,
    )
    tiles = tiles_of(model)
    tile = 4 * max(numel for _, numel in tiles)
    assert tile <= TILE + 4 * 2 * 64, "an interval is a multiple of 64 elements"
    assert len([name for name, _ in tiles if name.startswith("head")]) == 640 * 20 * 4 // TILE
    looks.watch(model)
    for step in range(3):
        loss = sum(model(tokens_of(10 * step + i, vocabulary=640)) for i in range(calls))
        loss.backward()
        model.zero_grad()
    assert 0 < looks.most_gathered(model, "head") <= (1 + prefetch) * tile
    assert 0 < looks.most_gathered(model, ".tiles.") <= 3 * tile
    assert looks.gathered(model) == []


@on_ranks(2)
def test_tiles_are_gathered_for_each_use_and_reduced_once() -> None:
    """A lookup's backward pass reads no weight. A tied tile is gathered for the lookup, for the head,
    and for the head's backward pass.
    """
    for tied, uses in ((False, {"tokens": 1, "head": 2}), (True, {"tokens": 3})):
        model = sharded(built(lambda tied=tied: TinyGPT(tied=tied)))
        for step in range(3):
            looks.watch(model)
            model(tokens_of(step)).backward()
        for name, numel in tiles_of(model):
            half = 4 * numel // 2
            sent = [(move, nbytes) for _, move, unit, nbytes in looks.moves(model) if unit == name]
            times = uses.get(name.split(".")[0], 2)
            assert sum(n for move, n in sent if move == "all-gather") == times * half, name
            assert sum(n for move, n in sent if move == "reduce-scatter") == half, name


# -- what users see --------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_state_dicts_know_no_tiles(stage: int, tied: bool) -> None:
    before = built(lambda: TinyGPT(tied=tied))
    expected = {name: t.clone() for name, t in before.state_dict().items()}
    model = sharded(before, stage=stage)

    def shown() -> dict[str, Tensor]:
        with onefold.full_params(model):
            assert torch.equal(model.head.weight, model.state_dict()["head.weight"])
            return {name: t.clone() for name, t in model.state_dict().items()}

    found = onefold.full_state_dict(model)
    assert dist.get_rank() or differences(expected, found) == []
    assert list(shown()) == list(expected) and differences(expected, shown()) == []
    changed = {name: t + 1 for name, t in expected.items()}
    assert onefold.load_full_state_dict(model, None if dist.get_rank() else changed) == ([], [])
    assert differences(changed, shown()) == []
    with onefold.full_params(model, write=True), torch.no_grad():
        model.load_state_dict(expected)
    with onefold.full_params(model, write=True), torch.no_grad():
        model.head.weight[5:50].zero_()
    expected["head.weight"][5:50] = 0
    if tied:
        expected["tokens.weight"] = expected["head.weight"]
    assert differences(expected, shown()) == []
    expected["head.weight"] = expected["head.weight"][:4]
    with pytest.raises(ValueError, match=r"head.weight: given \(4, 20\), expected \(61, 20\)"):
        onefold.load_full_state_dict(model, expected)


LOOKED_AT: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda w: w.sum(), "full_params"),
    (lambda w: features_of(0, 2, 20) @ w.t(), "Call its module"),
    (lambda w: w.data.zero_(), "write=True"),
    (lambda w: nn.init.zeros_(w), "write=True"),
    (lambda w: w.grad, "tile.weight.grad"),
    (lambda w: setattr(w, "data", torch.zeros(61, 20)), "copy_"),
]


@on_ranks(2)
def test_a_weight_in_tiles_looks_whole_and_says_so_where_it_cannot_be() -> None:
    model: Any = TinyGPT()
    head, hooked = model.head, []
    head.register_forward_hook(lambda module, args, out: hooked.append(tuple(out.shape)))
    model.tokens.weight.rate = 0.5
    sharded(model)
    weight = model.head.weight
    assert model.head is head and isinstance(head, nn.Linear)
    assert (tuple(weight.shape), weight.dtype, weight.numel()) == ((61, 20), torch.float32, 1220)
    assert (head.in_features, model.tokens.num_embeddings) == (20, 61)
    assert [tile.weight.rate for tile in model.tokens.tiles] == [0.5] * len(model.tokens.tiles)
    for act, said in LOOKED_AT:
        with pytest.raises(RuntimeError, match=said):
            act(weight)
    repr(weight), repr(model)
    model(tokens_of(0)).backward()
    assert hooked == [(2, 12, 61)] and all(t.weight.grad is not None for t in head.tiles)
    weight.requires_grad_(False)
    model.zero_grad()
    model(tokens_of(0)).backward()
    assert all(t.weight.grad is None for t in head.tiles)
    assert model.tokens.tiles[0].weight.grad is not None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_function_that_is_given_a_weight_in_tiles_is_told_the_cure(stage: int) -> None:
    class Head(TinyMLP):
        joins = False

        def forward(self, x: Tensor) -> Tensor:
            tiles: Any = self.leave
            joined = [torch.cat([t.weight for t in tiles.tiles])] if self.joins else []
            return Product.apply(x, joined[0] if joined else self.leave.weight)  # type: ignore

    model = sharded(built(lambda: Head(classes=64)), 640, stage)
    x = features_of(1, 4, 10)
    with pytest.raises(
        RuntimeError, match=r"torch.cat\(\[tile.weight for tile in module.tiles\]\)"
    ):
        model(x).square().sum().backward()
    model.joins = True
    model(x).square().sum().backward()
    plain = built(lambda: Head(classes=64))
    weight = plain.leave.weight
    (x @ weight.t()).square().sum().backward()
    norm = float(onefold.clip_grad_norm_(model, float("inf")))
    assert norm == pytest.approx(float(weight.grad.norm()), rel=1e-5)


@on_ranks(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_tiles_on_the_meta_device_start_as_their_modules_would(stage: int, own: bool) -> None:
    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 2.0)

    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Embedding(64, 8, padding_idx=33), nn.Linear(8, 4096))
    recipe = onefold.Recipe.zero(stage, tile=1024)
    onefold.shard(model, recipe, init=init if own else None)
    with onefold.full_params(model):
        table, head = model[0].weight, model[1]
        if own:
            assert all(bool(t.eq(2).all()) for t in (table, head.weight, head.bias))
        else:
            assert not table[33].any() and abs(table.std() - 1) < 0.2
            assert 0.34 < head.weight.abs().max() <= 8**-0.5 and head.bias.abs().max() > 0.3
            assert not (head.weight[:32] == head.weight[32:64]).all(), "two tiles start alike"


def test_a_model_in_tiles_on_one_rank_can_be_copied_and_pickled() -> None:
    model, buffer = sharded(TinyGPT(tied=True)), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert [id(t) for t in other.tokens.tiles] == [id(t) for t in other.head.tiles]
        assert torch.equal(other(tokens_of(0)), model(tokens_of(0)))
        with torch.no_grad():
            other.head.weight.zero_()
        assert not other.tokens.weight.any() and model.tokens.weight.any()


# -- refusals --------------------------------------------------------------------------------------


def hooked() -> nn.Module:
    model = TinyMLP(features=40)
    model.enter.weight.register_hook(lambda grad: grad)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "max_norm": (lambda: nn.Embedding(64, 8, max_norm=1), 1024, "max_norm=.*larger than this"),
    "frequencies": (
        lambda: nn.Embedding(64, 8, scale_grad_by_freq=True), 1024, "scale_grad_by_freq=.*larger",
    ),
    "one row": (
        lambda: nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 8)), 320, r"one row of '1.weight'",
    ),
    "hooks": (hooked, 500, "'enter.weight' has gradient hooks.*tile=500 bytes.*larger tile"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_in_tiles_is_refused_and_the_model_stays_as_it_was(what: str) -> None:
    make, tile, said = REFUSED[what]
    model = make()
    parameters = [id(p) for p in model.parameters()]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=said):
        sharded(model, tile, precision="bf16" if what == "hooks" else "fp32")
    assert [id(p) for p in model.parameters()] == parameters
    assert differences(state, model.state_dict()) == []


def test_what_is_not_computed_in_tiles_is_named_and_left_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 5), nn.Linear(64, 64))
    with caplog.at_level("INFO", "onefold"):
        sharded(model, 1024)
    assert type(model[0]) is nn.Conv2d and len(model[1].tiles) == 16  # type: ignore[arg-type]
    assert any(
        "'0.weight'" in r.getMessage() and "Conv2d" in r.getMessage() for r in caplog.records
    )


@on_ranks(2)
def test_optimizers_from_before_or_of_whole_matrices_are_refused() -> None:
    model = TinyMLP(features=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded(model, 500)
    model(features_of(0, 2, 40)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'enter.weight' is computed in tiles since shard\(\)"):
        optimizer.step()
    model = sharded(TinyMLP(features=40), 500, stage=0)
    whole = torch.optim.Adafactor(model.parameters())
    model(features_of(0, 2, 40)).sum().backward()
    with pytest.raises(ValueError, match=r"Adafactor steps whole matrices.*cut into tiles"):
        whole.step()
