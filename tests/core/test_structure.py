"""What becomes of a model: `unsharded`, another default device, buffers, autocast, torch.compile."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

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


# -- unsharded -------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "precision": "bf16"},
        {"stage": 2, "precision": "bf16", "master_dtype": "fp64"},
        {"stage": 3, "shard_group": 2},
        {"stage": 3, "group": 2, "second_copy": True, "gather_codec": "int8"},
    ],
    ids=str,
)
def test_entering_and_leaving_unsharded_changes_no_bit(options: dict[str, Any]) -> None:
    curves = []
    for enter in (False, True):
        model = sharded(**options)
        optimizer, scaler = adamw(model), onefold.GradScaler(model, init_scale=4.0)
        before, curve = dict(model.named_parameters()), []
        for step, batch in enumerate(batches(4)):
            if step == 2 and enter:
                with onefold.unsharded(model) as plain:
                    assert all(type(p) is nn.Parameter for p in plain.parameters())
                    assert all(p is before[n] for n, p in plain.named_parameters())
                    assert optimizer.state[plain.norm.weight]["exp_avg"].shape == (20,)
                    plain.state_dict()
            loss = model(batch) * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            onefold.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            curve += [loss.item(), scaler.get_scale()]
        assert curve[-1] == 2.0
        curves.append(curve)
    assert curves[0] == curves[1]


@on_ranks(2)
@pytest.mark.parametrize("how", ["nothing", "onefold.load", "load_state_dict", "a look"])
@pytest.mark.parametrize("stage", STAGES)
def test_step_counts_in_unsharded_come_from_ranks_that_own_elements(
    stage: int, how: str, folder: Path
) -> None:
    found = []
    for enter in (False, True):
        model = sharded(stage)
        optimizer = adamw(model)
        train(model, optimizer, batches(3))
        if how == "a look":
            _ = [state["step"] for state in optimizer.state.values()]
        elif how != "nothing":
            old, states, weights = model, optimizer.state_dict(), onefold.full_state_dict(model)
            onefold.save(folder / "a", model=old, optimizer=optimizer, overwrite=True)
            model = sharded(stage, seed=1)
            optimizer = adamw(model)
            if how == "onefold.load":
                onefold.load(folder / "a", model=model, optimizer=optimizer)
            else:
                onefold.load_full_state_dict(model, weights if dist.get_rank() == 0 else None)
                optimizer.load_state_dict(states)
        train(model, optimizer, batches(1, 3))
        if enter:
            with onefold.unsharded(model) as plain:
                assert {int(optimizer.state[p]["step"]) for p in plain.parameters()} == {4}
        train(model, optimizer, batches(1, 4))
        found.append(onefold.full_state_dict(model))
    assert not differences(*found)


# -- devices ---------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "gather_codec": "int8", "reduce_codec": "int8"},
        {"stage": 3, "gather_codec": "int4", "reduce_codec": "fp8"},
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
            average = onefold.ema.EMA(model, 0.5)
            seen = train(model, optimizer, inputs[1:2], clip=0.1)
            average.update()
            onefold.save(folder / "saved", model=model, optimizer=optimizer, overwrite=True)
            seen += train(model, optimizer, inputs[2:3])
            onefold.load(folder / "saved", model=model, optimizer=optimizer)
            seen += train(model, optimizer, inputs[3:])
            states = {**average.state_dict(), **onefold.full_state_dict(model)}
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
    curves = []
    for over in (None, stage):
        inner: Any = built(partial(TinyGPT, depth=2))
        for block in inner.blocks:
            block.forward = torch.compile(block.forward)
        model = ddp(inner) if over is None else onefold.shard(inner, onefold.Recipe.zero(stage))
        curves.append(train(model, sgd(model), batches(3)))
    assert curves[0] == curves[1]


@on_ranks(2, fresh=True, seconds=250)
@pytest.mark.parametrize("where", ["'blocks.0'", "the model"])
def test_stage_3_refuses_cuda_graphs_in_the_first_pass(where: str) -> None:
    looks.record_graphs_on("cpu")
    model = sharded(3, partial(TinyGPT, depth=1))
    if where == "the model":
        model = torch.compile(model, mode="reduce-overhead")
    else:
        model.blocks[0].compile(mode="max-autotune")
    with pytest.raises(ValueError) as error:
        model(tokens_of(0)).backward()
    for words in (
        f"{where} was compiled with CUDA graphs",
        "max-autotune-no-cudagraphs",
        "stage 2",
    ):
        assert words in str(error.value)
