"""What `optimizer.state` shows between steps: the whole parameter's shape and the right numbers, on
every rank, also after a load, a freeze or a change of the model's structure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.integrations.deepspeed import initialize
from ranks import run_ranks
from zoo import TinyGPT, tokens_of

LOADERS = (
    "onefold.load",
    "dcp.load",
    "load_state_dict",
    "load_local_state_dict",
    "load_checkpoint",
)


def made(stage: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, stall_timeout=20.0))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(tokens_of(10 * step + dist.get_rank())).backward()
        optimizer.step()


def shown(optimizer: Any, model: Any) -> dict[str, Any]:
    """{parameter: (keys, shapes, step, norm of its moment)}, read by the same code on every rank."""
    out = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        out[name] = (
            list(state),
            [tuple(v.shape) for v in state.values()],
            float(state["step"]) if "step" in state else None,
            state["exp_avg"].norm().item() if "exp_avg" in state else None,
        )
    return out


def engine_over(stage: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    return initialize(model=TinyGPT(), config=config)[0]


def loaded(stage: int, loader: str, folder: str, before: int) -> list[str]:
    """Load into a model whose optimizer has taken `before` steps, and look at once."""
    import torch.distributed.checkpoint as dcp

    if loader == "load_checkpoint":
        engine = engine_over(stage, 0)
        for step in range(3):
            engine.backward(engine(tokens_of(10 * step + dist.get_rank())))
            engine.step()
        engine.save_checkpoint(folder)
        wanted = shown(engine.optimizer, engine.module)
        again = engine_over(stage, 1)
        for step in range(before):
            again.backward(again(tokens_of(step)))
            again.step()
        again.load_checkpoint(folder)
        found = shown(again.optimizer, again.module)
    else:
        model, optimizer = made(stage, 0)
        train(model, optimizer, 0, 3)
        wanted = shown(optimizer, model)
        onefold.save(f"{folder}/a", model=model, optimizer=optimizer)
        dcp.save(onefold.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/b")
        states = optimizer.state_dict()
        local = onefold.optim.local_state_dict(optimizer)
        model, optimizer = made(stage, 1)
        train(model, optimizer, 7, before)
        if before > 1:
            shown(optimizer, model)
            train(model, optimizer, 8, 1)
        if loader == "onefold.load":
            onefold.load(f"{folder}/a", model=model, optimizer=optimizer)
        elif loader == "dcp.load":
            dcp.load(onefold.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/b")
        elif loader == "load_state_dict":
            optimizer.load_state_dict(states)
        else:
            onefold.optim.load_local_state_dict(optimizer, local)
        found = shown(optimizer, model)
        train(model, optimizer, 3, 1)
        counts = {step for _, _, step, _ in shown(optimizer, model).values()}
        if counts != {4.0}:
            return [f"stage {stage}, {loader}: steps {counts} after a load and a step"]
    return [
        f"stage {stage}, {loader}, {before} steps before: {n} shows {found[n]}, expected {wanted[n]}"
        for n in wanted
        if found[n] != wanted[n]
    ]


def after_loads(loader: str, folder: str) -> list[str]:
    return [
        line
        for stage in (0, 1, 3)
        for before in (0, 2)
        for line in loaded(stage, loader, f"{folder}/{stage}-{before}", before)
    ]


@pytest.mark.parametrize("loader", LOADERS)
def test_states_show_the_whole_right_after_a_load(loader: str, tmp_path: Path) -> None:
    assert run_ranks(2, after_loads, loader, str(tmp_path)) == [[], []]


class Odd(nn.Module):
    """Small parameters, which one rank alone has; `late` is used from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(6, 40), nn.Linear(6, 6), nn.Linear(40, 3)
        self.never, self.calls = nn.Parameter(torch.ones(5)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.late(x) if self.calls > 2 else x
        return self.last(torch.tanh(self.first(x))).square().mean()


def optimizers_over(model: Odd, name: str) -> list[torch.optim.Optimizer]:
    params = dict(model.named_parameters())
    if name == "one":
        return [torch.optim.AdamW(params.values(), lr=0.01)]
    if name == "groups":  # with other keys in one of them
        late = [p for n, p in params.items() if "late" in n]
        rest = [p for n, p in params.items() if "late" not in n]
        return [torch.optim.AdamW([{"params": late, "amsgrad": True}, {"params": rest}], lr=0.01)]
    if name == "each":  # a rank may have nothing at all of an optimizer's parameters
        return [torch.optim.AdamW([p], lr=0.01) for p in params.values()]
    return [torch.optim.SGD(params.values(), lr=0.01, momentum=0.9 if name == "momentum" else 0.0)]


def seen_of(model: Any, optimizers: list[Any], how: str) -> list[Any]:
    """What is shown after each of seven steps, in between of which parameters are frozen, or the
    model is unsharded."""
    out: list[Any] = []
    for step in range(7):
        if step == 4 and how in ("frozen", "thawed"):
            model.first.requires_grad_(False)
        if step == 6 and how == "thawed":
            model.first.requires_grad_(True)
        if step == 3 and how == "popped":
            for optimizer in optimizers:
                optimizer.state.pop(model.first.bias, None)
                if model.last.weight in optimizer.state:
                    del optimizer.state[model.last.weight]
        if step == 4 and how == "cleared":
            for optimizer in optimizers:
                optimizer.state.clear()
        if step == 5 and how == "unsharded" and hasattr(model.first.weight, "onefold"):
            with onefold.unsharded(model):
                pass
        if step != 1:  # a look before the first step of all, and not after every step
            out.append(look(model, optimizers))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(4, 6)).backward()
        for optimizer in optimizers:
            optimizer.step()
        if step in (0, 2, 5):
            out.append(look(model, optimizers))
    return out


