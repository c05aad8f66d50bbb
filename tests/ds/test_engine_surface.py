"""An engine from its JSON to its last step: beside DDP wherever its states rest, with optimizers and
schedules of all kinds, and what scripts ask of it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import looks
import onefold
from ds.engines import (
    STAGES,
    adam,
    batch,
    json_of,
    loss_of,
    made,
    masters,
    served,
    train,
    warnings_of,
)
from on_ranks import on_ranks
from reference import adamw, built, differences, weights
from zoo import TinyMLP

CPU, NVME = ({"device": "cpu", "pin_memory": True}, {"device": "nvme", "nvme_path": "FOLDER"})
#: {what a file says of "zero_optimization": (the section, stages, where something rests beside the
#: device)}
TIERS: dict[str, tuple[dict[str, Any], tuple[int, ...], set[str]]] = {
    "the device": ({}, STAGES, set()),
    "the host": ({"offload_optimizer": CPU}, (0, 2), {"host"}),
    "half of it on the host": ({"offload_optimizer": {**CPU, "ratio": 0.5}}, (1, 3), {"host"}),
    "NVMe": ({"offload_optimizer": {**NVME, "pipeline_read": True}, "sub_group_size": 65536}, (1,), {"nvme"}),
    "parameters too": ({"offload_optimizer": CPU, "offload_param": CPU}, (3,), {"host"}),
    "everything on NVMe": ({"offload_optimizer": NVME, "offload_param": NVME}, (3,), {"nvme"}),
}  # fmt: skip


def decaying() -> dict[str, Any]:
    params = {"warmup_max_lr": 0.02, "warmup_num_steps": 2, "total_num_steps": 9}
    return {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.2,
        "optimizer": adam(weight_decay=0.1),
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }


def under_ddp() -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Weights, losses and norms of three steps by the rates of iterations -1, 0 and 1."""
    model, losses, norms = DistributedDataParallel(built(TinyMLP)), [], []
    optimizer = adamw(model, weight_decay=0.1, eps=1e-8)
    for step, rate in enumerate((0.0, 0.0, 0.02)):
        optimizer.param_groups[0]["lr"] = rate
        for index in (2 * step, 2 * step + 1):
            model.require_backward_grad_sync = index % 2 == 1
            loss = loss_of(model(batch(index)))
            (loss / 2).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), losses, norms


