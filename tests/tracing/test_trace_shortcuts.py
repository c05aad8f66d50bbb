"""What the tracer leaves out without a difference, how it asks for what it needs, and what it
refuses.
"""

from __future__ import annotations

from typing import Any

import pytest
from measured_memory import RealStep, seeded
from test_trace import batch_of, build, needs_transformers
from torch import Tensor, nn

from onefold.tracing.trace import Activity, between, trace
from zoo import TinyGPT, features_of, tokens_of

pytestmark = pytest.mark.one_in(9)

# -- shortcuts -------------------------------------------------------------------------------------


def whole_trace(
    module: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Activity:
    """A trace in which every block runs."""
    with monkeypatch.context() as patch:
        patch.setattr("onefold.tracing.trace.shorter", lambda *_: None)
        return trace(module, batch, **options)


@pytest.mark.parametrize(
    ("depth", "checkpointing"), [(12, "none"), (13, "selective"), (12, "full")]
)
def test_equal_blocks_left_out_of_a_trace_change_nothing_in_it(
    depth: int, checkpointing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = TinyGPT(width=32, heads=4, depth=depth, tied=True)
    ran: list[int] = []
    handles = [
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
        for i, block in enumerate(module.blocks)
    ]
    short = trace(module, (tokens_of(0),), checkpointing=checkpointing)
    assert len(set(ran)) < depth
    for handle in handles:
        handle.remove()
    assert short == whole_trace(module, (tokens_of(0),), monkeypatch, checkpointing=checkpointing)
    assert [n for n, _ in module.blocks.named_children()] == [str(i) for i in range(depth)]


@needs_transformers
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("GPT-2", {"n_layer": 8}),
        ("Llama", {"num_hidden_layers": 8}),
        ("Mixtral, grouped", {"num_hidden_layers": 8}),
        ("T5", {"num_layers": 8}),
    ],
)
def test_equal_layers_of_transformers_are_left_out_without_a_difference(
    name: str, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build(name, **changes)
    assert trace(module, batch_of(name)) == whole_trace(module, batch_of(name), monkeypatch)


def test_blocks_that_differ_are_all_run() -> None:
    module = TinyGPT(width=32, heads=4, depth=8)
    module.blocks[3].mlp[0] = nn.Linear(32, 128, bias=False)
    module.blocks[5].mlp[3].p = 0.5
    said = trace(module, (tokens_of(0),))
    with seeded():
        assert (
            sum(row.kept for row in said.rows) == RealStep(module, (tokens_of(0),), "fp32").saved()
        )


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_larger_micro_batches_follow_from_small_ones(checkpointing: Any) -> None:
    module = TinyGPT(width=32, heads=4, depth=8)

    def traced(b: int) -> Activity:
        batch = (tokens_of(0, batch=b),)
        return trace(module, batch, checkpointing=checkpointing, precision="bf16")

    for b in (1, 2, 3, 5, 12):
        assert between(traced, b) == traced(b), b


# -- sentences -------------------------------------------------------------------------------------


class Picky(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[y > 0]


def test_sizes_that_depend_on_computed_values_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="computed floating-point values"):
        trace(Picky(4, 4), (features_of(0, 3, 4),))
