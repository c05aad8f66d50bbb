"""Training steps on the virtual device (tests/virtual), whose streams run as late and in as strange
an order as the waits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import standin
import virtual
from zoo import TinyGPT, tokens_of

DEVICE = "virtual"


@dataclass
class Trial:
    """A few steps of a small GPT.

    Attributes:
        options: of Recipe.zero, without the stage.
        how: what the loop does besides, a set of words: see `train`.
    """

    stage: int
    options: dict[str, Any] = field(default_factory=dict)
    how: frozenset[str] = frozenset()
    steps: int = 3
    build: Callable[[], nn.Module] = TinyGPT

    def recipe(self, folder: str) -> Any:
        import onefold

        on_disk = {"nvme": folder} if "nvme" in str(self.options.values()) else {}
        return onefold.Recipe.zero(
            self.stage, stall_timeout=60.0, **{"precision": "fp32", **self.options, **on_disk}
        )


def train(trial: Trial, device: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, whole weights on rank 0). Nothing is asked of the device before the end, but where
    the trial says so.
    """
    import onefold

    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model: Any = trial.build()
    if "frozen" in trial.how:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("blocks.1" not in name)
    model = onefold.shard(model, trial.recipe(folder), device=device)
    onefold.engine_of(model).transfers.sums.chunk = 4096  # several chunks of so small a model
    store: Any = getattr(onefold.engine_of(model).activations, "store", None)
    if store is not None:  # of so small a model nothing would go down
        store.smallest, store.window, store.ahead = 256, 8192, 8192
    fused = True if "fused" in trial.how else None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4, fused=fused
    )
    losses: list[Tensor] = []
    saving: Any = None
    for step in range(trial.steps):
        optimizer.zero_grad(set_to_none="zeroes" not in trial.how)
        for micro in range(2 if "accumulates" in trial.how else 1):
            batch = tokens_of(100 * step + 10 * micro + rank).to(device)
            if micro == 0 and "accumulates" in trial.how:
                with onefold.no_sync(model):
                    model(batch).backward()
            elif step == 1 and "raises" in trial.how:
                # On all ranks, with reductions under way; the step is then done again
                output = model(batch)
                _raising_behind(model, output)
                loss = model(batch)
                loss.backward()
            else:
                loss = model(batch)
                loss.backward()
        losses.append(loss.detach())
        if "clips" in trial.how:
            losses.append(onefold.clip_grad_norm_(model, 0.05))
        if "evaluates" in trial.how:
            with torch.no_grad():
                losses.append(model(tokens_of(7 + step).to(device)))
        optimizer.step()
        # By hand, right behind the step: through the parameter, its data and a view of it
        if "decays" in trial.how:
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    (parameter, parameter.data, parameter.detach())[number % 3].mul_(0.75)
        if "saves" in trial.how and step == 0:
            saving = onefold.save_async(f"{folder}/saved", model=model, optimizer=optimizer)
            if "decays" in trial.how:
                with torch.no_grad():
                    for number, parameter in enumerate(model.parameters()):
                        (parameter, parameter.data, parameter.detach())[number % 3].mul_(0.5)
        if "writes" in trial.how and step == 1:
            with onefold.full_params(model, write=True), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
    if saving is not None:
        place = saving.wait()
        onefold.load(place, model=model, optimizer=optimizer)
        batch = tokens_of(999 + rank).to(device)
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert store is None or (store.down and store.up), (
        "no activation went to the host and came back"
    )
    weights = onefold.full_state_dict(model)
    return [float(x) for x in losses], {name: t.cpu().clone() for name, t in weights.items()}


def _raising_behind(model: Any, output: Tensor) -> None:
    """A backward pass that raises when it comes to the first block's gradients."""

    def refuse(_: Tensor) -> None:
        raise ValueError("on purpose")

    handle = dict(model.named_parameters())["blocks.0.mlp.0.weight"].register_hook(refuse)
    try:
        output.backward()
    except ValueError:
        handle.remove()


def differences(
    expected: tuple[list[float], dict[str, Tensor]], got: tuple[list[float], dict[str, Tensor]]
) -> list[str]:
    """What has other bits."""
    found = [] if got[0] == expected[0] else [f"losses {got[0]} instead of {expected[0]}"]
    off = [
        name
        for name, t in expected[1].items()
        if name not in got[1] or not torch.equal(t, got[1][name])
    ]
    return found + ([f"weights {off[:3]} differ ({len(off)} of {len(expected[1])})"] if off else [])


def under_schedules(
    trial: Trial, seeds: Iterable[int], folder: str, check: bool = True
) -> list[str]:
    """On one rank: what differs from the same steps in the program's order, and what no wait
    orders, under any of the schedules `seeds`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    virtual.start(seed=None, check=False)  # each operation at once, as on one stream
    if world > 1:
        dist.destroy_process_group()
        standin.register()
        store = dist.FileStore(f"{folder}/virtual", world)
        dist.init_process_group(
            "cpu:gloo,virtual:standin", store=store, rank=rank, world_size=world
        )
    expected = train(trial, DEVICE, _fresh(folder, "at-once"))
    virtual.start(seed=0, check=check)
    found: list[str] = []
    for seed in seeds:
        virtual.reset(seed)
        from onefold.device import new_stream, use_stream

        # Than the device's own stream
        with use_stream(new_stream(torch.device(DEVICE, 0)) if "elsewhere" in trial.how else None):
            got = train(trial, DEVICE, _fresh(folder, str(seed)))
        virtual.drain()
        found += [f"seed {seed}: {text}" for text in differences(expected, got)]
        found += [f"seed {seed}: {violation}" for violation in virtual.violations()[:3]]
        if found:
            break
    return found


def _fresh(folder: str, name: str) -> str:
    place = Path(folder) / name
    place.mkdir(exist_ok=True)
    return str(place)
