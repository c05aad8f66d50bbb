"""Where a model is, over which ranks, and of what it consists: `unsharded`, groups, devices,
buffers, torch.compile.
"""

from __future__ import annotations

import contextlib
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
import virtual
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


# -- groups ----------------------------------------------------------------------------------------


def total(group: Any = None) -> float:
    one = torch.ones(())
    dist.all_reduce(one, group=group)
    return float(one)


@on_ranks(3, fresh=True)
def test_groups_of_a_script_before_and_after_shard_meet() -> None:
    rank, recipe = dist.get_rank(), onefold.Recipe.zero(3, stall_timeout=60.0)
    pair = dist.new_group([0, 1])
    if rank < 2:
        for _ in range(4):  # each makes its communicators after the last one's have gone
            part = onefold.shard(TinyMLP(), recipe, group=pair)
            part(torch.ones(2, 7)).sum().backward()
        assert total(dist.new_group([0, 1], use_local_synchronization=True)) == 2
    model = onefold.shard(TinyMLP(), recipe)
    model(torch.ones(2, 7)).sum().backward()
    if rank == 2:  # some versions of torch count each rank's groups, and need as many on each
        dist.new_group([2], use_local_synchronization=True)
    for members in ([0, 1, 2], [1, 2]):
        group = dist.new_group(members)
        assert rank not in members or total(group) == len(members)


# -- devices ---------------------------------------------------------------------------------------


@on_ranks(2, fresh=True)
@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@pytest.mark.parametrize(
    ("stage", "options", "shards"),
    [
        (3, {"precision": "bf16"}, 1 / 2),
        (3, {"offload_param": "cpu", "offload_optimizer": "cpu"}, 0),
        (1, {}, 3 / 2),  # the whole that is computed with stays
    ],
)
def test_a_model_on_the_host_gets_to_a_device_unit_by_unit(
    stage: int, options: dict[str, Any], shards: float
) -> None:
    virtual.start(seed=0)
    torch.manual_seed(dist.get_rank())  # rank 0's are everybody's
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    model.register_buffer("offset", torch.ones(3))
    plain = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept, before = list(model.parameters()), torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    recipe = onefold.Recipe.zero(stage, **options)
    onefold.shard(model, recipe, device="virtual", units=[str(n) for n in range(8)])
    peak, unit = torch.accelerator.max_memory_allocated() - before, 4 * (128 * 128 + 128)
    assert peak <= 8 * unit * shards + 2 * unit + 2**16
    assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["params"][0] is kept[0]
    assert str(model.offset.device) == "virtual:0"
    assert {p.device.type for p in model.parameters()} == {"virtual" if shards else "cpu"}
    whole = onefold.full_state_dict(model)
    assert dist.get_rank() or not differences(plain, {n: t.cpu() for n, t in whole.items()})


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


# -- buffers ---------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Buffers of all kinds, changed by this rank's data: in place, through `.data`, and by putting
    others in their place.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("codebook", torch.zeros(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("none", None)
        self.register_buffer("strided", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("table", torch.rand(4, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * self.table  # a constant that autograd saves
        with torch.no_grad():
            self.average.data.mul_(0.9).add_(x.mean(0))
            self.codebook = self.codebook + 1j * x[0, :3]
            self.seen += 1
            self.flag.fill_(bool(x[0, 0] > 0))
            self.strided.add_(x[0, 0])
        return y * (1 + self.average)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(2))
        self.same = self.blocks[0]  # under two names

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_those_of_ddp_to_the_bit_after_every_pass(stage: int) -> None:
    found = []
    for over in (None, stage):
        inner: Any = built(Twice)
        if dist.get_rank() == 1:
            inner.blocks[0].average.fill_(5.0)
        recipe = onefold.Recipe.zero(stage, reduce_at="boundary" if stage > 1 else None)
        model = ddp(inner) if over is None else onefold.shard(inner, recipe)
        unsynced: Any = model.no_sync if over is None else partial(onefold.no_sync, model)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        torch.manual_seed(100 + dist.get_rank())

        def look(*outputs: Tensor, inner: Any = inner, seen: Any = seen) -> None:
            seen.extend(t.detach().clone() for t in (*outputs, *inner.buffers()))

        for _ in range(2):
            for micro in range(3):
                with unsynced() if micro < 2 else contextlib.nullcontext():
                    loss = model(torch.randn(4, 8)).square().mean()
                    look(loss)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 1:  # rank 0's are everybody's again before the next pass
                inner.blocks[0].average.data += 1
            with torch.no_grad():
                look(model.eval()(torch.randn(4, 8)))
            model.train()
        look(model(torch.randn(4, 8)))  # its gradients are not asked for
        with contextlib.suppress(RuntimeError):
            model(torch.randn(4, 9))  # raises, on every rank
        look(model(torch.randn(4, 8)))
        found.append(seen)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_ranks(2)
def test_all_buffers_are_one_message_a_pass_that_rank_0_sends() -> None:
    for which in (True, "norms", False):
        model = sharded(make=Twice, sync_buffers=which)
        wanted = sum(
            b.numel() * b.element_size()
            for n, b in model.named_buffers()
            if which is True or (which and ".norm." in n)
        )
        looks.watch(model)
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
        messages = [(unit, n) for _, move, unit, n in looks.moves(model) if move == "state"]
        share = wanted * (dist.get_rank() == 0)
        assert messages == ([("buffers", share)] * 2 if which else [])


@on_ranks(2, fresh=True)
def test_ranks_whose_buffers_differ_stop_with_an_error_that_names_buffers() -> None:
    model = sharded(0, Twice, stall_timeout=3.0)
    if dist.get_rank() == 1:
        model.blocks[1].average = torch.zeros(50)
    said = ""
    try:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
    except (onefold.StallError, RuntimeError) as error:
        said = str(error)
    everybodys: list[Any] = [None, None]
    assert said and (dist.get_rank() or "buffers" in said), (said, everybodys)


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
    looks.say_that_graphs_are_recorded_on("cpu")
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
