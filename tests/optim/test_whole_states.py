"""`optimizer.state_dict()` and `load_state_dict()` are torch's own over whole parameters: saved
anywhere, loaded anywhere, DDP included.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onefold
import onefold.runtime.parts as parts
from moments_runs import Net, close, train, unlike
from ranks import outcomes_of, run_ranks
from zoo import features_of

pytestmark = pytest.mark.one_in(4)


def recipes(ranks: int, folder: str) -> dict[str, dict[str, Any]]:
    """Where state may rest: {name: what Recipe.zero is given}."""
    disk = {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme", "nvme": folder}
    out: dict[str, dict[str, Any]] = {
        "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3},
        "on the host": {"stage": 3, "offload_optimizer": "cpu"}, "on NVMe": disk,
        "on NVMe, stage 0": {**disk, "stage": 0, "offload_param": None},
    }  # fmt: skip
    if ranks == 4:
        out |= {
            "HSDP": {"stage": 3, "shard_group": 2},
            "hybrid": {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
        }
    return out


def sharded(recipe: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return onefold.shard(Net(), onefold.Recipe.zero(stall_timeout=20.0, **recipe))


def optimizer_of(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    decayed, others = (
        [p for n, p in named if ("weight" in n) is wanted] for wanted in (True, False)
    )
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=lr)


def ddp() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    return model, optimizer_of(model)


def train_ddp(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = (
            (model(features_of(10 * step, 8, 19)) - features_of(5 + step, 8, 300)).square().mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved_everywhere(folder: str, names: list[str]) -> tuple[list[str], list[float]]:
    """Train 3 steps under each recipe, save on rank 0 as a script does, go on for 3 steps. All must
    say and do the same.
    """
    parts.CHUNK = 5120  # elements: a weight takes several
    wrong: list[str] = []
    torch_model, torch_optimizer = ddp()
    train_ddp(torch_model, torch_optimizer, 0, 3)
    theirs = copy.deepcopy(torch_optimizer.state_dict())
    if dist.get_rank() == 0:
        torch.save(theirs, f"{folder}/ddp.pt")
        torch.save(torch_model.module.state_dict(), f"{folder}/ddp-weights.pt")
    went_on = train_ddp(torch_model, torch_optimizer, 3, 3)
    losses: list[float] = []
    for name, recipe in recipes(dist.get_world_size(), folder).items():
        if name not in names:
            continue
        model = sharded(recipe)
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        train(model, optimizer, 0, 3)
        weights = onefold.full_state_dict(model)
        state = copy.deepcopy(optimizer.state_dict())
        kept = optimizer.param_groups[0]["initial_lr"]
        if dist.get_rank() == 0 or name == "stage 0":
            for group in state["param_groups"]:
                wrong += [f"{name}: no initial_lr"] * (group.pop("initial_lr", None) != kept)
            wrong += [f"{name}: {line}" for line in unlike(state, theirs, tolerance=1e-4)]
        elif "stage 0" not in name and state["state"]:
            wrong.append(f"{name}: rank {dist.get_rank()} has states {list(state['state'])}")
        if dist.get_rank() == 0:
            at = f"{folder}/ours-{dist.get_world_size()}.pt"
            if not losses:
                torch.save(state, at)
                torch.save(weights, at.replace("ours", "weights"))
            wrong += [f"{name}: {line}" for line in unlike(state, torch.load(at))]
        found = train(model, optimizer, 3, 3)
        wrong += [f"{name}: went on with {found} for {losses}"] * (bool(losses) and found != losses)
        losses = losses or found
        del schedule
    wrong += [f"DDP went on with {went_on}, Onefold with {losses}"] * (not close(went_on, losses))
    return wrong, losses


def loaded_everywhere(folder: str, names: list[str], file: str, losses: list[float]) -> list[str]:
    """Each recipe, and DDP, from the files that rank 0 wrote; and from what rank 0 alone has
    read.
    """
    parts.CHUNK = 5120
    wrong: list[str] = []
    everywhere = torch.load(f"{folder}/{file}.pt")
    weights = torch.load(
        f"{folder}/{file.replace('ours', 'weights') if 'ours' in file else 'ddp-weights'}.pt"
    )
    first_only = everywhere if dist.get_rank() == 0 else {**everywhere, "state": {}}
    exact = "ours" in file
    known = recipes(dist.get_world_size(), folder)
    for number, name in enumerate(name for name in known if name in names):
        recipe = known[name]
        for given in (everywhere, first_only)[number % 2 :][: 1 + (name == "stage 0")]:
            model = sharded(recipe, seed=1)
            onefold.load_full_state_dict(model, weights)
            optimizer = optimizer_of(model, lr=0.7)
            given, before = copy.deepcopy(given), given
            optimizer.load_state_dict(given)
            again = optimizer.state_dict()
            if dist.get_rank() == 0:
                wrong += [f"{name}: {line}" for line in unlike(again, everywhere)]
            found = train(model, optimizer, 3, 3)
            # torch's own load takes the dict's tensors as they are
            if dist.get_world_size() > 1 and "stage 0" not in name:
                wrong += [
                    f"{name}: the dict was changed by training: {line}"
                    for line in unlike(given, before)
                ]
            same = found == losses if exact else close(found, losses)
            wrong += [f"{name}: went on with {found} for {losses}"] * (not same)
    model, optimizer = ddp()
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(everywhere)
    found = train_ddp(model, optimizer, 3, 3)
    wrong += [f"DDP went on with {found}, for {losses}"] * (not close(found, losses))
    return wrong


def test_what_rank_0_saves_goes_on_everywhere_and_so_does_what_ddp_saved(
    tmp_path: Path, sample: Any
) -> None:
    """Stages, tiers and numbers of ranks, HSDP, DDP: equal states, and equal losses afterwards
    (DDP's within rounding).
    """
    first, *others = recipes(4, str(tmp_path))
    names = [first, *sample(others, 3)]
    saved = run_ranks(2, saved_everywhere, str(tmp_path), names)
    assert [wrong for wrong, _ in saved] == [[], []]
    losses = saved[0][1]
    for ranks, file in ((1, "ours-2"), (4, "ours-2"), (2, "ddp")):
        assert (
            run_ranks(ranks, loaded_everywhere, str(tmp_path), names, file, losses, timeout=240)
            == [[]] * ranks
        ), (ranks, file)


class Odd(nn.Module):
    """A number, an empty parameter, one that no gradient reaches, a frozen one, and more ranks than
    some have elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(5, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.inner = nn.Linear(7, 3)
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.inner(x) * self.scale * self.one) * self.wide).float() + self.empty.sum() * 0


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p), "NAdam": lambda p: torch.optim.NAdam(p), "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True), "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p), "ASGD": lambda p: torch.optim.ASGD(p), "Rprop": lambda p: torch.optim.Rprop(p),
    "AMSGrad": lambda p: torch.optim.AdamW(p, amsgrad=True, lr=torch.tensor(1e-3)), "fused": lambda p: torch.optim.Adam(p, fused=True),
}  # fmt: skip


