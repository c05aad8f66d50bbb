"""`engine.load_checkpoint` with parts of a checkpoint, and the whole model in fp32 from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onefold.checkpoint import CheckpointError
from onefold.integrations.deepspeed.names import access, gathered, init, whole_model
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks

CASES = [(0, None), (1, None), (2, "cpu"), (3, None), (3, "cpu")]


class Net(nn.Module):
    """An odd number of elements, a tied weight, a frozen layer and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)
        self.register_buffer("seen", torch.full((), float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def config(stage: int, tier: str | None, precision: str | None) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": tier or "none"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
        "gradient_clipping": 0.0,
        **({precision: {"enabled": True}} if precision else {}),
    }


def made(stage: int, tier: str | None, precision: str | None, seed: int) -> Any:
    given = config(stage, tier, precision)
    with init.Init(config_dict_or_path=given, enabled=stage == 3):
        model = Net(seed)
    return initialize(model=model, config=given)[0]


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(torch.full((2, 3), 1.0 + step + dist.get_rank())))
        engine.step()


def masters(engine: Any) -> list[torch.Tensor]:
    """Whole master weights, of frozen parameters too."""
    return [p.onefold.gather().float().clone() for p in engine.module.parameters()]


def moments(engine: Any) -> list[torch.Tensor]:
    found = [access.safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters()]
    return [state for state in found if state is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def load_parts(stage: int, tier: str | None, precision: str | None, folder: str) -> None:
    first = made(stage, tier, precision, seed=0)
    train(first, 3)
    first.save_checkpoint(folder, client_state={"epoch": 7})
    saved, states, rate = masters(first), moments(first), first.get_lr()
    assert len(states) == 5

    whole = made(stage, tier, precision, seed=1)
    where, client = whole.load_checkpoint(folder)
    assert Path(where).name == "global_step3" and client == {"epoch": 7}
    assert same(masters(whole), saved) and same(moments(whole), states)
    assert (whole.global_steps, whole.get_lr()) == (3, rate)
    assert float(whole.module.seen) == 0.0

    module = made(stage, tier, precision, seed=1)
    train(module, 1)
    old = moments(module)
    where, client = module.load_checkpoint(folder, load_module_only=True)
    assert client == {"epoch": 7}
    assert same(masters(module), saved) and same(moments(module), old)
    assert module.global_steps == 1 and module.get_lr() != rate

    fresh = made(stage, tier, precision, seed=1)
    fresh.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert same(masters(fresh), saved) and not moments(fresh)
    assert fresh.global_steps == 3 and fresh.get_lr() != rate

    # What was loaded trains on as the one that was saved does
    train(first, 1)
    train(whole, 1)
    assert same(masters(first), masters(whole)) and same(moments(first), moments(whole))
    # A checkpoint may be loaded by the engine that saved it
    first.load_checkpoint(folder)
    assert same(masters(first), saved) and same(moments(first), states)
    first.save_checkpoint(folder, tag="again")
    assert (Path(folder) / "latest").read_text() == "again"


def of_all_cases(folder: str, precision: str | None) -> None:
    for stage, tier in CASES:
        load_parts(stage, tier, precision, f"{folder}/{stage}-{tier}")


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_parts_of_a_checkpoint_load_and_leave_the_others(
    tmp_path: Path, precision: str | None
) -> None:
    run_ranks(2, of_all_cases, str(tmp_path), precision)


# -- the whole model in fp32 -----------------------------------------------------------------------


def whole_in_fp32(stage: int, precision: str | None, folder: str) -> None:
    engine = made(stage, None, precision, seed=0)
    train(engine, 3)
    engine.save_checkpoint(folder)
    dist.barrier()
    saved = masters(engine)
    names = [name for name, _ in engine.module.named_parameters()]
    expected = dict(zip(names, saved, strict=True))

    def check(state: dict[str, torch.Tensor]) -> None:
        for name, value in expected.items():
            assert torch.equal(state[name].float(), value), name
        assert torch.equal(state["layers.3.weight"].float(), expected["layers.0.weight"])

    plain = Net(seed=2)
    assert whole_model.load_state_dict_from_zero_checkpoint(plain, folder) is plain
    check(plain.state_dict())
    check(whole_model.get_fp32_state_dict_from_zero_checkpoint(folder))

    # Into the engine's own module, after more steps, on every rank
    train(engine, 1)
    assert not same(masters(engine), saved)
    loaded = whole_model.load_state_dict_from_zero_checkpoint(engine.module, folder)
    assert loaded is engine.module and same(masters(engine), saved)
    other = made(3 - stage, None, precision, seed=2)
    whole_model.load_state_dict_from_zero_checkpoint(other.module, folder)
    assert same(masters(other), saved)
    train(other, 3)  # the first two steps have a rate of 0
    assert not same(masters(other), saved)

    # Inside GatheredParameters: whole and in fp32 there, and gone afterwards
    train(engine, 1)
    before = masters(engine)
    with gathered.GatheredParameters(engine.module.parameters()):
        inside = whole_model.load_state_dict_from_zero_checkpoint(engine.module, folder)
        state = inside.state_dict()
        if state:
            check(state)
            assert {str(state[name].dtype) for name in names} == {"torch.float32"}
    assert same(masters(engine), before)
    train(engine, 1)
    params = list(engine.module.parameters())
    if params[0].onefold.sharded:
        with gathered.GatheredParameters(params[0]), pytest.raises(RuntimeError, match="1 of 7"):
            whole_model.load_state_dict_from_zero_checkpoint(engine.module, folder)
    with pytest.raises(CheckpointError):
        whole_model.load_state_dict_from_zero_checkpoint(engine.module, f"{folder}/none")


def wholes(folder: str, precision: str | None) -> None:
    for stage in range(4):
        whole_in_fp32(stage, precision, f"{folder}/{stage}")


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_an_engines_module_takes_the_whole_model_of_a_folder(
    tmp_path: Path, precision: str | None
) -> None:
    run_ranks(2, wholes, str(tmp_path), precision)
