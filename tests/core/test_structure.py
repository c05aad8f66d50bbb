"""What becomes of a model: `unshard`, tiles, another default device, buffers, autocast, torch.compile."""

from __future__ import annotations

import contextlib
import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import looks
import onefold
from on_ranks import on_ranks, slow
from reference import adamw, built, ddp, differences, sgd, train
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STAGES = (0, 1, 2, 3)


def sharded(stage: int = 3, make: Any = TinyGPT, seed: int = 0, **options: Any) -> Any:
    recipe = onefold.Recipe.zero(stage, **{"stall_timeout": 20.0, **options})
    return onefold.shard(built(make, seed), recipe)


def batches(count: int, first: int = 0) -> list[Tensor]:
    return [tokens_of(10 * step + dist.get_rank()) for step in range(first, first + count)]


# -- unshard ---------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "precision": "bf16"},
        {"stage": 2, "precision": "bf16", "master_dtype": "fp64"},
        pytest.param({"stage": 1}, marks=slow),
        {"stage": 0},
    ],
    ids=str,
)
def test_unsharding_and_sharding_again_changes_no_bit(options: dict[str, Any]) -> None:
    curves = []
    for unshard in (False, True):
        model = sharded(**options)
        before, curve = dict(model.named_parameters()), []
        for step, batch in enumerate(batches(4)):
            if step == 2 and unshard:
                assert onefold.unshard(model) is model
                assert all(type(p) is nn.Parameter for p in model.parameters())
                assert all(p is before[n] for n, p in model.named_parameters())
                assert not looks.is_sharded(model) and all(p.numel() for p in model.parameters())
                onefold.shard(model, onefold.Recipe.zero(**options))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == curves[1]


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_trains_on_with_another_head_and_a_larger_embedding(stage: int) -> None:
    def widen(model: Any) -> None:
        torch.manual_seed(1)
        old, model.tokens = model.tokens.weight, nn.Embedding(70, model.tokens.embedding_dim)
        with torch.no_grad():
            model.tokens.weight[: len(old)] = old
        model.head = nn.Linear(model.head.in_features, model.head.out_features)

    plain, model = built(TinyGPT), sharded(stage)
    train(ddp(plain), sgd(plain), batches(2))
    widen(plain)
    train(model, sgd(model), batches(2))
    widen(onefold.unshard(model))
    onefold.shard(model, onefold.Recipe.zero(stage))
    losses = train(ddp(plain), sgd(plain), batches(2, 2))
    assert train(model, sgd(model), batches(2, 2)) == pytest.approx(losses, rel=1e-5)


@on_ranks(2)
def test_what_cannot_be_unsharded_is_said(folder: Path) -> None:
    waiting = sharded(1, TinyMLP)
    with onefold.no_sync(waiting):
        waiting(features_of(0, 4, 7)).sum().backward()
    away = sharded(3, TinyMLP, offload_optimizer="cpu")
    inside = sharded(3, TinyMLP)
    for model, words in ((waiting, "no_sync"), (away, "on the host"), (inside, "full_params")):
        within = onefold.full_params(inside) if model is inside else contextlib.nullcontext()
        with within, pytest.raises((RuntimeError, ValueError), match=words):
            onefold.unshard(model)
        assert looks.is_sharded(model)


# -- tiles -----------------------------------------------------------------------------------------


