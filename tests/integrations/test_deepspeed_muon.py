"""`"type": "Muon"` in a DeepSpeed configuration: which parameters it steps, with which options, and
once in a step.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import _muon

from onefold.integrations.deepspeed import muon
from onefold.integrations.deepspeed.config import read_deepspeed
from onefold.integrations.deepspeed.config.classes import optimizer_class
from onefold.integrations.deepspeed.names import access
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks

PARAMS = {"lr": 1e-2, "muon_lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9]}
STEPS, ACCUMULATION = 3, 2


class Net(nn.Module):
    """An embedding, hidden layers of which one is frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 8)])
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.layers[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.cross_entropy(self.lm_head(x), ids.roll(1))


def config(stage: int, tier: str = "none", **params: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": tier}},
        "optimizer": {"type": "Muon", "params": {**PARAMS, **params}},
        "gradient_clipping": 0.0,
    }


def batch(index: int) -> torch.Tensor:
    return (torch.arange(6) * 5 + index + 3 * dist.get_rank()) % 16


def trained(engine: Any, first: int, steps: int) -> None:
    for index in range(first * ACCUMULATION, (first + steps) * ACCUMULATION):
        engine.backward(engine(batch(index)))
        engine.step()


def masters(engine: Any) -> list[torch.Tensor]:
    return [p.onefold.gather().float().clone() for p in engine.module.parameters()]


def by_hand(reduces_each: bool) -> list[torch.Tensor]:
    """torch's two optimizers on the mean of the ranks' gradients. `reduces_each`: of each
    micro-batch, as stages 2 and 3 take it.
    """
    net = Net()
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    hidden = [named["layers.0.weight"], named["layers.2.weight"]]
    rest = [p for p in named.values() if all(p is not each for each in hidden)]
    options = {"weight_decay": 0.1}
    two = [
        torch.optim.Muon(hidden, lr=0.05, momentum=0.9, **options),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.9), eps=1e-10, fused=True, **options),
    ]
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in named.values()]
        for index in range(step * ACCUMULATION, (step + 1) * ACCUMULATION):
            (net(batch(index)) / ACCUMULATION).backward()
            if reduces_each or index % ACCUMULATION == ACCUMULATION - 1:
                for p, total in zip(named.values(), sums, strict=True):
                    dist.all_reduce(p.grad)
                    total += p.grad / dist.get_world_size()
                    p.grad = None
        for p, total in zip(named.values(), sums, strict=True):
            p.grad = total
        for optimizer in two:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def in_ranks(folder: str) -> dict[str, Any]:
    """{run: (masters, iterations of the last step over all ranks)}"""
    own, counted = _muon._zeropower_via_newtonschulz, [0]

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return own(*args)

    out: dict[str, Any] = {"by hand": {each: by_hand(each) for each in (False, True)}}
    engines = {}
    for stage, tier in ((0, "none"), (1, "none"), (2, "cpu"), (3, "none")):
        engine = initialize(model=Net(), config=config(stage, tier))[0]
        trained(engine, 0, STEPS - 1)
        if stage == 3:
            engine.save_checkpoint(folder)
        _muon._zeropower_via_newtonschulz, counted[0] = counting, 0
        trained(engine, STEPS - 1, 1)
        _muon._zeropower_via_newtonschulz = own
        total = torch.tensor(counted[0])
        dist.all_reduce(total)
        out[f"{stage} {tier}"] = masters(engine), int(total)
        engines[stage] = engine
    names = {id(p): name for name, p in engines[0].module.named_parameters()}
    states = engines[0].optimizer.state
    out["states"] = {names[id(p)]: sorted(state) for p, state in states.items()}
    momentum = access.safe_get_full_optimizer_state(
        engines[3].module.layers[0].weight, "momentum_buffer"
    )
    assert momentum.shape == (12, 8)
    again = initialize(model=Net(), config=config(2))[0]
    again.load_checkpoint(folder)
    trained(again, STEPS - 1, 1)
    out["again"] = masters(again), 0
    return out


