"""Layers larger than the device: their weights are gathered and computed with in tiles, one at a
time, with equal results.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ranks import run_ranks
from trials import STAGES, GPTCase, MLPCase, assert_trains_as_ddp, differences, fresh, train_sharded
from zoo import Attention, TinyGPT, TinyMLP, features_of, tokens_of

# Bytes: 20 rows of 20 numbers in fp32; the embedding, the head and the linear layers of a TinyGPT's
# blocks take more
TILE = 1600


def recipe_of(tile: int | None, stage: int = 3, **options: Any) -> Any:
    import onefold

    return onefold.Recipe.zero(stage, tile=tile, stall_timeout=10.0, **options)


def cut(module: nn.Module, tile: int) -> list[str]:
    """`module` in tiles, by itself, without any engine; the notes."""
    from onefold.tiling.cut import Cut

    with Cut(module, recipe_of(tile)) as made:
        return made.notes


# -- how a weight is cut ---------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_tiles_are_as_few_as_can_be(rows: int, most: int) -> None:
    from onefold.tiling.cut import rows_of_a_tile

    found = rows_of_a_tile(rows, most)
    assert 1 <= found <= most
    assert -(-rows // found) == -(-rows // most)


def test_a_vocabulary_is_cut_into_tiles_of_like_size_in_whole_blocks_of_rows() -> None:
    from onefold.tiling.cut import rows_of_a_tile

    rows = rows_of_a_tile(50257, 16000)  # four tiles
    assert rows % 64 == 0 and 50257 / 4 <= rows < 50257 / 4 + 64


def test_each_tile_takes_at_most_the_bytes_that_were_given_in_the_compute_dtype() -> None:
    from onefold.tiling.cut import Cut

    for precision, itemsize in (("fp32", 4), ("bf16", 2)):
        model = nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 3), nn.Embedding(50, 10))
        with Cut(model, recipe_of(1000, precision=precision)):
            pass
        tiles = {
            name: p.numel() * itemsize for name, p in model.named_parameters() if ".tiles." in name
        }
        large = [n for n, numel in (("0", 1000), ("1", 300), ("2", 500)) if numel * itemsize > 1000]
        assert {name.split(".")[0] for name in tiles} == set(large)
        assert max(tiles.values()) <= 1000


# -- the same numbers, in one process --------------------------------------------------------------


def gradients(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Output, gradient of x, gradients of parameters by their names outside."""
    x = x.detach().requires_grad_(x.is_floating_point())
    out = module(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    found: dict[str, Tensor] = {}
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        whole = re.sub(r"tiles\.\d+\.", "", name)
        found[whole] = torch.cat([found[whole], p.grad]) if whole in found else p.grad
    return out.detach(), x.grad, found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7)])
