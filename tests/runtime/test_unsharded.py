"""onefold.unsharded: the structure of a sharded model changes, training goes on as if it had been
changed in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from trials import STAGES, MeanOverRanks
from zoo import Block, TinyGPT, tokens_of


def change(model: Any) -> None:
    """More tokens, a head tied to the new embedding, a block less, an adapter more, a norm in
    another dtype and back, more positions.
    """
    old = model.tokens
    torch.manual_seed(3 + dist.get_rank())  # rank 0's values are everybody's
    model.tokens = nn.Embedding(70, 20)
    with torch.no_grad():
        model.tokens.weight[:61] = old.weight
    model.head = nn.Linear(20, 70, bias=False)
    model.head.weight = model.tokens.weight
    del model.blocks[2]
    model.blocks[0].extra = nn.Linear(20, 20)
    model.blocks[0].norm_1 = nn.Sequential(model.blocks[0].norm_1, model.blocks[0].extra)
    model.norm.to(torch.bfloat16).to(torch.float32)


def longer(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.detach(), torch.ones(2, 20)])


def train(stage: int | None, **options: Any) -> Any:
    """Losses, and the weights and states at the end, of two steps before the change and three after
    it, by AdamW.
    """
    import onefold

    torch.manual_seed(0)
    model: Any = TinyGPT()
    mean = MeanOverRanks(model)
    if stage is not None:
        onefold.shard(
            model, onefold.Recipe.zero(stage, stall_timeout=10.0, **options), units=(Block,)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    before = dict(model.named_parameters())
    calls: list[int] = []
    model.blocks[1].mlp[0].weight.register_hook(lambda grad: calls.append(1))
    engine = onefold.engine_of(model) if stage is not None else None
    seen = []
    for step in range(5):
        if step == 2:
            if stage is None:
                change(model)
                params, old = optimizer.param_groups[0]["params"], model.positions.weight
                at = next(i for i, p in enumerate(params) if p is old)
                params[at] = model.positions.weight = before["positions"] = nn.Parameter(
                    longer(old)
                )
                for p in model.parameters():
                    dist.broadcast(p.data, 0)
            else:
                with onefold.unsharded(model) as plain:
                    same = all(
                        type(p) is nn.Parameter and before[name] is p
                        for name, p in plain.named_parameters()
                    )
                    moments = optimizer.state[plain.blocks[1].mlp[0].weight]
                    if (
                        not same
                        or moments["exp_avg"].shape != (80, 20)
                        or "onefold" in vars(plain.norm.weight)
                    ):
                        return "inside, the model is not plain"
                    plain.state_dict()
                    change(plain)
                    # In place, as resize_token_embeddings does it
                    plain.positions.weight.data = longer(plain.positions.weight)
            new = [p for p in model.parameters() if not any(p is q for q in before.values())]
            optimizer.add_param_group({"params": new, "lr": 0.02})
        optimizer.zero_grad()
        loss = model(tokens_of(10 * step + dist.get_rank()))
        loss.backward()
        seen.append(loss.detach().clone())
        if stage is None:
            mean.average()
        optimizer.step()
    if len(calls) != 5:
        return f"a gradient hook was called {len(calls)} times"
    if stage is not None:
        assert engine is not None
        # Who held the engine has the new one
        counted = (
            engine.step_count,
            len(engine.entries),
            engine.units is onefold.engine_of(model).units,
        )
        if counted != (5, len(list(model.parameters())), True):
            return f"steps, entries: {counted}"
    state = model.state_dict() if stage is None else onefold.full_state_dict(model)
    return [t.clone() for t in (*seen, *(state.values() if dist.get_rank() == 0 else []))]


def compare() -> list[str]:
    plain, first, found = train(None), None, []
    for stage in STAGES:
        ours = train(stage)
        if isinstance(ours, str):
            found.append(f"stage {stage}: {ours}")
            continue
        for i, (a, b) in enumerate(zip(plain, ours, strict=True)):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, atol=1e-4):
                found.append(
                    f"stage {stage}: tensor {i} of {tuple(a.shape)} is off by"
                    f" {(a - b).abs().max():.1e}"
                )
        first = first or ours
        found += [
            f"stage {stage}: tensor {i} has other bits"
            for i, (a, b) in enumerate(zip(first, ours, strict=True))
            if not a.equal(b)
        ]
    return found


def test_a_changed_model_trains_on_with_the_states_of_what_stayed() -> None:
    assert run_ranks(2, compare) == [[], []]


def unchanged(stage: int, **options: Any) -> list[str]:
    """Entering and leaving changes no bit of what follows; a scaler made before still works for the
    model.
    """
    import onefold

    found, curves = [], []
    for enter in (False, True):
        torch.manual_seed(0)
        model: Any = onefold.shard(
            TinyGPT(), onefold.Recipe.zero(stage, stall_timeout=10.0, **options)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = onefold.GradScaler(model, init_scale=4.0)
        curve = []
        for step in range(4):
            if step == 2 and enter:
                with onefold.unsharded(model):
                    pass
            optimizer.zero_grad()
            loss = model(tokens_of(10 * step + dist.get_rank()))
            (scaler.scale(loss) * (float("inf") if step == 3 else 1.0)).backward()
            scaler.unscale_(optimizer)
            onefold.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            curve += [loss.item(), scaler.get_scale()]
        if curve[-1] != 2.0:
            found.append(f"stage {stage}, {options}: the scaler did not see an overflow")
        curves.append(curve)
    if curves[0] != curves[1]:
        found.append(f"stage {stage}, {options}: {curves[1]}, expected {curves[0]}")
    return found


def unchanged_by_recipes() -> list[str]:
    if dist.get_world_size() == 2:
        return unchanged(3, precision="bf16") + unchanged(2, precision="bf16", master_dtype="fp64")
    return unchanged(3, shard_group=2) + unchanged(
        3, group=2, second_copy=True, gather_codec="int8"
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_entering_and_leaving_changes_no_bit(ranks: int) -> None:
    assert run_ranks(ranks, unchanged_by_recipes) == [[]] * ranks


# -- step counts after a resume ---------------------------------------------------------------------

RESUMES = ("nothing", "onefold.load", "dcp.load", "load_state_dict", "looking")


def stepped(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(tokens_of(10 * step + dist.get_rank())).backward()
    optimizer.step()


def resumed(stage: int, how: str, folder: str, enter: bool) -> tuple[list[str], list[Any]]:
    """Three steps, a resume of this kind, one step, `unsharded` or not, one step: what `step` is
    inside the block, and the weights at the end.
    """
    import torch.distributed.checkpoint as dcp

    import onefold

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model: Any = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, stall_timeout=10.0))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    wrong = []
    model, optimizer = made(0)
    for step in range(3):
        stepped(model, optimizer, step)
    if how not in ("nothing", "looking"):
        onefold.save(f"{folder}/a", model=model, optimizer=optimizer, overwrite=True)
        state = onefold.dcp_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id=f"{folder}/b")
        weights, states = onefold.full_state_dict(model), optimizer.state_dict()
        model, optimizer = made(1)
        if how == "onefold.load":
            onefold.load(f"{folder}/a", model=model, optimizer=optimizer)
        elif how == "dcp.load":
            dcp.load(onefold.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/b")
        else:
            onefold.load_full_state_dict(model, weights)
            optimizer.load_state_dict(states)
    if how == "looking":
        _ = [state["step"] for state in optimizer.state.values()]
    stepped(model, optimizer, 3)
    if enter:
        with onefold.unsharded(model) as plain:
            counts = {n: int(optimizer.state[p]["step"]) for n, p in plain.named_parameters()}
            wrong = [f"stage {stage}, {how}: {n} has step {k}" for n, k in counts.items() if k != 4]
    stepped(model, optimizer, 4)
    return wrong, [t.clone() for t in onefold.full_state_dict(model).values()]


def steps_kept(folder: str) -> list[str]:
    found = []
    for stage in STAGES:
        for how in RESUMES:
            wrong, weights = resumed(stage, how, f"{folder}/{stage}-{how}", True)
            _, expected = resumed(stage, how, f"{folder}/{stage}-{how}", False)
            found += wrong
            off = [0.0] + [
                (a - b).abs().max().item() for a, b in zip(weights, expected, strict=True)
            ]
            found += [f"stage {stage}, {how}: weights {max(off):.1e} off"] * (sum(off) > 0)
    return found


def test_step_counts_come_from_ranks_that_own_elements(tmp_path: Any) -> None:
    """After a load, or a look, ranks without elements of a parameter keep an old copy of `step`."""
    assert run_ranks(2, steps_kept, str(tmp_path)) == [[], []]


# -- what goes wrong -------------------------------------------------------------------------------


def told(function: Any, *words: str) -> list[str]:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return [
            f"{word!r} is not said: {type(error).__name__}: {error}"
            for word in words
            if word not in str(error)
        ]
    return [f"was let pass, expected {words}"]


def troubles() -> list[str]:
    import onefold

    def recipe(stage: int = 3, **options: Any) -> Any:
        return onefold.Recipe.zero(stage, stall_timeout=10.0, **options)

    def enter(model: Any) -> None:
        with onefold.unsharded(model):
            pass

    found = []
    model: Any = onefold.shard(TinyGPT(), recipe())

    def raising() -> None:
        with onefold.unsharded(model):
            model.blocks[0].extra = nn.Linear(20, 20)
            if dist.get_rank() == 1:
                raise RuntimeError("no such head")

    found += told(raising, "no such head" if dist.get_rank() == 1 else "raised on rank 1")
    found += told(lambda: model(tokens_of(0)), "not sharded", "onefold.shard(model, recipe)")
    onefold.shard(model, recipe())
    model(tokens_of(0)).backward()
    found += told(lambda: enter_unreduced(model), "no_sync", "optimizer.step()")

    def differing() -> None:
        with onefold.unsharded(model):
            model.blocks[1].more = nn.Linear(20, 20 + dist.get_rank())

    found += told(differing, "parameter shapes", "rank 1")
    found += told(lambda: model(tokens_of(0)), "not sharded")
    for options in ({"tile": 1024}, {"offload_optimizer": "cpu"}):
        other = onefold.shard(TinyGPT(), recipe(**options))
        found += told(
            lambda m=other: enter(m),
            "onefold.unsharded does not work with this recipe",
            "before shard()",
        )
        other(tokens_of(0)).backward()
    whole = onefold.shard(TinyGPT(), recipe())
    with onefold.full_params(whole):
        found += told(lambda: enter(whole), "inside full_params")
    with onefold.keep_gathered(whole):
        found += told(lambda: enter(whole), "inside keep_gathered")
    rows = onefold.shard(TinyGPT(), recipe(0))
    optimizer = torch.optim.Adafactor(rows.parameters())
    rows(tokens_of(0)).backward()
    optimizer.step()
    found += told(lambda: enter(rows), "Adafactor keeps", "neither one number", "make it anew")
    rows(tokens_of(0)).backward()  # still sharded
    return found


def enter_unreduced(model: Any) -> None:
    import onefold

    fresh: Any = onefold.shard(TinyGPT(), onefold.Recipe.zero(1, stall_timeout=10.0))
    with onefold.no_sync(fresh):
        fresh(tokens_of(0)).backward()
    with onefold.unsharded(fresh):
        pass


def test_an_error_inside_is_told_on_every_rank_and_the_model_cannot_be_used() -> None:
    assert run_ranks(2, troubles) == [[], []]


def alone() -> list[str]:
    """One rank: a plain model stays one, and one that computes in bf16 follows the same way."""
    import onefold

    found = []
    for options in ({}, {"precision": "bf16"}):
        model: Any = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, **options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            model(tokens_of(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with onefold.unsharded(model):
                model.head = nn.Linear(20, 61, bias=False)
        if not all(torch.isfinite(p).all() for p in model.parameters()):
            found.append(f"{options}: lost its numbers")
    return found


def test_one_rank_changes_its_model_too() -> None:
    assert run_ranks(1, alone) == [[]]