class Wide(TinyMLP):
    def __init__(self) -> None:
        super().__init__(width=32)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_linear_layers_in_tiles_train_as_whole_ones_and_never_are_whole(stage: int) -> None:
    whole = sharded(stage, Wide)
    tiled: Any = built(Wide)
    names = onefold.tiling.tile_linears(tiled, 4096)
    assert names and all(type(tiled.get_submodule(n)) is onefold.tiling.TiledLinear for n in names)
    onefold.shard(tiled, onefold.Recipe.zero(stage))
    tiles = {name: numel for name, numel in looks.units(tiled) if ".tiles." in name}
    assert len(tiles) > len(names) and max(tiles.values()) * 4 <= 4096 + 4 * 256
    inputs = [features_of(10 * step + dist.get_rank(), 4, 7) for step in range(3)]
    expected = train(whole, sgd(whole), inputs)
    assert train(tiled, sgd(tiled), inputs) == pytest.approx(expected, rel=1e-5)
    a, b = onefold.full_state_dict(whole), onefold.full_state_dict(tiled)
    for name in names if dist.get_rank() == 0 else ():
        parts = [v for k, v in b.items() if k.startswith(f"{name}.tiles.") and "weight" in k]
        assert torch.allclose(torch.cat(parts), a[f"{name}.weight"], rtol=1e-4, atol=1e-6)


def test_what_cannot_be_tiled_is_said() -> None:
    model = TinyMLP()
    for call, words in (
        (lambda: onefold.tiling.tile_linears(model, 4), "one row takes"),
        (lambda: onefold.tiling.tile_linears(model, "1KB", ["blocks"]), "expected nn.Linear"),
        (lambda: onefold.tiling.tile_linears(model, "1KB", ["nothing"]), "no module of this model"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    enter, apart = model.enter, nn.Linear(model.enter.in_features, model.enter.out_features)
    for name in ("weight", "bias"):
        model.leave = nn.Linear(enter.in_features, enter.out_features)
        setattr(model.leave, name, getattr(enter, name))
        with pytest.raises(ValueError, match="tied"):
            onefold.tiling.tile_linears(model, 200, ["enter"])
    for layers, words in (
        (nn.ModuleList([apart, apart]), "tied"),
        (apart, "the whole model"),
        (nn.Sequential(torch.nn.utils.spectral_norm(apart)), "is computed"),
    ):
        with pytest.raises(ValueError, match=words):
            onefold.tiling.tile_linears(layers, 200)


# -- devices ---------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "gather_codec": "int8", "reduce_codec": "int8"},
        {"stage": 3, "gather_codec": "int4", "reduce_codec": "int8"},
        {"stage": 3, "offload_optimizer": "nvme"},
        {"stage": 2, "moments": "int8"},
    ],
    ids=str,
)
def test_training_saving_and_loading_are_the_same_with_another_default_device(
    options: dict[str, Any], folder: Path
) -> None:
    """`torch.set_default_device("meta")`: Onefold's own tensors are where it needs them."""
    found = []
    for device in ("cpu", "meta"):
        if "nvme" in options.values():
            options = {**options, "nvme": str(folder)}
        inputs = [features_of(10 * step + dist.get_rank(), 4, 7) for step in range(4)]
        model = sharded(make=TinyMLP, **options)
        optimizer = adamw(model)
        train(model, optimizer, inputs[:1])  # torch makes Adam's counters on the default device
        with torch.device(device):
            average = None if "nvme" in options else onefold.ema.EMA(model, 0.5)
            seen = train(model, optimizer, inputs[1:2], clip=0.1)
            if average is not None:
                average.update()
            onefold.save(folder / "saved", model=model, optimizer=optimizer, overwrite=True)
            seen += train(model, optimizer, inputs[2:3])
            onefold.load(folder / "saved", model=model, optimizer=optimizer)
            seen += train(model, optimizer, inputs[3:])
            averaged = {} if average is None else average.state_dict()
            states = {**averaged, **onefold.full_state_dict(model)}
        found.append((states, seen))
    assert found[0][1] == found[1][1] and not differences(found[0][0], found[1][0])


@on_ranks(2, fresh=True)
def test_ranks_whose_buffers_differ_stop_with_an_error_that_names_buffers() -> None:
    class Counted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(5))

    model = sharded(0, Counted, stall_timeout=3.0)
    if dist.get_rank() == 1:
        model.seen = torch.zeros(50)
    with pytest.raises((onefold.StallError, RuntimeError)) as error:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert dist.get_rank() == 0 or "buffers" in str(error.value)


