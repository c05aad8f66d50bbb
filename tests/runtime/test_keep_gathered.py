"""onefold.keep_gathered: whole units stay between passes without gradients, under a limit, and are
never out of date.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ranks import outcomes_of, run_ranks
from zoo import ResidualBlock, TinyMLP, features_of

#: Elements of a block: each of its four parameters begins at a multiple of 64; two ranks cut at
#: multiples of 64.
BLOCK = 256 + 64 + 256 + 64


def sharded(**options: Any) -> Any:
    import onefold

    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(3, **{"stall_timeout": 10.0, **options})
    return onefold.shard(TinyMLP(), recipe, units=(ResidualBlock,))


def held(model: Any) -> int:
    """Bytes of gathered units that the ledger counts now."""
    import onefold

    return int(onefold.engine_of(model).memory.now().get("gathered units", 0))


def sent(model: Any) -> int:
    import onefold

    traffic = onefold.engine_of(model).traffic
    total = int(traffic.by_move().get("all-gather", 0))
    traffic.reset()
    return total


def evaluate(model: Any, mode: Any = torch.no_grad) -> torch.Tensor:
    with mode():
        return model(features_of(5, 4, 7)).clone()


def stays_and_goes() -> list[str]:
    import onefold

    found = []
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = sum(u.numel for u in onefold.engine_of(model).units) * 4

    def expect(what: str, got: Any, wanted: Any) -> None:
        if got != wanted:
            found.append(f"{what}: {got}, expected {wanted}")

    def train() -> None:
        optimizer.zero_grad()
        model(features_of(dist.get_rank(), 4, 7)).square().mean().backward()
        optimizer.step()

    train()
    sent(model)
    before = evaluate(model)
    expect("bytes sent by a plain pass", sent(model), whole // 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with onefold.keep_gathered(model):
            expect("bytes held on entering", held(model), whole)
            expect("bytes sent on entering", sent(model), whole // 2)
            for _ in range(3):
                expect("bits", evaluate(model, mode).equal(before), True)
            expect("bytes sent by three passes inside", sent(model), 0)
            expect("bytes held between passes", held(model), whole)
        expect("bytes held on leaving", held(model), 0)
    with onefold.keep_gathered(model):
        train()
        expect("bytes held after a step", held(model), 0)
        after = evaluate(model, torch.inference_mode)
        expect("bytes held again", held(model), whole)
        train()  # buffers that were made under inference_mode are of no use here
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        written = evaluate(model)
        onefold.load_full_state_dict(
            model, TinyMLP().state_dict() if dist.get_rank() == 0 else None
        )
        loaded = evaluate(model)
    with onefold.full_params(model):
        expect(
            "what was loaded is seen",
            torch.allclose(evaluate(model), loaded, rtol=1e-5, atol=1e-6),
            True,
        )
    expect(
        "the step, the write and the load are seen",
        len({t.sum().item() for t in (before, after, written, loaded)}),
        4,
    )
    train()
    expect("bytes held after training outside", held(model), 0)
    return found


def test_units_stay_gathered_between_passes_and_are_let_go_when_they_change() -> None:
    assert run_ranks(2, stays_and_goes) == [[], []]


def from_the_host() -> list[str]:
    """Parameters that rest on the host, or are moved encoded, are kept in the same form as any."""
    import onefold

    found = []
    for options in (
        {"offload_param": "cpu", "precision": "bf16"},
        {"gather_codec": "int8", "precision": "bf16"},
    ):
        model = sharded(**options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = evaluate(model)
        with onefold.keep_gathered(model):
            sent(model)
            same = evaluate(model).equal(before), evaluate(model).equal(before)
            if same != (True, True) or sent(model):
                found.append(f"{options}: the same bits {same}")
            model(features_of(dist.get_rank(), 4, 7)).float().square().mean().backward()
            optimizer.step()
            inside = evaluate(model)
        if not inside.equal(evaluate(model)) or inside.equal(before):
            found.append(f"{options}: the step is not seen")
    return found


def test_offloaded_and_encoded_parameters_are_kept_too() -> None:
    assert run_ranks(2, from_the_host) == [[], []]


def trains_alike(inside: bool) -> list[float]:
    import contextlib

    import onefold

    model = sharded(precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with onefold.keep_gathered(model, "3KB") if inside else contextlib.nullcontext():
        for step in range(4):
            optimizer.zero_grad()
            loss = model(features_of(10 * step + dist.get_rank(), 4, 7)).float().square().mean()
            if step % 2:
                # Between forward and backward too
                losses.append(evaluate(model).float().sum().item())
            loss.backward()
            losses += [loss.item(), evaluate(model).float().sum().item()]
            optimizer.step()
            losses.append(evaluate(model).float().sum().item())
    return losses


def test_training_and_evaluating_in_turns_has_the_same_bits_inside() -> None:
    assert run_ranks(2, trains_alike, True) == run_ranks(2, trains_alike, False)


def under_a_limit() -> list[int]:
    import onefold

    model = sharded()
    root = onefold.engine_of(model).units[0].numel
    engine = onefold.engine_of(model)
    limit = 4 * (root + 2 * BLOCK) + 100
    out = []
    with onefold.keep_gathered(model, limit):
        evaluate(model)
        sent(model)
        engine.memory.reset_peak()
        evaluate(model)
        peak = engine.memory.peak()["gathered units"]
        out += [
            held(model) - 4 * (root + 2 * BLOCK),
            sent(model) - 2 * BLOCK,
            peak - 4 * (root + 3 * BLOCK),
        ]
    return out


def test_what_does_not_fit_under_the_limit_is_gathered_in_each_pass() -> None:
    """Three blocks and the root; room for the root and two blocks, by the order of the forward
    pass. The third comes and goes.
    """
    assert run_ranks(2, under_a_limit) == [[0, 0, 0], [0, 0, 0]]


def uneven(limit: int | None) -> int:
    import onefold

    model = sharded(stall_timeout=2.0)
    passes = 7 if dist.get_rank() == 0 else 2
    with onefold.keep_gathered(model, limit):
        for _ in range(passes):
            evaluate(model)
    model(features_of(0, 4, 7)).square().mean().backward()
    return passes


def test_ranks_may_make_different_numbers_of_passes_when_all_units_stay() -> None:
    assert run_ranks(2, uneven, None) == [7, 2]


def test_ranks_that_make_different_numbers_of_passes_under_a_limit_are_told() -> None:
    outcomes = outcomes_of(2, uneven, 4000, timeout=60.0)
    assert "StallError" in {o.error for o in outcomes}, outcomes


def refused() -> list[str]:
    import onefold

    found = []
    model = sharded()
    for limit in ("8 gigs", -1, True):
        try:
            with onefold.keep_gathered(model, limit):
                found.append(f"{limit!r} was let pass")
        except ValueError as error:
            found += [] if "limit=" in str(error) else [str(error)]
    try:
        with onefold.keep_gathered(model), onefold.keep_gathered(model, "1GB"):
            found.append("a context inside itself was let pass")
    except RuntimeError as error:
        found += [] if "inside keep_gathered" in str(error) else [str(error)]
    for stage in (0, 1, 2):  # nothing is ever gathered for a pass there
        other = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=10.0))
        with onefold.keep_gathered(other, "1KB"):
            evaluate(other)
    return found


def test_a_limit_that_is_none_and_a_context_inside_itself_are_refused() -> None:
    assert run_ranks(2, refused) == [[], []]