def odd_round_trips() -> list[str]:
    """Every optimizer of torch over odd parameters, made before and after shard(): DDP's dict, key
    by key, there and back.
    """
    wrong: list[str] = []

    def run(model: Any, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            loss = model(features_of(step, 4, 7)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        stage, before = (1, 2, 3)[number % 3], number % 2
        torch.manual_seed(0)
        plain = DistributedDataParallel(Odd(), find_unused_parameters=True)
        theirs = make(plain.parameters())
        run(plain, theirs, 0, 2)
        torch.manual_seed(0)
        model: Any = Odd()
        early = make(model.parameters()) if before else None
        onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0))
        optimizer = (
            early
            if early is not None
            else make(model.named_parameters() if number == 0 else model.parameters())
        )
        run(model, optimizer, 0, 2)
        state, want = optimizer.state_dict(), theirs.state_dict()
        if dist.get_rank() == 0:
            for group in state["param_groups"]:
                names = group.pop("param_names", None)
                wrong += [f"{name}: names {names}"] * (
                    number == 0 and names != [n for n, _ in plain.module.named_parameters()]
                )
            wrong += [
                f"{name}, stage {stage}: {line}" for line in unlike(state, want, tolerance=1e-4)
            ]
            theirs.load_state_dict(copy.deepcopy(state))
        weights = onefold.full_state_dict(model)
        went_on = run(model, optimizer, 2, 2)
        onefold.load_full_state_dict(model, weights)
        optimizer.load_state_dict(state)  # rolled back: rank 0 has the whole, the others nothing
        again = run(model, optimizer, 2, 2)
        wrong += [f"{name}, stage {stage}: rolled back to {again}, before {went_on}"] * (
            again != went_on
        )
        optimizer.load_state_dict(copy.deepcopy(want))  # DDP's, on every rank
        theirs.load_state_dict(copy.deepcopy(want))  # which gives numbers the parameter's dtype
        back, want = optimizer.state_dict(), theirs.state_dict()
        if dist.get_rank() == 0:
            for group in back["param_groups"]:
                group.pop("param_names", None)
            wrong += [f"{name}, stage {stage}, from DDP: {line}" for line in unlike(back, want)]
    return wrong


