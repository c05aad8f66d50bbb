"""torch.distributed.checkpoint between FSDP2 and Onefold: what one saved the other goes on from, at
any stage and number of ranks.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from moments_runs import unlike
from onefold.runtime.parameters.interval import local_part
from ranks import run_ranks
from whole_optimizers import MADE, Words, words_of
from zoo import TinyGPT, tokens_of

Whole = dict[str, Any]  # "name" or "name/state key" -> the whole tensor


class Scaled(nn.LayerNorm):
    """Has extra state."""

    note = 0

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, state: int) -> None:
        self.note = state


def build(seed: int) -> nn.Module:
    """Tied weights, a frozen parameter, a persistent and a passing buffer, extra state; all of them
    depend on `seed`.
    """
    torch.manual_seed(seed)
    model = TinyGPT(depth=2, tied=True)
    model.positions.weight.requires_grad_(False)
    model.norm = Scaled(20)
    model.norm.note = seed
    model.register_buffer("scale", torch.tensor([1.5, 2.5]) + seed)
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    return model


def adamw(model: nn.Module, lr: float, turned: bool = False) -> torch.optim.AdamW:
    """Two groups; `turned`: the other way round."""
    small = [p for n, p in model.named_parameters() if "norm" in n or "bias" in n]
    rest = [p for n, p in model.named_parameters() if not ("norm" in n or "bias" in n)]
    groups = [{"params": small, "weight_decay": 0.0}, {"params": rest, "lr": 2 * lr}]
    return torch.optim.AdamW(groups[::-1] if turned else groups, lr=lr)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int
) -> list[float]:
    """The losses of `count` steps, each on a batch that depends on the rank and the step's
    number.
    """
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss = model(tokens_of(10 * step + dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp(seed: int, lr: float) -> tuple[nn.Module, torch.optim.AdamW]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = build(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model, lr)


def sharded(
    stage: int, seed: int, lr: float, turned: bool = False
) -> tuple[nn.Module, torch.optim.AdamW]:
    import onefold

    model = onefold.shard(build(seed), onefold.Recipe.zero(stage, stall_timeout=10.0))
    return model, adamw(model, lr, turned)


def whole_of_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.tensor import DTensor

    weights, state = get_state_dict(model, optimizer)
    out = dict(weights) | {
        f"{name}/{key}": value
        for name, values in state["state"].items()
        for key, value in values.items()
    }
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else copy.deepcopy(value)
        for name, value in out.items()
    }


def differences(
    model: nn.Module, optimizer: torch.optim.Optimizer, wanted: Whole, lr: float
) -> list[str]:
    """What this rank of an Onefold run holds, against the whole, bit by bit."""
    out, seen = [], 0
    for name, param in model.named_parameters():
        i, j = param.onefold.interval if hasattr(param, "onefold") else (0, param.numel())
        parts: dict[str, Tensor] = {name: param.data}
        if param.requires_grad and i < j:
            parts |= {
                f"{name}/{key}": optimizer.state[param][key]
                for key in ("exp_avg", "exp_avg_sq", "step")
            }
        for key, part in parts.items():
            expected = wanted[key] if part.dim() == 0 else wanted[key].flatten()[i:j]
            seen += local_part(part).numel()
            if not torch.equal(local_part(part).flatten(), expected.flatten()):
                out.append(f"{key}: elements {i} to {j} differ")
        decays = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        expected_options = (lr, 0.0) if "norm" in name or "bias" in name else (2 * lr, 0.01)
        if (decays["lr"], decays["weight_decay"]) != expected_options:
            out.append(
                f"{name}: its group has lr {decays['lr']}, weight decay {decays['weight_decay']},"
                f" expected {expected_options}"
            )
    if (
        not torch.equal(model.scale, wanted["scale"])
        or model.norm.note != wanted["norm._extra_state"]
    ):
        out.append(
            f"buffer {model.scale}, extra state {model.norm.note}, expected {wanted['scale']},"
            f" {wanted['norm._extra_state']}"
        )
    return out if seen else ["this rank holds nothing to compare"]


def close(what: str, losses: list[float], expected: list[float]) -> list[str]:
    return (
        []
        if torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5)
        else [f"{what}: {losses}, expected {expected}"]
    )


def written_once(folder: Path, wanted: Whole) -> list[str]:
    """The elements that the checkpoint's parts hold are those of its tensors."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    out, stored = [], FileSystemReader(folder).read_metadata().state_dict_metadata
    for key, value in wanted.items():
        name, _, state = key.partition("/")
        found = stored[f"optimizer.state.{name}.{state}" if state else f"model.{name}"]
        if isinstance(value, Tensor):
            assert isinstance(found, TensorStorageMetadata)
            elements = sum(prod(chunk.sizes) for chunk in found.chunks)
            if (found.size, elements) != (value.shape, value.numel()):
                out.append(
                    f"{key}: {elements} elements of {tuple(found.size)} written, expected"
                    f" {tuple(value.shape)}"
                )
    return out


