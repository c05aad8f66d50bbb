"""Context parallelism, as examples/context_parallel.py has it: at every stage the same as one process."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import onefold
from on_ranks import on_ranks, slow
from promises.jobs import differing
from reference import by_rank_0, differences
from tiny_transformers import divisible
from zoo import tokens_of

SERVER = "libraries"
STEPS, LENGTH = 2, 16
EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"
PLAN = {
    **{f"model.layers.*.{w}": ColwiseParallel() for w in ("self_attn.q_proj", "self_attn.k_proj",
       "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")},
    **{f"model.layers.*.{w}": RowwiseParallel() for w in ("self_attn.o_proj", "mlp.down_proj")},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`way`: a function of the example."""

    way: str
    dp: int = 1
    cp: int = 4
    tp: int = 1
    micro_batches: int = 1
    ci: bool = False


def example() -> Any:
    spec = importlib.util.spec_from_file_location("context_parallel", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_of(case: Case, dp: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each micro-batch. The first part of four has no label that counts."""
    found = []
    for i in range(case.micro_batches):
        tokens = tokens_of(100 * dp + 10 * step + i, batch=2, length=LENGTH)
        labels = tokens.clone()
        labels[0, 1 : 5 + 3 * dp + step] = -100  # the first label is nobody's target
        labels[1, 1 : 6 + i] = -100
        labels[1, LENGTH - 2 * dp - 1 :] = -100
        found.append((tokens, labels))
    return found


def sharded(
    stage: int, case: Case, data: Any = ("dp_shard", "cp"), **options: Any
) -> tuple[Any, Any, Any]:
    """(the example, the model, its mesh)"""
    from transformers import AttentionInterface

    given, sizes = example(), (case.dp, case.cp, case.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "cp", "tp"))
    AttentionInterface.register("over_cp", partial(getattr(given, case.way), mesh["cp"]))
    model = divisible("Llama", attn_implementation="over_cp").train()
    if case.micro_batches > 1:
        model.gradient_checkpointing_enable()
    if case.tp > 1:
        parallelize_module(model, mesh["tp"], PLAN)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **options)
    return given, onefold.shard(model, recipe, mesh=mesh, data=data), mesh


Seen = tuple[list[float], list[float], dict[str, Tensor]]


def trained(stage: int, case: Case) -> Seen:
    """(losses, norms, weights)"""
    given, model, mesh = sharded(stage, case, reduce_op="sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [
            given.part_of(mesh["cp"], tokens, labels)
            for tokens, labels in step_of(case, mesh.get_local_rank("dp_shard"), step)
        ]
        mine = torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum()
        counted, loss = given.summed(mine, mesh), torch.zeros(())
        for i, batch in enumerate(batches):
            last = i + 1 == len(batches)
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                one = model(**batch, num_items_in_batch=counted, use_cache=False).loss
                one.backward()
            loss = loss + one.detach()
        losses.append(given.summed(loss, mesh).item())
        norms.append(onefold.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, onefold.full_state_dict(model)


@by_rank_0
def in_one_process(case: Case) -> Seen:
    """The same training on whole samples."""
    model = divisible("Llama", attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [batch for dp in range(case.dp) for batch in step_of(case, dp, step)]
        counted = torch.stack([(labels[:, 1:] != -100).sum() for _, labels in batches]).sum()
        losses.append(0.0)
        for tokens, labels in batches:
            loss = model(input_ids=tokens, labels=labels, num_items_in_batch=counted).loss
            loss.backward()
            losses[-1] += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, dict(model.state_dict())


CASES = {
    "gathered, dp 2 and cp 2": Case("gathered", dp=2, cp=2, ci=True),
    "ulysses, cp 2 and tp 2": Case("ulysses", cp=2, tp=2, ci=True),
    "gathered, recomputed": Case("gathered", dp=2, cp=2, micro_batches=2),
    "ulysses, cp 4": Case("ulysses"),
}


@on_ranks(4)
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=() if c.ci else slow) for n, c in CASES.items()]
)
def test_parts_of_samples_train_as_one_process_does_whole_ones(case: Case, every: bool) -> None:
    losses, norms, weights = in_one_process(case)
    first: Seen | None = None
    for stage in (1, 2, 3) if every else (1, 3):
        seen = trained(stage, case)
        assert seen[0] == pytest.approx(losses, rel=2e-5), f"stage {stage}"
        assert seen[1] == pytest.approx(norms, rel=2e-5), f"stage {stage}"
        assert not seen[2] or not differences(weights, seen[2], 1e-4, 2e-5), f"stage {stage}"
        # Stages 2 and 3 reduce in every micro-batch, and so add up in another order
        first = seen if first is None or (case.micro_batches > 1 and stage == 2) else first
        if every or case.micro_batches == 1:
            assert seen[:2] == first[:2], f"stage {stage} has other bits"
            assert not [*differing(f"stage {stage}", first[2], seen[2])]


@on_ranks(4)
def test_context_ranks_that_data_leaves_out_are_told_of_by_name() -> None:
    case = Case("gathered", dp=2, cp=2)
    given, model, mesh = sharded(2, case, ("dp_shard",))
    ((tokens, labels),) = step_of(case, mesh.get_local_rank("dp_shard"), 0)
    with pytest.raises(ValueError, match=r"apart along 'cp' only.*add 'cp' to data"):
        model(**given.part_of(mesh["cp"], tokens, labels), use_cache=False).loss.backward()