def test_a_linear_in_tiles_gives_outputs_and_gradients_within_rounding(
    bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(7, 60, bias=bias), features_of(1, *shape)
    out, dx, expected = gradients(module, x)
    module.zero_grad()
    cut(module, 7 * 4 * 16)
    out_2, dx_2, found = gradients(module, x)
    assert len(next(iter(module.children()))) == 4
    torch.testing.assert_close(out_2, out, rtol=1e-5, atol=1e-6)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert dx is not None and dx_2 is not None
    # A sum over the tiles, in another order
    torch.testing.assert_close(dx_2, dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", [None, 0, 13, -1])
def test_an_embedding_in_tiles_gives_the_same_bits_and_gradients(padding: int | None) -> None:
    torch.manual_seed(0)
    module, ids = nn.Embedding(30, 5, padding_idx=padding), torch.randint(30, (4, 9))
    ids[0, :4] = torch.tensor([0, 13, 29, 7])
    out, _, expected = gradients(module, ids)
    module.zero_grad()
    cut(module, 5 * 4 * 8)
    out_2, _, found = gradients(module, ids)
    assert torch.equal(out, out_2) and torch.equal(found["weight"], expected["weight"])


@pytest.mark.parametrize("wrong", [-1, 30, 1000])
def test_an_index_that_no_tile_has_fails_as_before(wrong: int) -> None:
    module = nn.Embedding(30, 5)
    with pytest.raises(IndexError) as before:
        module(torch.tensor([3, wrong]))
    cut(module, 5 * 4 * 8)
    with pytest.raises(IndexError) as after:
        module(torch.tensor([3, wrong]))
    assert str(after.value) == str(before.value)


def test_a_tied_weight_has_one_set_of_tiles_that_collects_both_gradients() -> None:
    tokens = tokens_of(1)
    plain, tiled = (fresh_gpt(tied=True) for _ in range(2))
    cut(tiled, TILE)
    assert [id(t) for t in tiled.tokens.tiles] == [id(t) for t in tiled.head.tiles]
    for model in (plain, tiled):
        model(tokens).backward()
    whole = torch.cat([t.weight.grad for t in tiled.tokens.tiles])
    torch.testing.assert_close(tiled(tokens), plain(tokens), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(whole, plain.tokens.weight.grad, rtol=1e-5, atol=1e-7)


def fresh_gpt(**options: Any) -> Any:
    torch.manual_seed(0)
    return TinyGPT(**options)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_the_linear_layer_of_gpt2_in_tiles_is_equal_within_rounding() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    module, x = Conv1D(12, 40), features_of(1, 2, 3, 40)
    out, dx, expected = gradients(module, x)
    module.zero_grad()
    cut(module, 12 * 4 * 16)
    out_2, dx_2, found = gradients(module, x)
    assert len(module.tiles) == 3 and isinstance(module, Conv1D)
    torch.testing.assert_close(out_2, out, rtol=1e-5, atol=1e-6)
    assert dx is not None and dx_2 is not None
    torch.testing.assert_close(dx_2, dx, rtol=1e-5, atol=1e-6)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


class Scaled(nn.Embedding):
    """As embeddings of several architectures are: a factor around the lookup."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.weight.shape[1] ** 0.5


class Transposed(nn.Linear):
    """Computes with its weight by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.t() + self.bias


@pytest.mark.parametrize(
    ("kind", "x"), [(Scaled, torch.arange(30).view(5, 6)), (Transposed, features_of(3, 4, 30))]
)
def test_a_subclass_keeps_its_own_forward_pass(kind: type[nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    module = kind(30, 20)  # type: ignore[call-arg]
    out, dx, expected = gradients(module, x)
    module.zero_grad()
    cut(module, 400)
    out_2, dx_2, found = gradients(module, x)
    assert isinstance(module, kind) and type(module).__name__ == kind.__name__
    torch.testing.assert_close(out_2, out)
    assert all(torch.allclose(found[n], expected[n]) for n in expected)
    assert (dx is None and dx_2 is None) or torch.allclose(dx_2, dx)  # type: ignore[arg-type]


# -- training --------------------------------------------------------------------------------------


class Tiles(GPTCase):
    """Embedding and head are two weights."""

    options = {"tile": TILE}


class TiedTiles(GPTCase):
    """Embedding and head are one weight, and the optimizer has moments."""

    options = {"tile": TILE}

    def build(self) -> nn.Module:
        return TinyGPT(tied=True)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


class TilesOfBlocks(MLPCase):
    """The tiles lie inside of blocks, which are units themselves."""

    options = {"tile": 200}


class ManyMicroBatches(TiedTiles):
    """Two micro-batches a step, clipped."""

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        # Both graphs at once
        losses = [self.loss(model, self.batch(rank, 2 * step + i)) for i in range(2)]
        for loss in losses:
            loss.backward()
        self.before_update(model)
        optimizer.step()
        return float(sum(loss.item() for loss in losses))

    ddp_options: Mapping[str, Any] = {}
    reference = "mean"


class Checkpointed(TiedTiles):
    kind: Any = "non-reentrant"

    def build(self) -> nn.Module:
        return TinyGPT(tied=True, checkpointing=self.kind)


class CheckpointedReentrantly(Checkpointed):
    kind = "reentrant"
    ddp_options = {}


class Frozen(TiedTiles):
    """The head's weight is trained, the embedding's not."""

    def build(self) -> nn.Module:
        model = TinyGPT()
        model.tokens.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model


class ReadAsAWhole(GPTCase):
    """Code that computes with the weight itself, beside its module."""

    options = {"tile": TILE}

    class Model(TinyGPT):
        def forward(self, tokens: Tensor) -> Tensor:
            return (
                super().forward(tokens)
                + self.head.weight.square().mean()
                + (self.tokens.weight[:3] @ self.head.weight.t()).mean()
            )

    def build(self) -> nn.Module:
        return self.Model()


CASES = [
    Tiles,
    TiedTiles,
    TilesOfBlocks,
    ManyMicroBatches,
    Checkpointed,
    CheckpointedReentrantly,
    Frozen,
    ReadAsAWhole,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_model_in_tiles_trains_as_in_ddp_at_every_stage(case: Any) -> None:
    assert_trains_as_ddp(case)


def beside_untiled(
    tied: bool, precision: str, stages: list[int], rtol: float, atol: float
) -> list[str]:
    """Differences between tiles and none at the same stage."""
    problems = []
    for stage in stages:
        curves = []
        for tile in (None, TILE):
            case = TiedTiles() if tied else Tiles()
            case.options = {"tile": tile}
            curves.append(train_sharded(case, stage, precision=precision))
        problems += differences(
            f"tied {tied}, {precision}, stage {stage}", *curves, rtol=rtol, atol=atol
        )
    return problems


@pytest.mark.parametrize("tied", [False, True], ids=["two weights", "tied"])
@pytest.mark.parametrize(
    ("precision", "rtol", "atol"), [("fp32", 1e-5, 1e-6), ("bf16", 2e-2, 1e-2)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_the_model_without_tiles(
    ranks: int, precision: str, rtol: float, atol: float, tied: bool
) -> None:
    assert (
        run_ranks(ranks, beside_untiled, tied, precision, list(STAGES), rtol, atol) == [[]] * ranks
    )


# -- memory and wire -------------------------------------------------------------------------------


def most_at_once(engine: Any, units: Callable[[str], bool]) -> int:
    """The most bytes that were gathered at a time for the units that `units` names, from the
    ledger's record.
    """
    now = most = 0
    for _, category, unit, change in engine.memory.timeline:
        if category == "gathered units" and units(unit):
            now += change
            most = max(most, now)
    return most


def gathered_bytes(
    tied: bool, checkpointing: Any, tile: int | None, prefetch: int, calls: int
) -> dict[str, int]:
    """Of three steps, the first included: the most bytes of large weights at once, the largest
    tile, the whole.
    """
    import onefold

    torch.manual_seed(0)
    model = TinyGPT(vocabulary=640, depth=2, tied=tied, checkpointing=checkpointing)
    whole = model.head.weight.numel() * 4
    model = onefold.shard(model, recipe_of(tile, prefetch=prefetch))
    engine = onefold.engine_of(model)
    engine.memory.record = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = sum(model(tokens_of(10 * step + i, vocabulary=640)) for i in range(calls))
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    large = {u.name: u.numel * 4 for u in engine.units if u.name.startswith(("tokens", "head"))}
    left = engine.memory.now().get("gathered units", 0)
    most = most_at_once(engine, lambda unit: unit.startswith(("tokens", "head")))
    return {
        "most": most,
        "tile": max(large.values(), default=0),
        "whole": whole,
        "units": len(large),
        "left": left,
    }


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("tied", [False, True], ids=["two weights", "tied"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_no_more_tiles_are_gathered_at_once_than_the_one_in_use_and_those_ahead(
    prefetch: int, tied: bool, checkpointing: str
) -> None:
    for found in run_ranks(2, gathered_bytes, tied, checkpointing, 6400, prefetch, 1):
        assert found["units"] == (8 if tied else 16), found
        assert found["tile"] <= 6400 + 4 * 2 * 64  # a shard is a multiple of 64 elements
        assert 0 < found["most"] <= (1 + prefetch) * found["tile"] < found["whole"] / 2, found
        assert found["left"] == 0


def test_two_forward_passes_before_a_backward_pass_hold_no_more_tiles() -> None:
    for found in run_ranks(2, gathered_bytes, True, "none", 6400, 1, 2):
        assert 0 < found["most"] <= 2 * found["tile"] < found["whole"] / 2, found


class Wide(nn.Module):
    """A block whose two matrices are in tiles, in a checkpoint or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = x + (
                block(x)
                if self.how == "none"
                else checkpoint(block, x, use_reentrant=self.how == "reentrant")
            )
        return x


def tiles_of_blocks(precision: str) -> dict[str, tuple[int, int, int]]:
    """By how blocks are checkpointed: the most bytes of tiles at once, those of a tile, and those
    of one whole matrix.
    """
    import onefold

    found = {}
    itemsize = 2 if precision == "bf16" else 4
    for how in ("none", "reentrant", "non-reentrant"):
        torch.manual_seed(0)
        model = onefold.shard(Wide(how), recipe_of(2048, precision=precision))
        engine = onefold.engine_of(model)
        for step in range(3):
            engine.memory.record = True
            model(features_of(step, 4, 16).requires_grad_()).square().mean().backward()
            model.zero_grad()
        sizes = [u.numel * itemsize for u in engine.units if ".tiles." in u.name]
        most = most_at_once(engine, lambda unit: ".tiles." in unit)
        found[how] = most, max(sizes), 16 * 256 * itemsize
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpointed_block_does_not_save_its_tiles(ranks: int) -> None:
    for found in run_ranks(ranks, tiles_of_blocks, "bf16"):
        for how, (most, tile, whole) in found.items():
            assert 0 < most <= 3 * tile <= whole, (how, most, tile, whole)


def on_tiers(folder: str, tied: bool) -> list[tuple[str, list[float], int, int, int]]:
    """For each place where state may rest: its name, losses, the most bytes of tiles at once, those
    of a tile, those of the whole.
    """
    import onefold

    nvme = {"nvme": folder}
    places: dict[str, dict[str, Any]] = {
        "device": {},
        "states on the host": {"offload_optimizer": "cpu"},
        "all on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
        "states on NVMe": {"offload_optimizer": "nvme", **nvme},
        "all on NVMe": {"offload_optimizer": "nvme", "offload_param": "nvme", **nvme},
    }
    out = []
    for name, options in places.items():
        torch.manual_seed(0)
        model = onefold.shard(
            TinyGPT(vocabulary=640, depth=2, tied=tied),
            recipe_of(6400, precision="bf16", **options),
        )
        engine = onefold.engine_of(model)
        engine.memory.record = True
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            loss = model(tokens_of(10 * step + engine.rank, vocabulary=640))
            loss.backward()
            onefold.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        sizes = [2 * u.numel for u in engine.units if ".tiles." in u.name]
        out.append(
            (
                name,
                losses,
                most_at_once(engine, lambda unit: ".tiles." in unit),
                max(sizes),
                640 * 20 * 2,
            )
        )
        engine.close()
    return out


@pytest.mark.parametrize("tied", [False, True], ids=["two weights", "tied"])
def test_tiles_rest_on_any_tier_with_the_same_bits(tied: bool, tmp_path: Path) -> None:
    for found in run_ranks(2, on_tiers, str(tmp_path), tied):
        for name, losses, most, tile, whole in found:
            assert losses == found[0][1], name
            # The one in use and the one ahead; of what lies on a disk one more is being read.
            assert 0 < most <= (3 if name == "all on NVMe" else 2) * tile < whole, (
                name,
                most,
                tile,
                whole,
            )


def bytes_by_unit(tied: bool) -> dict[str, float]:
    """All-gathers a step of each weight in tiles, by the bytes that its tiles send; the steps
    before learn the order.
    """
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(TinyGPT(tied=tied), recipe_of(TILE))
    engine = onefold.engine_of(model)
    for step in range(3):
        engine.traffic.reset()
        model(tokens_of(step)).backward()
    size, out = dist.get_world_size(), {}
    for unit in engine.units:
        if ".tiles." in unit.name:
            sent = engine.traffic.by_unit()[unit.name]
            shard = 4 * unit.numel // size * (size - 1)
            out.setdefault(unit.name.partition(".tiles.")[0], set()).add(
                (sent["all-gather"] / shard, sent["reduce-scatter"] / shard)
            )
    assert all(len(found) == 1 for found in out.values()), out
    return {name: found.pop() for name, found in out.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["two weights", "tied"])
def test_tiles_are_gathered_for_each_use_and_reduced_once(tied: bool) -> None:
    """A lookup's backward pass reads no weight. A tied tile is gathered for the lookup, for the
    head, and for the head's backward.
    """
    for found in run_ranks(2, bytes_by_unit, tied):
        embeddings = {"tokens": (3, 1)} if tied else {"tokens": (1, 1), "head": (2, 1)}
        blocks = {
            f"blocks.{i}.{name}": (2, 1)
            for i in range(3)
            for name in ("attention.qkv", "mlp.0", "mlp.2")
        }
        assert found == embeddings | blocks


# -- what users see --------------------------------------------------------------------------------


def names_and_whole_states(stage: int, tied: bool) -> list[str]:
    """State dicts have the names, shapes and bits that they have without tiles."""
    import onefold

    torch.manual_seed(0)
    before = TinyGPT(tied=tied)
    expected = {name: t.clone() for name, t in before.state_dict().items()}
    model = onefold.shard(before, recipe_of(TILE, stage))
    problems = []

    def compare(what: str, state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        if list(state) != list(wanted):
            problems.append(f"{what}: {list(state)}")
        problems.extend(
            f"{what}: {n}" for n in wanted if n in state and not torch.equal(state[n], wanted[n])
        )

    state = onefold.full_state_dict(model)
    if dist.get_rank() == 0:
        compare("full_state_dict", state, expected)
    with onefold.full_params(model):
        compare("state_dict in full_params", model.state_dict(), expected)
        if not torch.equal(model.head.weight, expected["head.weight"]):
            problems.append("head.weight in full_params")
    changed = {n: t + 1 for n, t in expected.items()}
    missing = onefold.load_full_state_dict(model, changed if dist.get_rank() == 0 else None)
    if missing != ([], []):
        problems.append(f"missing or unexpected: {missing}")
    with onefold.full_params(model):
        compare("after load_full_state_dict", model.state_dict(), changed)
    with onefold.full_params(model, write=True), torch.no_grad():
        model.load_state_dict(expected)
    with onefold.full_params(model, write=True), torch.no_grad():
        model.head.weight[5:50].zero_()
        if not tied:
            model.tokens.weight.data[20].fill_(7.0)
    expected["head.weight"][5:50] = 0
    if tied:
        expected["tokens.weight"] = expected["head.weight"]
    else:
        expected["tokens.weight"][20] = 7
    with onefold.full_params(model):
        compare("after writes in full_params", model.state_dict(), expected)
    try:
        onefold.load_full_state_dict(
            model, {n: t[:4] if n == "head.weight" else t for n, t in expected.items()}
        )
        problems.append("a head of another shape was loaded")
    except ValueError as error:
        if "head.weight: given (4, 20), expected (61, 20)" not in str(error):
            problems.append(str(error))
    return problems


@pytest.mark.parametrize("tied", [False, True], ids=["two weights", "tied"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_state_dicts_know_no_tiles(ranks: int, tied: bool) -> None:
    for stage in STAGES:
        assert run_ranks(ranks, names_and_whole_states, stage, tied) == [[]] * ranks, (
            f"stage {stage}"
        )


def looks_at_weights() -> list[str]:
    import onefold
    from onefold.runtime.parameters.parameter import ShardedParameterError

    model: Any = TinyGPT()
    hooked: list[tuple[int, ...]] = []
    model.head.register_forward_hook(lambda module, args, out: hooked.append(tuple(out.shape)))
    head = model.head
    onefold.shard(model, recipe_of(TILE))
    weight, problems = model.head.weight, []
    if (
        model.head is not head
        or not isinstance(head, nn.Linear)
        or not isinstance(model.tokens, nn.Embedding)
    ):
        problems.append("the modules are others")
    if (tuple(weight.shape), weight.dtype, weight.numel(), weight.dim()) != (
        (61, 20),
        torch.float32,
        1220,
        2,
    ):
        problems.append("other metadata")
    if (
        head.in_features,
        head.out_features,
        model.tokens.num_embeddings,
        model.tokens.embedding_dim,
    ) != (20, 61, 61, 20):
        problems.append("other sizes")

    def refused(what: str, act: Callable[[], object], words: str) -> None:
        try:
            problems.append(f"{what} gave {act()!r}")
        except ShardedParameterError as error:
            if words not in str(error):
                problems.append(f"{what}: {error}")

    refused("a sum", lambda: weight.sum(), "full_params")
    refused("a product", lambda: features_of(0, 2, 20) @ weight.t(), "Call its module")
    refused("a write", lambda: weight.data.zero_(), "write=True")
    refused("a write by init", lambda: nn.init.zeros_(weight), "write=True")
    refused("its gradient", lambda: weight.grad, "tile.weight.grad")
    refused("other memory", lambda: setattr(weight, "data", torch.zeros(61, 20)), "copy_")
    repr(weight), repr(model)
    model(tokens_of(0)).backward()
    if hooked != [(2, 12, 61)]:
        problems.append(f"the hook of the head saw {hooked}")
    if any(t.weight.grad is None for t in head.tiles):
        problems.append("a tile has no gradient")
    weight.requires_grad_(False)
    model.zero_grad()
    model(tokens_of(0)).backward()
    if (
        any(t.weight.grad is not None for t in head.tiles)
        or model.tokens.tiles[0].weight.grad is None
    ):
        problems.append("freezing the head did not freeze its tiles, or others too")
    return problems


def test_a_weight_in_tiles_looks_whole_and_says_so_where_it_cannot_be() -> None:
    assert run_ranks(2, looks_at_weights) == [[], []]


def test_what_is_written_to_the_whole_weight_stays_or_is_refused() -> None:
    """In one process the tiles lie in one piece, which `module.weight` shows; where autograd looks
    on it shows a copy.
    """
    module = nn.Linear(7, 30)
    cut(module, 7 * 4 * 8)
    expected = module.weight.detach().clone()
    with torch.no_grad():
        module.weight[3:20].zero_()
        module.weight.data[25] = 2.0
        module.weight.mul_(2)
        expected[3:20] = 0
        expected[25] = 2
    assert torch.equal(torch.cat([t.weight for t in module.tiles]), 2 * expected)
    with pytest.raises(RuntimeError):
        module.weight[3:20].zero_()
    with pytest.raises(RuntimeError):
        module.weight.view(-1).add_(1)
    assert torch.equal(torch.cat([t.weight for t in module.tiles]), 2 * expected)


def warnings_of_reading() -> list[str]:
    import onefold

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    model = onefold.shard(fresh(ReadAsAWhole()), recipe_of(TILE))
    for step in range(2):
        model(tokens_of(step)).backward()
    return said


def test_reading_the_whole_weight_in_a_forward_pass_is_said_once_a_weight() -> None:
    for said in run_ranks(2, warnings_of_reading):
        assert len(said) == 2 and all("gathers all of it" in sentence for sentence in said)
        assert "'head.tiles.0.weight'" in said[0] and "'tokens.tiles.0.weight'" in said[1]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class GivesItAway(nn.Module):
    """A model whose forward pass gives the weight of a head in tiles to an autograd Function."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.joins = joins
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x)
        tiles: Any = self.head
        weight = torch.cat([t.weight for t in tiles.tiles]) if self.joins else self.head.weight
        return Square.apply(x, weight)  # type: ignore[no-any-return]


def gives_away(stage: int) -> tuple[str, float, float]:
    import onefold

    x, norms, said = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), [], ""
    for joins in (False, True):
        torch.manual_seed(0)
        plain = GivesItAway(False)
        plain(x).square().sum().backward()
        torch.manual_seed(0)
        model = onefold.shard(GivesItAway(joins), recipe_of(16 * 8 * 4, stage))
        try:
            model(x).square().sum().backward()
        except RuntimeError as error:
            said = str(error)
            continue
        norms = [
            float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])),  # type: ignore[misc]
            float(onefold.clip_grad_norm_(model, float("inf"))),
        ]
    return said, norms[0], norms[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_function_that_is_given_a_weight_in_tiles_is_refused_and_told_the_cure(
    stage: int,
) -> None:
    for said, expected, found in run_ranks(2, gives_away, stage):
        assert "torch.cat([tile.weight for tile in module.tiles])" in said
        assert found == pytest.approx(expected, rel=1e-6)


# -- models on the meta device ---------------------------------------------------------------------


def from_meta(stage: int, own: bool) -> list[str]:
    import onefold

    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.zeros_(p)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
            if module.bias is not None:
                nn.init.constant_(module.bias, 3.0)
        elif isinstance(module, nn.Embedding):
            nn.init.constant_(module.weight, 2.0)

    with torch.device("meta"):
        model: nn.Module = nn.Sequential(nn.Embedding(64, 8, padding_idx=33), nn.Linear(8, 4096))
    onefold.shard(model, recipe_of(1024, stage), init=init if own else None)
    problems = []
    with onefold.full_params(model):
        table, head = model[0].weight, model[1]
        if own and not (
            table.eq(2).all() and head.bias.eq(3).all() and abs(head.weight.std() - 0.5) < 0.02
        ):
            problems.append("init was not followed")
        if not own and (
            table[33].any()
            or abs(table.std() - 1) > 0.2
            or not 0.34 < head.weight.abs().max() <= 8**-0.5
        ):
            problems.append("the tiles do not start as such modules do")
        if not own and not 0.3 < head.bias.abs().max() <= 8**-0.5:
            problems.append("the bias does not start as such a module's does")
        if (head.weight[:32] == head.weight[32:64]).all():
            problems.append("two tiles start alike")
    model(torch.arange(6)).square().mean().backward()
    return problems


@pytest.mark.parametrize("own", [False, True], ids=["reset_parameters", "init"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tiles_on_the_meta_device_start_as_their_modules_would(ranks: int, own: bool) -> None:
    for stage in (0, 3):
        assert run_ranks(ranks, from_meta, stage, own) == [[]] * ranks, f"stage {stage}"


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq"])
def test_an_embedding_that_looks_at_all_rows_of_a_batch_is_refused(option: str) -> None:
    model = nn.Sequential(nn.Embedding(64, 8, **{option: 1 if option == "max_norm" else True}))
    with pytest.raises(ValueError, match=f"embedding '0' has {option}=.*larger than this weight"):
        cut(model, 1024)
    assert type(model[0]) is nn.Embedding and model[0].weight.shape == (64, 8)


def test_a_row_larger_than_a_tile_is_refused_and_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 8))
    state, parameters = (
        {n: t.clone() for n, t in model.state_dict().items()},
        list(model.parameters()),
    )
    with pytest.raises(
        ValueError, match=r"one row of '1.weight' \(\(8, 100\), torch.float32\) takes 400"
    ):
        cut(model, 320)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


def test_a_shard_that_fails_leaves_the_model_as_it_was() -> None:
    import onefold

    def fails(module: nn.Module) -> None:
        raise OSError("no such thing")

    model = TinyGPT(tied=True)
    with torch.device("meta"):
        model.norm = nn.LayerNorm(20)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(OSError, match="no such thing"):
        onefold.shard(model, recipe_of(TILE), init=fails)
    assert type(model.head) is nn.Linear and model.head.weight is model.tokens.weight
    assert list(model.state_dict()) == list(expected)
    assert all(
        expected[n].is_meta or torch.equal(t, expected[n]) for n, t in model.state_dict().items()
    )


def test_what_cannot_be_computed_in_tiles_is_named_and_left_whole() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.conv_2 = nn.Conv2d(8, 8, 5), nn.Conv2d(8, 8, 6)
            self.table = nn.Embedding(64, 8)
            self.other = nn.Parameter(torch.empty(0))
            self.other = self.table.weight
            self.fine = nn.Linear(64, 64)

    model = Odd()
    notes = cut(model, 1024)
    assert len(notes) == 2
    assert (
        "'other' takes more than tile=1,024 bytes when gathered, but Odd is not computed in tiles"
        in notes[0]
    )
    assert "'conv.weight' and 1 more take" in notes[1] and "Conv2d" in notes[1]
    assert type(model.table) is nn.Embedding and model.table.weight is model.other
    assert len(model.fine.tiles) == 16


def test_hooks_on_a_weight_that_would_be_cut_into_tiles_are_refused() -> None:
    import onefold

    model = TinyMLP(features=40)
    model.enter.weight.register_hook(lambda grad: grad)
    with pytest.raises(
        ValueError,
        match=r"'enter.weight' has gradient hooks and takes more than tile=500 bytes.*larger tile",
    ):
        onefold.shard(model, recipe_of(500, precision="bf16"))
    onefold.shard(model, recipe_of(None, precision="bf16"))


def test_tiles_have_the_attributes_that_the_weight_had() -> None:
    import onefold

    layer: Any = nn.Linear(8, 64, bias=False)
    layer.weight.rate = 0.5
    model = onefold.shard(nn.Sequential(layer), onefold.Recipe.zero(stage=1, tile=512))
    assert [p.rate for p in model.parameters()] == [0.5] * 4


def test_an_optimizer_from_before_is_told_that_its_weights_are_tiles_now() -> None:
    import onefold

    model = TinyMLP(features=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onefold.shard(model, recipe_of(500))
    model(features_of(0, 2, 40)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"parameter 'enter.weight' is computed in tiles since shard\(\)"
    ):
        optimizer.step()


def whole_matrix_optimizer(tile: int | None) -> str:
    import onefold

    model = onefold.shard(TinyMLP(features=40), recipe_of(tile, 0))
    optimizer = torch.optim.Adafactor(model.parameters())
    model(features_of(0, 2, 40)).sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "stepped"


def test_an_optimizer_of_whole_matrices_is_refused_for_tiles_at_stage_0_too() -> None:
    assert run_ranks(2, whole_matrix_optimizer, None) == ["stepped"] * 2
    for said in run_ranks(2, whole_matrix_optimizer, 500):
        assert "Adafactor steps whole matrices" in said and "cut into tiles" in said


# -- more architectures ----------------------------------------------------------------------------


class NamedUnits(TiedTiles):
    """Units that the user names, one of them around tiles."""

    units = (Attention, "head")


class Functional(Tiles):
    """A head called by itself, and the table looked up by torch's function."""

    class Model(TinyGPT):
        def logits(self, tokens: Tensor) -> Tensor:
            x = F.embedding(tokens, self.tokens.weight) + self.positions.weight[: tokens.shape[1]]
            return self.head(self.norm(x)) + self.head(x)

    def build(self) -> nn.Module:
        return self.Model(depth=1)


class TwoHeads(Tiles):
    """The ranks use one head each, and change them every step."""

    class Model(TinyGPT):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(20, 61)

        def forward(self, tokens: Tensor, other: bool = False) -> Tensor:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            scores = (self.other if other else self.head)(self.norm(x))
            return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def build(self) -> nn.Module:
        return self.Model()

    def batch(self, rank: int, step: int) -> Any:
        return tokens_of(10 * step + rank), (rank + step) % 2 == 1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(*batch)


@pytest.mark.parametrize("case", [NamedUnits, Functional, TwoHeads], ids=lambda case: case.__name__)
def test_other_units_and_other_uses_train_as_in_ddp(case: Any) -> None:
    assert_trains_as_ddp(case)


def test_a_model_in_tiles_on_one_rank_can_be_copied_and_pickled() -> None:
    import onefold

    model = onefold.shard(TinyGPT(tied=True), recipe_of(TILE))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert isinstance(other.head, nn.Linear) and type(other.head).__name__ == "Linear"
        assert [id(t) for t in other.tokens.tiles] == [id(t) for t in other.head.tiles]
        assert torch.equal(other(tokens_of(0)), model(tokens_of(0)))
        with torch.no_grad():
            other.head.weight.zero_()
        assert not other.tokens.weight.any() and model.tokens.weight.any()


def lone_layer(rows: int) -> list[float]:
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(nn.Linear(16, rows), recipe_of(1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(features_of(step, 4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    state = onefold.full_state_dict(model)
    return [*losses, *(tuple(state["weight"].shape) if state else ())]


def test_a_model_may_be_one_layer() -> None:
    first, second = run_ranks(2, lone_layer, 100)
    assert first == [*second, 100, 16] and len(set(second)) == 3