def both_ways(folder: Path) -> list[str]:
    """On 2 ranks: FSDP2 saves, Onefold loads; Onefold saves, FSDP2 loads; one more step on both."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from onefold.checkpoint.dcp import dcp_state_dict

    problems = []
    reference, optimizer = fsdp(seed=1, lr=0.01)
    steps(reference, optimizer, 0, 2)
    weights, state = get_state_dict(reference, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "fsdp2")
    wanted = whole_of_fsdp(reference, optimizer)
    if dist.get_rank() == 0:
        torch.save(wanted, folder / "wanted.pt")
    expected = steps(reference, optimizer, 2, 2)
    for stage in (3, 1):
        model, mine = sharded(stage, seed=2, lr=0.5, turned=stage == 3)
        dcp.load(dcp_state_dict(model, mine), checkpoint_id=folder / "fsdp2")
        problems += [
            f"stage {stage} from FSDP2: {p}" for p in differences(model, mine, wanted, lr=0.01)
        ]
        problems += close(f"stage {stage} from FSDP2", steps(model, mine, 2, 2), expected)

    for stage in (3, 0):
        model, mine = sharded(stage, seed=3 + stage, lr=0.02)
        steps(model, mine, 0, 2)
        saved = folder / f"stage-{stage}"
        writing = dcp.async_save(dcp_state_dict(model, mine), checkpoint_id=saved)
        expected = steps(model, mine, 2, 2)  # while it is written
        writing.result()
        other, theirs = fsdp(seed=9, lr=0.5)
        weights, state = get_state_dict(other, theirs)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=saved)
        set_state_dict(other, theirs, model_state_dict=weights, optim_state_dict=state)
        wanted = whole_of_fsdp(other, theirs)
        problems += [f"stage {stage} saved: {p}" for p in written_once(saved, wanted)]
        problems += close(f"FSDP2 from stage {stage}", steps(other, theirs, 2, 2), expected)
        again, mine = sharded(stage, seed=10, lr=0.5)
        dcp.load(dcp_state_dict(again, mine), checkpoint_id=saved)
        problems += [
            f"stage {stage} by FSDP2 and by itself: {p}"
            for p in differences(again, mine, wanted, lr=0.02)
        ]
        if (losses := steps(again, mine, 2, 2)) != expected:
            problems.append(
                f"stage {stage} after its own save: {losses}, expected {expected} to the bit"
            )
    return problems


def elsewhere(folder: Path) -> list[str]:
    """On any number of ranks: Onefold loads what FSDP2 saved on 2; on several, it goes on, saves,
    and loads that.
    """
    import torch.distributed.checkpoint as dcp

    from onefold.checkpoint.dcp import dcp_state_dict

    wanted = torch.load(folder / "wanted.pt", weights_only=True)
    model, mine = sharded(2, seed=4, lr=0.5)
    with torch.no_grad():
        # Kept copies of whole parameters, which the load makes stale, also where a rank holds
        # nothing of a unit
        model(tokens_of(0))
    dcp.load(dcp_state_dict(model, mine), checkpoint_id=folder / "fsdp2")
    problems = differences(model, mine, wanted, lr=0.01)
    if not dist.is_initialized():
        return problems
    steps(model, mine, 2, 1)
    writer = dcp.FileSystemWriter(folder / "again")  # has its own way of staging
    dcp.async_save(dcp_state_dict(model, mine), storage_writer=writer).result()
    problems += written_once(folder / "again", wanted)
    other, theirs = sharded(1, seed=5, lr=0.5)
    dcp.load(dcp_state_dict(other, theirs), checkpoint_id=folder / "again")
    if (counts := {float(state["step"]) for state in theirs.state.values()}) != {3.0}:
        problems.append(f"step counts {counts} after 3 steps")
    losses, expected = steps(other, theirs, 3, 2), steps(model, mine, 3, 2)
    return (
        problems
        if losses == expected
        else [*problems, f"losses {losses}, expected {expected} to the bit"]
    )


def frozen_later(folder: Path) -> list[str]:
    """Steps with everything trained, a freeze, a save; a load into a frozen model, a thaw, a step:
    as if there had been no save. One parameter never had a state.
    """
    import torch.distributed.checkpoint as dcp

    import onefold

    def frozen(model: nn.Module, on: bool) -> None:
        for name, p in model.named_parameters():
            if "mlp" in name or "tokens" in name:
                p.requires_grad_(not on)

    problems = []
    for stage in (0, 1, 3):
        model, mine = sharded(stage, seed=1, lr=0.01)
        steps(model, mine, 0, 2)
        frozen(model, True)
        steps(model, mine, 2, 1)
        saved = folder / f"frozen-{stage}"
        dcp.save(onefold.dcp_state_dict(model, mine), checkpoint_id=saved)
        torch.manual_seed(0)
        other = build(2)
        frozen(other, True)
        for early in (False, True):
            # Frozen before or after `shard`
            again: Any = other if early else build(3)
            onefold.shard(again, onefold.Recipe.zero(stage, stall_timeout=10.0))
            frozen(again, True)
            theirs = adamw(again, lr=0.5)
            dcp.load(onefold.dcp_state_dict(again, theirs), checkpoint_id=saved)
            named = dict(again.named_parameters())
            shapes = {
                n: theirs.state[p]["exp_avg"].shape == p.shape
                for n, p in named.items()
                if n != "positions.weight"
            }
            problems += [f"stage {stage}: {n} shows a part" for n, ok in shapes.items() if not ok]
            if theirs.state.get(named["positions.weight"]):
                problems.append(f"stage {stage}: a state of what was never stepped")
            if early:
                continue  # what is frozen in shard() stays so
            frozen(again, False)
            frozen(model, False)
            losses, expected = steps(again, theirs, 3, 2), steps(model, mine, 3, 2)
            problems += [f"stage {stage}: {losses}, expected {expected}"] * (losses != expected)
    return problems


WHOLE = ("Muon and AdamW", "Adafactor", "SOAP")


def whole_trained(name: str, stage: int, count: int) -> tuple[nn.Module, list[Any]]:
    recipe = onefold.Recipe.zero(stage=stage, stall_timeout=30.0)
    model = onefold.shard(Words(), recipe)
    optimizers = MADE[name]([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    for step in range(count):
        model(words_of(dist.get_rank(), step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def whole_states(model: nn.Module, optimizers: list[Any]) -> list[Any]:
    weights = onefold.full_state_dict(model)
    return [weights, *(optimizer.state_dict()["state"] for optimizer in optimizers)]


def saved_whole(
    folder: Path, stages: tuple[int, ...], cases: tuple[tuple[int, int], ...]
) -> list[str]:
    for name in WHOLE:
        for stage in stages:
            model, optimizers = whole_trained(name, stage, 2)
            state = onefold.dcp_state_dict(model, optimizers)
            dist.checkpoint.save(state, checkpoint_id=folder / f"{name} {stage}")
            whole = whole_states(model, optimizers)
            if dist.get_rank() == 0:
                torch.save(whole, folder / f"{name} {stage}.pt")
    dist.barrier()
    return loaded_whole(folder, cases)


def loaded_whole(folder: Path, cases: tuple[tuple[int, int], ...]) -> list[str]:
    """What differs after loads of (the stage of the save, that of the load)."""
    out = []
    for name in WHOLE:
        for number, (saved, stage) in enumerate(cases):
            model, optimizers = whole_trained(name, stage, number)  # fresh, or stepped
            state = onefold.dcp_state_dict(model, optimizers)
            dist.checkpoint.load(state, checkpoint_id=folder / f"{name} {saved}")
            found = whole_states(model, optimizers)
            wanted = torch.load(folder / f"{name} {saved}.pt", weights_only=False)
            if dist.get_rank() == 0 and (bad := unlike(found, wanted)):
                out.append(f"{name}, stage {saved} at stage {stage}: {bad[:3]}")
    return out


def test_states_of_whole_matrices_are_loaded_at_other_stages_and_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, saved_whole, tmp_path, (0, 3), ((0, 2), (3, 0))) == [[], []]
    assert run_ranks(3, loaded_whole, tmp_path, ((3, 1),)) == [[], [], []]


def refusals() -> dict[str, str]:
    """What each misuse says on this rank."""
    from onefold.checkpoint.dcp import dcp_state_dict
    from onefold.checkpoint.errors import CheckpointError

    model, optimizer = sharded(3, seed=5, lr=0.1)
    steps(model, optimizer, 0, 1)
    before = [p.data.clone() for p in model.parameters()]
    state = dcp_state_dict(model, optimizer)

    def said(call: Any) -> str:
        try:
            call()
        except CheckpointError as error:
            return str(error)
        return "nothing"

    out = {}
    out["pickled leaf"] = said(lambda: pickle.dumps(state["model"].state_dict()["norm.weight"]))
    out["pickled state"] = said(lambda: pickle.dumps(state))
    out["computed with"] = said(lambda: state["model"].state_dict()["norm.weight"] + 1)
    one = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    other = dcp_state_dict(model, one)["optimizer"]
    out["other groups"] = said(lambda: other.load_state_dict(state["optimizer"].state_dict()))
    out["other model"] = said(dcp_state_dict(model, adamw(build(0), 0.1))["optimizer"].state_dict)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    created = dcp_state_dict(model, fresh)["optimizer"].state_dict()
    steps_made = {float(values["step"]) for values in created["state"].values()}
    out["a fresh optimizer is left alone"] = f"{len(fresh.state)} states, steps {steps_made}"
    held = next(p for p in model.parameters() if p.requires_grad and p.numel())
    optimizer.state[held]["rows"] = torch.zeros(3, 2)
    out["factored"] = said(state["optimizer"].state_dict)
    if not all(torch.equal(a, p.data) for a, p in zip(before, model.parameters(), strict=True)):
        out["parameters"] = "changed"
    return out


def test_fsdp2_and_onefold_go_on_from_each_others_checkpoints_at_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, both_ways, tmp_path) == [[], []]
    assert run_ranks(3, elsewhere, tmp_path) == [[], [], []]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: no process group, one process assumed
        assert elsewhere(tmp_path) == []


def test_a_load_keeps_the_states_of_frozen_parameters(tmp_path: Path) -> None:
    assert run_ranks(2, frozen_later, tmp_path) == [[], []]


def test_what_cannot_be_saved_says_so() -> None:
    for said in run_ranks(2, refusals):
        assert "was to be pickled" in said["pickled leaf"] and "flattens" in said["pickled leaf"]
        assert "top of its dict" in said["pickled state"]
        assert "nothing can be computed with it" in said["computed with"]
        assert "in its groups [0, 1]" in said["other groups"]
        assert "is none of the sharded model's" in said["other model"]
        assert said["a fresh optimizer is left alone"] == "0 states, steps {0.0}"
        assert "tensor of shape (3, 2)" in said["factored"] and "stage 0" in said["factored"]
        assert "parameters" not in said