# -- autocast and torch.compile --------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_under_autocast_autograd_holds_no_casts_of_the_weights_of_stage_3(
    checkpointing: str,
) -> None:
    held: dict[int, int] = {}
    found = []
    for stage in (2, 3):
        model = sharded(stage, lambda: TinyGPT(checkpointing=checkpointing))  # type: ignore
        sizes = {p.numel() for p in model.parameters() if p.dim() > 1}

        def pack(t: Tensor, sizes: Any = sizes) -> Tensor:
            whole = t if t._base is None else t._base
            if t.dtype == torch.bfloat16 and whole.numel() in sizes:
                held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        for step in range(3):  # in the first pass no unit is kept for the backward pass
            held.clear()
            with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens_of(step))
            loss.backward()
        found.append(sum(held.values()))
    assert found[1] == 0 and (found[0] > 0 or checkpointing != "none")


@on_ranks(2)
def test_autocasts_cache_holds_no_casts_of_units_that_were_released() -> None:
    casts: list[weakref.ref[Tensor]] = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and args[0].numel() in sizes:
                casts.append(weakref.ref(out))
            return out

    for stage in (2, 3):
        model = sharded(stage)
        sizes = {p.numel() for p in model.blocks.parameters() if p.dim() > 1}
        casts.clear()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            with Notes():
                model(tokens_of(0))
            kept = [cast for cast in casts if cast() is not None]
        assert len(casts) > len(model.blocks) and bool(kept) == (stage == 2)


@on_ranks(2, fresh=True, seconds=250)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_compiled_model_compiles_once_and_none_of_the_hooks(stage: int) -> None:
    from torch._dynamo.convert_frame import input_codes

    model = sharded(stage, TinyMLP)
    graphs: list[Any] = []
    fast: Any = torch.compile(
        model, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1]
    )
    optimizer, counts = sgd(model), []
    for step in range(7):
        train(fast, optimizer, [features_of(step, 4, 7)])
        counts.append(len(graphs))
    codes = [code() for code in input_codes.seen]
    assert not [code for code in codes if code and "/onefold/" in code.co_filename]
    assert counts[3] == counts[-1] > 0


@slow
@on_ranks(2, fresh=True, seconds=400)
@pytest.mark.parametrize("stage", STAGES)
def test_blocks_compiled_by_inductor_have_the_bits_of_ddp(stage: int) -> None:
    torch._inductor.config.compile_threads = 1  # its pool would outlive the test
    curves = []
    for over in (None, stage):
        inner: Any = built(partial(TinyGPT, depth=2))
        for block in inner.blocks:
            block.forward = torch.compile(block.forward)
        model = ddp(inner) if over is None else onefold.shard(inner, onefold.Recipe.zero(stage))
        curves.append(train(model, sgd(model), batches(3)))
    assert curves[0] == curves[1]


@on_ranks(2)
def test_a_backward_pass_of_a_model_that_is_gone_says_so() -> None:
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(3))
    loss = model(features_of(0, 4, 7)).square().sum()
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="sharded model is gone"):
        loss.backward()


class _Named(nn.Module):
    """Returns a part of its weight in a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(y=self.layer(x), part=self.layer.weight[1:3])


@on_ranks(2)
def test_a_part_of_a_weight_in_an_object_that_a_pass_returns_is_a_copy() -> None:
    torch.manual_seed(0)
    plain = _Named()
    expected = plain.layer.weight.detach()[1:3].clone()
    model = onefold.shard(plain, onefold.Recipe.zero(3))
    found = model(torch.ones(2, 4))
    assert type(found.part.grad_fn).__name__ == "CloneBackward0"
    found.part.square().sum().backward()
    assert found.part.equal(expected)
    onefold.clip_grad_norm_(model, 1.0)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