def look(model: Any, optimizers: list[Any]) -> Any:
    found = []
    for optimizer in optimizers:
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        held = {n for n, p in model.named_parameters() if p in mine and p in optimizer.state}
        here = {}
        for name, p in model.named_parameters():
            if name not in held:
                continue
            state = optimizer.state[p]
            here[name] = {
                key: float(v) if v.dim() == 0 else (tuple(v.shape), round(v.norm().item(), 4))
                for key, v in state.items()
                if v is not None
            }
        order = [p.shape for p in optimizer.state]
        found.append((here, order, len(optimizer.state)))
    return found


def like_plain(name: str, how: str) -> list[str]:
    wrong = []
    torch.manual_seed(0)
    plain = Odd()
    expected = seen_of(plain, optimizers_over(plain, name), how)
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        model: Any = onefold.shard(Odd(), onefold.Recipe.zero(stage, stall_timeout=20.0))
        found = seen_of(model, optimizers_over(model, name), how)
        for at, (a, b) in enumerate(zip(found, expected, strict=True)):
            for (mine, order, count), (theirs, torchs, number) in zip(a, b, strict=True):
                wrong += [
                    f"stage {stage}, look {at}: {n} is {mine.get(n)}, expected {theirs.get(n)}"
                    for n in {*mine, *theirs}
                    if mine.get(n) != theirs.get(n)
                ]
                if sorted(order) != sorted(torchs) or count != number:
                    wrong.append(f"stage {stage}, look {at}: {order}, expected {torchs}")
    return wrong


@pytest.mark.parametrize("name", ["one", "groups", "each", "momentum", "plain"])
def test_every_rank_sees_the_states_of_plain_pytorch(name: str) -> None:
    """After any history: freezes, parameters that are used late or never, states that are dropped."""
    for how in ("trained", "frozen", "thawed", "popped", "cleared", "unsharded"):
        assert run_ranks(2, like_plain, name, how) == [[], []], how


RECIPES: dict[str, dict[str, Any]] = {
    "on the host": {"stage": 3, "offload_optimizer": "cpu"},
    "on NVMe": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
    "in backward": {"stage": 2, "offload_optimizer": "cpu", "step_in_backward": True},
    "bf16": {"stage": 3, "precision": "bf16"},
    "moments": {"stage": 2, "moments": "int8"},
    "tiles": {"stage": 3, "tile": 200},
    "HSDP": {"stage": 3, "shard_group": 2},
    "hybrid": {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
}


def outlined(model: Any, optimizer: Any) -> list[Any]:
    """[(parameter, [(key, shape)], step)] in the order of `optimizer.state`."""
    names = {id(p): n for n, p in model.named_parameters()}
    return [
        (names[id(p)], [(key, tuple(v.shape)) for key, v in state.items()], float(state["step"]))
        for p, state in optimizer.state.items()
    ]


def under_recipes(folder: str, names: list[str]) -> list[Any]:
    out: list[Any] = []
    for name in names:
        recipe = RECIPES[name] | ({"nvme": folder} if "NVMe" in name else {})

        def built(recipe: dict[str, Any] = recipe) -> tuple[Any, Any]:
            torch.manual_seed(0)
            model: Any = onefold.shard(Odd(), onefold.Recipe.zero(stall_timeout=20.0, **recipe))
            return model, torch.optim.AdamW(model.parameters(), lr=0.01)

        def go_on(model: Any, optimizer: Any, count: int) -> None:
            for step in range(count):
                optimizer.zero_grad()
                torch.manual_seed(step)
                model(torch.randn(4, 6)).backward()
                optimizer.step()

        model, optimizer = built()
        go_on(model, optimizer, 4)
        out.append((name, "trained", outlined(model, optimizer)))
        model.first.requires_grad_(False)
        go_on(model, optimizer, 1)
        out.append((name, "frozen", outlined(model, optimizer)))
        onefold.save(f"{folder}/{name}", model=model, optimizer=optimizer)
        model, optimizer = built()
        onefold.load(f"{folder}/{name}", model=model, optimizer=optimizer)
        out.append((name, "loaded", outlined(model, optimizer)))
        go_on(model, optimizer, 2)
        out.append((name, "went on", outlined(model, optimizer)))
    return out


@pytest.mark.parametrize(("ranks", "names"), [(2, list(RECIPES)[:6]), (4, list(RECIPES)[6:])])
def test_every_recipe_shows_the_same_states_on_every_rank(
    ranks: int, names: list[str], tmp_path: Path
) -> None:
    steps = {
        "trained": {"late": 2.0},
        "frozen": {"late": 3.0, "last": 5.0},
        "loaded": {"late": 3.0, "last": 5.0},
        "went on": {"first": 6.0, "late": 3.0, "last": 7.0},
    }
    first, *others = run_ranks(ranks, under_recipes, str(tmp_path), names)
    assert len(first) == 4 * len(names)
    for other in others:
        assert [a for a, b in zip(other, first, strict=True) if a != b] == []
    for name, when, found in first:
        for param, _, step in found:
            wanted = steps[when].get(param.partition(".")[0], 4.0)
            assert step == wanted, (name, when, param)
