"""What is measured is what is there: bytes at rest tensor by tensor, the peak of a recorded step,
and the machine's own books.
"""

from __future__ import annotations

import pytest
import torch
from observed_loops import one_step, sharded
from torch import nn

import onefold
from onefold.observe import measured, reconciled, record
from onefold.observe.memory import moments_of
from onefold.plan.schema import ACTIVATIONS, ENGINE, MASTERS, MOMENTS, PARAMETERS, compare


def storages(tensors: list[torch.Tensor]) -> int:
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "bf16")])
def test_bytes_at_rest_are_the_bytes_of_the_tensors(stage: int, precision: str) -> None:
    model, optimizer = sharded(stage, precision)
    one_step(model, optimizer)
    account = measured(model, optimizer)
    own = storages([p.data for p in model.parameters()])
    state = storages(
        [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    )
    assert account.rest[MOMENTS] == moments_of(optimizer) == state
    masters = account.rest.get(MASTERS, 0) or account.rest[PARAMETERS]
    assert masters == own, f"the ledger says {account.rest}, the parameters hold {own} bytes"
    assert account.wire == {} and account.links == {}, "a lone rank sends nothing"


def test_the_peak_of_a_recorded_step_holds_engine_moments_and_activations_at_one_moment() -> None:
    model, optimizer = sharded(3, "bf16")
    one_step(model, optimizer)
    with record(model, optimizer, activations=True) as seen:
        one_step(model, optimizer, 1)
    account = measured(model, optimizer, seen)
    _, levels = seen.levels()
    highest = max(sum(level) for level in zip(*levels.values(), strict=True))
    assert account.peak_bytes == highest >= account.rest_bytes
    assert account.peak[MOMENTS] == account.rest[MOMENTS]
    assert max(levels[ACTIVATIONS]) > 0
    engine = [
        sum(levels[c][i] for c in ENGINE if c in levels) for i in range(len(levels[ACTIVATIONS]))
    ]
    ledger = onefold.engine_of(model).memory.peak()
    assert max(engine) == sum(ledger.values()), (
        f"recorded {max(engine)}, the ledger's own peak is {ledger}"
    )


def test_an_account_compares_with_itself_line_by_line() -> None:
    model, optimizer = sharded(3, "bf16")
    one_step(model, optimizer)
    with record(model, optimizer) as seen:
        one_step(model, optimizer)
    account = measured(model, optimizer, seen, tokens_per_s=10.0, mfu=0.5)
    lines = compare(account, account)
    assert {line.ratio for line in lines if line.predicted} == {1.0}
    assert {"at rest: moments", "at peak: all", "time: optimizer", "tokens/s", "MFU"} <= {
        line.name for line in lines
    }


def test_on_a_cpu_the_ledger_lies_inside_the_resident_memory() -> None:
    model = onefold.shard(nn.Linear(2048, 2048), onefold.Recipe.zero(3))
    account = measured(model)
    found = reconciled(model, account)
    assert found.device == "cpu" and found.fragmentation == found.reserved == 0
    assert found.ledger == account.rest_bytes >= 2048 * 2048 * 4
    assert 0 < found.ledger < found.resident <= found.resident_peak
    assert found.unaccounted == found.resident - found.ledger