def train_as_ddp(engine: Any, expected: tuple[dict[str, Tensor], list[float], list[float]]) -> None:
    state, losses, norms = expected
    assert min(norms) > 0.2, "clipping acts"
    for index, theirs in enumerate(losses):
        loss = loss_of(engine(batch(index)))
        assert torch.equal(engine.backward(loss), loss / 2)
        assert engine.is_gradient_accumulation_boundary() == (index % 2 == 1)
        engine.step()
        assert engine.was_step_applied() == (index % 2 == 1)
        assert loss.item() == pytest.approx(theirs, abs=2e-6)
        if index % 2:
            assert engine.get_global_grad_norm() == pytest.approx(norms[index // 2], rel=1e-5)
    assert not differences(state, weights(engine.module), 1e-5, 2e-6)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (3, 6, 0)
    assert engine.sparse_tensor_module_names == set()
    assert engine.global_samples == 6 * 4 * 2 and engine.get_lr() == pytest.approx([0.02])


@on_ranks(2)
@pytest.mark.parametrize("where", TIERS)
def test_a_json_trains_as_ddp_wherever_states_rest(where: str, folder: Path) -> None:
    zero, stages, tiers = TIERS[where]
    expected = under_ddp()
    disk, file = folder / "disk", folder / f"ds-{dist.get_rank()}.json"
    disk.mkdir(exist_ok=True)
    for stage in stages:
        text = json.dumps(json_of(stage, zero, **decaying()))
        file.write_text(text.replace("FOLDER", str(disk)))
        engine = onefold.initialize(model=built(TinyMLP), config=str(file))[0]
        train_as_ddp(engine, expected)
        found = looks.held(engine.module, engine.optimizer)
        held = {tier: sum(found.get(tier, {}).values()) for tier in ("host", "nvme")}
        assert {tier for tier, nbytes in held.items() if nbytes > 1000} == tiers, found
        del engine
        gc.collect()
    dist.barrier()
    assert not list(disk.iterdir())


@on_ranks(2)
def test_an_optimizer_may_be_made_before_or_by_a_function() -> None:
    expected, options = under_ddp(), {"weight_decay": 0.1, "eps": 1e-8}
    for stage in (1, 3):
        model = built(TinyMLP)
        early = adamw(model, **options)
        for given in (early, lambda ps: torch.optim.AdamW(ps, lr=0.01, **options)):
            engine, optimizer, _, _ = onefold.initialize(
                model=model, optimizer=given, config=json_of(stage, **decaying())
            )
            assert given is not early or optimizer is early
            train_as_ddp(engine, expected)
            model = built(TinyMLP)


@on_ranks(2)
def test_model_parameters_may_be_groups_over_a_part_of_the_model() -> None:
    for stage in (0, 2, 3):
        model = built(TinyMLP)
        groups = [{"params": list(model.leave.parameters()), "lr": 0.5}]
        engine, optimizer, _, _ = served().initialize(
            model=model, model_parameters=groups, config=json_of(stage, optimizer=adam())
        )
        assert optimizer.param_groups[0]["lr"] == 0.5 and engine.get_lr() == [0.5]
        before = weights(model)
        train(engine, range(1))
        engine(batch(1))
        assert all(p.grad is None for p in model.parameters()), "also outside the optimizer"
        moved = {n for n, value in weights(model).items() if not torch.equal(value, before[n])}
        assert moved == {"leave.weight", "leave.bias"}


@on_ranks(2)
def test_without_gradient_clipping_a_json_clips_to_norm_one() -> None:
    config = {k: v for k, v in json_of(2).items() if k != "gradient_clipping"}
    for given, limit in (({}, 1.0), ({"gradient_clipping": 0}, 0.0)):
        engine = served().initialize(model=built(TinyMLP), config={**config, **given})[0]
        before = masters(engine)
        engine.backward(loss_of(engine(batch(0))) * 100)
        engine.step()
        steps = [(a - b).square().sum() for a, b in zip(before, masters(engine), strict=True)]
        norm = engine.get_global_grad_norm()
        moved = float(torch.stack(steps).sum().sqrt())
        assert norm > 5 and moved == pytest.approx(0.1 * (limit or norm), rel=1e-4)


# -- optimizers by name ----------------------------------------------------------------------------

MUON = {"lr": 1e-2, "muon_lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9]}


def embedded() -> Any:
    """Token ids -> scores; one of the hidden layers is frozen."""
    layers: dict[str, nn.Module] = {
        "embed": nn.Embedding(16, 8),
        "first": nn.Linear(8, 12),
        "fixed": nn.Linear(12, 12).requires_grad_(False),
        "second": nn.Linear(12, 8),
        "lm_head": nn.Linear(8, 16, bias=False),
    }
    return nn.Sequential(OrderedDict(layers))


def scores_off(model: nn.Module, index: int) -> Tensor:
    ids = (torch.arange(6) * 5 + index + 3 * dist.get_rank()) % 16
    return nn.functional.cross_entropy(model(ids), ids.roll(1))


@on_ranks(2)
def test_muon_of_the_json_steps_hidden_matrices_as_torchs_and_the_rest_by_adamw() -> None:
    plain = DistributedDataParallel(built(embedded))
    trained = {n: p for n, p in plain.module.named_parameters() if p.requires_grad}
    hidden = {"first.weight", "second.weight"}
    rest = [p for name, p in trained.items() if name not in hidden]
    optimizers = [
        torch.optim.Muon([trained[n] for n in hidden], lr=0.05, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.9), eps=1e-10, weight_decay=0.1),
    ]
    for index in range(3):
        scores_off(plain, index).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for stage, tier in ((0, "none"), (2, "cpu"), (3, "none")):
        zero = {"offload_optimizer": {"device": tier}}
        engine = made(stage, built(embedded), zero, optimizer={"type": "Muon", "params": MUON})
        for index in range(3):
            engine.backward(scores_off(engine, index))
            engine.step()
        assert not differences(weights(plain), weights(engine.module), 1e-4, 1e-5), stage
        said = pytest.raises(NotImplementedError, match="on the rank that steps this matrix")
        with said if stage else contextlib.nullcontext():  # on every rank
            served().utils.safe_get_full_optimizer_state(engine.first.weight, "momentum_buffer")


# -- schedules -------------------------------------------------------------------------------------

WARMUP = {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
RATES = [
    ("WarmupLR", WARMUP, [0, 0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4]),
    ("WarmupLR", {"warmup_num_steps": 4}, [0, 0, *(math.log(i) / math.log(4) for i in (2, 3)), 1, 1, 1, 1]),
    ("WarmupDecayLR", {**WARMUP, "total_num_steps": 6}, [0, 0, 0.1, 0.2, 0.3, 0.4, 0.2, 0]),
    ("WarmupCosineLR", {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 4, "cos_min_ratio": 0.2},
     [0, 0, 0.5, 0.6, 0.2, 0.2, 0.2, 0.2]),
    ("StepLR", {"step_size": 2, "gamma": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]),
]  # fmt: skip


@on_ranks(1)
@pytest.mark.parametrize(("name", "params", "rates"), RATES)
def test_schedules_have_deepspeeds_rates_and_go_on_from_their_state(
    name: str, params: dict[str, Any], rates: list[float]
) -> None:
    def scheduled() -> Any:
        return made(1, optimizer=adam(lr=1.0, eps=1.0), scheduler={"type": name, "params": params})

    engine, again = scheduled(), scheduled()
    for index, rate in enumerate(rates):
        assert engine.get_lr() == pytest.approx([rate]), index
        train(engine, range(1))
    again.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict())
    assert again.lr_scheduler.get_last_lr() == pytest.approx(engine.lr_scheduler.get_last_lr())


@on_ranks(1)
def test_a_schedule_may_be_an_object_or_a_function_and_wins_over_the_json() -> None:
    config = json_of(0, scheduler={"type": "WarmupLR", "params": {}})
    make, model = torch.optim.lr_scheduler.StepLR, built(TinyMLP)
    own = adamw(model)
    step = make(own, 30)
    for given, optimizer in ((step, own), (lambda o: make(o, 30), None)):
        found = served().initialize(
            model=model, config=config, optimizer=optimizer, lr_scheduler=given
        )[3]
        assert found is given or isinstance(found, make)
        model = built(TinyMLP)
    with pytest.raises(ValueError, match="over an optimizer that was"):
        served().initialize(model=model, config=config, lr_scheduler=make(adamw(model), 30))
    for steps in (None, -5, 2.5, math.inf):
        with pytest.raises(ValueError, match=f"warmup_num_steps={steps}: expected a whole number"):
            served().runtime.lr_schedules.WarmupLR(adamw(model), warmup_num_steps=steps)


# -- what scripts ask of an engine -----------------------------------------------------------------


@on_ranks(2)
def test_sizes_data_and_attributes_of_an_engine() -> None:
    data = [batch(i, 0)[0] for i in range(17)]
    config = json_of(3, gradient_accumulation_steps=2, steps_per_print=5)
    engine, _, loader, _ = served().initialize(
        model=built(TinyMLP), config=config, training_data=data
    )
    assert [x.shape for x in loader] == [(4, 7), (4, 7), (1, 7)]
    assert engine.get_batch_info() == (16, 4, 2) and engine.zero_optimization_stage() == 3
    assert engine.steps_per_print() == 5
    engine.set_train_batch_size(32)
    assert engine.get_batch_info() == (32, 4, 4)
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (24, 3, 4)
    with pytest.raises(ValueError, match="train_batch_size=7, but 3 x 1 x 2"):
        engine.set_train_batch_size(7)
    rank, numbers = dist.get_rank(), [torch.tensor(float(i)) for i in range(8)]
    own = [[rank, rank + 2.0], [rank + 4.0, rank + 6.0]]
    assert [b.tolist() for b in engine.deepspeed_io(numbers, 2, route="eval")] == own
    assert engine.blocks is engine.module.blocks
    with pytest.raises(AttributeError, match="its TinyMLP has"):
        _ = engine.nothing


@on_ranks(2)
def test_save_16bit_model_writes_the_whole_model(folder: Path) -> None:
    expected = {n: v.bfloat16() for n, v in built(TinyMLP).state_dict().items()}
    for stage in (0, 3):
        model, place = built(TinyMLP), folder / str(stage)
        model.blocks.requires_grad_(False)
        engine = made(stage, model, bf16={"enabled": True})
        assert engine.save_16bit_model(place)
        assert engine.save_16bit_model(place, "part.bin", exclude_frozen_parameters=True)
        assert not differences(expected, torch.load(place / "pytorch_model.bin"))
        names = torch.load(place / "part.bin").keys()
        assert names == {n for n in expected if not n.startswith("blocks")}
    with pytest.raises(onefold.CheckpointError, match=r"\(rank 0"):
        engine.save_16bit_model("/dev/null/nowhere")


class Writes(TinyMLP):
    """It has a `save_pretrained` that asks for the state dict as often as it writes."""

    def save_pretrained(self, folder: Path, times: int, state_dict: Any = None) -> None:
        for time in range(times):
            state = self.state_dict() if state_dict is None else state_dict
            torch.save(state, folder / f"{dist.get_rank()}.{time}.pt")


@on_ranks(2)
def test_save_pretrained_of_any_class_writes_the_whole_model_on_rank_0_only(folder: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    kind = type("OfHub", (TinyMLP, hub.PyTorchModelHubMixin), {})
    expected = built(TinyMLP).state_dict()
    for stage in (1, 3):
        module: Any = made(stage, built(Writes)).module
        state = (onefold.full_state_dict(module),) if stage == 3 else ()
        module.save_pretrained(folder, 2, *state)
        dist.barrier()
        assert {file.name for file in folder.glob("*.pt")} == {"0.0.pt", "0.1.pt"}
        assert not differences(expected, torch.load(folder / "0.1.pt"))
    # They are the class's own again without the engine, and at stage 3
    module = onefold.unshard(made(2, built(Writes)).module)
    assert not differences(expected, module.state_dict())
    (folder / "own").mkdir(exist_ok=True)
    module.save_pretrained(folder / "own", 1)
    assert (folder / "own" / f"{dist.get_rank()}.0.pt").exists()
    with pytest.raises(RuntimeError, match="full_state_dict"):
        made(3, made(2, module).module).module.state_dict()
    module = made(1, built(kind)).module
    module.save_pretrained(folder / "hub")
    dist.barrier()
    assert not differences(expected, kind.from_pretrained(folder / "hub").state_dict())


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(json_of(3, wandb={"enabled": True}, odd=1)))
    with warnings_of() as said:
        engine, optimizer, loader, schedule = onefold.initialize(
            model=built(TinyMLP), config=str(file)
        )
    text = "\n".join(said)
    assert text.count("wandb") == 1 and text.count("unknown, without effect: odd") == 1
    assert engine.optimizer is optimizer and loader is None and schedule is None
    engine.backward(loss_of(engine(batch(0, 0))))
    engine.step()
    bare, *others = onefold.initialize(model=built(TinyMLP).eval(), config={"train_batch_size": 4})
    assert others == [None, None, None] and bare(batch(0, 0)).shape == (4, 5)
    with pytest.raises(RuntimeError, match="needs an optimizer"):
        bare.backward(loss_of(bare(batch(0, 0))))