def test_every_optimizer_of_torch_says_what_it_says_under_ddp_of_odd_parameters_too() -> None:
    assert run_ranks(3, odd_round_trips, timeout=240) == [[]] * 3


FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"moments": "int8"}, "int4 on NVMe": {"moments": "int4", "offload_optimizer": "nvme"},
    "fp8 on the host": {"moments": "fp8", "offload_optimizer": "cpu"}, "bf16": {"moments": "bf16"},
    "bf16 compute": {"precision": "bf16"}, "bf16 masters": {"precision": "bf16", "master_dtype": "bf16"},
}  # fmt: skip


def formats(folder: str, names: list[str]) -> list[str]:
    """Moments at rest in few bits, masters in 16 bits: torch's names and dtypes
    come out, the same training goes on.
    """
    parts.CHUNK = 5120
    wrong: list[str] = []
    whole = {
        n: {"step": torch.Size([]), "exp_avg": p.shape, "exp_avg_sq": p.shape}
        for n, p in enumerate(Net().parameters())
    }
    for name in names:
        recipe = FORMATS[name] | ({"nvme": folder} if "NVMe" in name else {})
        states: list[Any] = []
        for stage in (0, 1, 3) if name == "int8" else (0, 3):
            model = sharded({**recipe, "stage": stage})
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            train(model, optimizer, 0, 2)
            state, weights = copy.deepcopy(optimizer.state_dict()), onefold.full_state_dict(model)
            went_on = train(model, optimizer, 2, 2)
            if dist.get_rank() == 0:
                low = torch.bfloat16 if name == "bf16 masters" else torch.float32
                shapes = {
                    n: {key: value.shape for key, value in found.items()}
                    for n, found in state["state"].items()
                }
                dtypes = {
                    v.dtype
                    for found in state["state"].values()
                    for k, v in found.items()
                    if k != "step"
                }
                states.append(copy.deepcopy(state))
                lines = unlike(shapes, whole) + unlike(state, states[0])
                lines += unlike(state["param_groups"][0]["params"], list(whole)) + [f"{dtypes}"] * (
                    dtypes != {low}
                )
                wrong += [f"{name}, stage {stage}: {line}" for line in lines]
            model = sharded({**recipe, "stage": stage}, seed=1)
            onefold.load_full_state_dict(model, weights)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
            objects = [state]
            if stage == 1 or name == "int4 on NVMe":
                dist.broadcast_object_list(objects)  # every rank has read the file
            optimizer.load_state_dict(copy.deepcopy(objects[0]))
            found = train(model, optimizer, 2, 2)
            wrong += [f"{name}, stage {stage}: went on with {found} for {went_on}"] * (
                found != went_on
            )
    return wrong


def test_few_bits_and_16_bits_come_out_as_torchs_own_states_and_go_back_bit_by_bit(
    tmp_path: Path, sample: Any
) -> None:
    pytest.importorskip("torchao", reason="the formats are torchao's: pip install onefold[lowbit]")
    names = sample(FORMATS, 3)
    assert run_ranks(2, formats, str(tmp_path), names, timeout=240) == [[], []]


def on_rank_0_alone(call: str) -> None:
    model = onefold.shard(Net(), onefold.Recipe.zero(3, stall_timeout=2.0))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0, 1)
    state = onefold.optim.local_state_dict(optimizer)
    if dist.get_rank() == 0:
        optimizer.state_dict() if call == "state_dict" else optimizer.load_state_dict(state)
    train(model, optimizer, 1, 1)


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_a_state_dict_on_rank_0_alone_is_an_error_that_names_the_call(call: str) -> None:
    first, second = outcomes_of(2, on_rank_0_alone, call, timeout=60)
    assert first.error == second.error == "StallError", (first, second)
    assert (
        f"optimizer.{call}() is a collective on this model: call it on every rank" in first.message
    ), first.message
    assert (
        f"rank 0: waiting in control of unit '(optimizer.{call}(), which every rank must call)'"
        in second.message
    ), second.message
