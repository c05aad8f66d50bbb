"""What autograd keeps is counted byte by byte, when it is kept and when it goes, and the counting
changes nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from observed_loops import sharded

from onefold.observe.activations import Activations
from onefold.observe.memory import Held, ordered
from zoo import tokens_of

pytestmark = pytest.mark.one_in(4)


def now(saved: Activations) -> dict[str, int]:
    *_, (_, level) = Held(changes=saved.changes).levels()
    return ordered(level)


def peak(saved: Activations) -> dict[str, int]:
    return Held(changes=saved.changes).peak()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_every_stage_keeps_the_same_activations(precision: str, checkpointing: str) -> None:
    """Gathered parameters are no activations, wherever they lie."""
    peaks = {}
    for stage in (0, 1, 2, 3):
        model, _ = sharded(stage, precision, checkpointing)
        model.config = SimpleNamespace(vocab_size=61)
        with Activations(model) as saved:
            loss = model(tokens_of(0))
            before = now(saved)
            loss.backward()
            assert now(saved) == {}, (
                f"stage {stage}: {now(saved)} is still accounted for after backward"
            )
        peaks[stage] = before, peak(saved)
    assert all(seen == peaks[0] for seen in peaks.values()), peaks


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_a_checkpointed_model_keeps_less_and_its_recomputation_is_seen(checkpointing: str) -> None:
    def run(kind: str) -> tuple[int, int]:
        model, _ = sharded(3, "bf16", kind)
        with Activations(model) as saved:
            loss = model(tokens_of(0))
            kept = sum(now(saved).values())
            loss.backward()
        return kept, sum(peak(saved).values())

    whole, whole_peak = run("none")
    kept, most = run(checkpointing)
    blocks = 3
    assert whole == whole_peak, "without checkpointing nothing is added in the backward pass"
    assert kept < most < whole, f"kept {kept}, peak {most}, without checkpointing {whole}"
    assert most - kept > (whole - kept) / (2 * blocks), (
        f"the recomputed block adds only {most - kept} bytes to {kept}"
    )
