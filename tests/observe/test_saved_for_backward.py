"""What autograd keeps is counted byte by byte, when it is kept and when it goes, and the counting
changes nothing.
"""

from __future__ import annotations

import pytest
import torch
from observed_loops import one_step, sharded
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.observe import watch_activations
from onefold.plan.schema import ACTIVATIONS
from zoo import tokens_of

pytestmark = pytest.mark.one_in(4)


class Chain(nn.Module):
    """Linear, tanh, linear: what is saved can be told by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_every_stage_keeps_the_same_activations(precision: str, checkpointing: str) -> None:
    """Gathered parameters are no activations, wherever they lie."""
    peaks = {}
    for stage in (0, 1, 2, 3):
        model, _ = sharded(stage, precision, checkpointing)
        with watch_activations(model, vocabulary=61) as saved:
            loss = model(tokens_of(0))
            before = saved.now()
            loss.backward()
            assert saved.now() == {}, (
                f"stage {stage}: {saved.now()} is still accounted for after backward"
            )
        peaks[stage] = before, saved.peak()
    assert all(seen == peaks[0] for seen in peaks.values()), peaks


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_a_checkpointed_model_keeps_less_and_its_recomputation_is_seen(checkpointing: str) -> None:
    def run(kind: str) -> tuple[int, int]:
        model, _ = sharded(3, "bf16", kind)
        with watch_activations(model) as saved:
            loss = model(tokens_of(0))
            kept = sum(saved.now().values())
            loss.backward()
        return kept, sum(saved.peak().values())

    whole, whole_peak = run("none")
    kept, peak = run(checkpointing)
    blocks = 3
    assert whole == whole_peak, "without checkpointing nothing is added in the backward pass"
    assert kept < peak < whole, f"kept {kept}, peak {peak}, without checkpointing {whole}"
    assert peak - kept > (whole - kept) / (2 * blocks), (
        f"the recomputed block adds only {peak - kept} bytes to {kept}"
    )


class Gated(nn.Module):
    """A feed-forward whose last layer is all that saves its input, and saves it last: there a
    recomputation ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((8, 16), (8, 16), (16, 8))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x) * self.up(x))


class Recomputed(nn.Module):
    """Three blocks, each computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()


def test_watching_changes_no_loss_and_no_weight() -> None:
    curves = []
    for watched in (False, True):
        model, optimizer = sharded(3, "bf16", "non-reentrant")
        losses = []
        for step in range(3):
            if watched:
                with watch_activations(model):
                    losses.append(one_step(model, optimizer, step)[0])
            else:
                losses.append(one_step(model, optimizer, step)[0])
        curves.append((losses, onefold.full_state_dict(model)))
    (plain, weights), (seen, watched_weights) = curves
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True)), (
        f"{plain} became {seen}"
    )
    assert all(torch.equal(weights[name], watched_weights[name]) for name in weights)


def test_an_error_in_the_forward_pass_leaves_no_hook_behind() -> None:
    model = Chain()
    with pytest.raises(RuntimeError, match="shapes"), watch_activations(model):
        model(torch.randn(5, 9))
    with watch_activations(model) as saved:
        model(torch.randn(2, 8)).backward()
    assert saved.peak() == {ACTIVATIONS: (2 * 8 + 2 * 16) * 4}
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks, f"hooks are left on {hooks}"