def test_muon_is_that_of_torch_at_each_stage_once_a_step_beside_frozen_weights(
    tmp_path: Path,
) -> None:
    found = run_ranks(2, in_ranks, str(tmp_path))[0]
    states = found.pop("states")
    wanted = found.pop("by hand")
    for name, (weights, _) in found.items():
        theirs = wanted[not name.startswith(("0", "1"))]
        assert all(map(torch.equal, weights, theirs)), name
        for p, weight in zip(Net().parameters(), weights, strict=True):
            assert torch.equal(p, weight) != p.requires_grad, name
    # Two hidden matrices are trained. At stage 0 each of the two ranks steps both
    counts = {name: count for name, (_, count) in found.items() if name != "again"}
    assert counts == {"0 none": 4, "1 none": 2, "2 cpu": 2, "3 none": 2}
    muons = {name for name, keys in states.items() if keys == ["momentum_buffer"]}
    assert muons == {"layers.0.weight", "layers.2.weight"}
    assert states["embed.weight"] == states["lm_head.weight"] == ["exp_avg", "exp_avg_sq", "step"]


def options_of(model: nn.Module, parameters: list[Any], **params: Any) -> dict[str, Any]:
    """{name of a parameter: its group} as the configuration makes it."""
    given = {"optimizer": {"type": "muon", "params": params}, "train_batch_size": 2}
    read = read_deepspeed(given, 1)
    assert read.optimizer is not None
    made = muon.make(model, parameters, read.optimizer.params)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in made.param_groups for p in group["params"]}


def test_options_are_those_of_the_group_then_of_the_half_then_of_the_file() -> None:
    net = Net()
    found = options_of(net, list(net.parameters()))
    assert not {"layers.1.weight", "layers.1.bias"} & found.keys()
    matrix, table = found["layers.0.weight"], found["embed.weight"]
    assert (matrix["use_muon"], matrix["lr"], matrix["momentum"]) == (True, 0.02, 0.95)
    assert (table["use_muon"], table["lr"], table["eps"]) == (False, 3e-4, 1e-10)
    assert table["betas"] == (0.9, 0.95) and table["fused"]
    assert matrix["weight_decay"] == table["weight_decay"] == 0.0

    net.layers[0].weight.use_muon = False  # type: ignore[assignment]
    layers, others = list(net.layers.parameters()), [net.embed.weight, net.lm_head.weight]
    groups = [{"params": layers, "weight_decay": 0.0}, {"params": others, "lr": 0.5}]
    found = options_of(
        net, groups, lr=1e-2, adam_lr=1e-3, weight_decay=0.1, adam_w_mode=False, torch_adam=True
    )
    assert [found[f"layers.{i}.weight"]["use_muon"] for i in (0, 2)] == [False, True]
    assert found["layers.0.weight"]["lr"] == 1e-3 and found["layers.2.weight"]["lr"] == 1e-2
    assert found["embed.weight"]["lr"] == 0.5 and found["embed.weight"]["weight_decay"] == 0.1
    assert found["layers.2.weight"]["weight_decay"] == 0.0
    assert (
        not found["embed.weight"]["decoupled_weight_decay"] and not found["embed.weight"]["fused"]
    )


def test_what_muon_cannot_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.layers[0].bias.use_muon = True  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"'layers.0.bias' has use_muon=True and the shape \(12,\)"
    ):
        options_of(net, list(net.parameters()))
    with caplog.at_level(logging.WARNING, "onefold"):
        options_of(nn.ModuleDict({"conv": (conv := nn.Conv1d(2, 3, 3))}), list(conv.parameters()))
    assert "AdamW steps 1 parameters of more than two dimensions (conv.weight)" in caplog.text
    with pytest.raises(NotImplementedError, match="per_head_muon=true"):
        options_of(Net(), [], per_head_muon=True)
    with pytest.raises(
        ValueError, match="ns_methd: there is no such key; did you mean 'ns_method'"
    ):
        options_of(Net(), [], ns_methd="gram")


def test_adafactor_may_be_named_and_what_looks_at_all_parameters_may_not() -> None:
    def given(name: str, **params: Any) -> dict[str, Any]:
        return {"optimizer": {"type": name, "params": params}, "train_batch_size": 2}

    found = read_deepspeed(given("adafactor", lr=1e-2, eps=[1e-6, 1e-3]), 1).optimizer
    assert found is not None and found.name == "Adafactor"
    made = optimizer_class("Adafactor")(Net().parameters(), **found.params)
    assert made.defaults["eps"] == (1e-6, 1e-3) and made.defaults["lr"] == 1e-2
    for name, said in (("LBFGS", "looks at all parameters"), ("Lamb", "not part of torch")):
        with pytest.raises(ValueError, match=said):
            read_deepspeed(given(name), 1)


def test_states_on_a_disk_are_refused(tmp_path: Path) -> None:
    given = config(1, "nvme")
    given["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path)
    with pytest.raises(ValueError, match="with states on NVMe: Muon steps whole matrices"):
        initialize(model=Net(), config=given)
