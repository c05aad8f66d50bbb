"""Context parallelism, as examples/context_parallel.py has it: at every stage the same as one process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from ranks import RankFailure, run_ranks
from zoo import tokens_of

pytestmark = pytest.mark.one_in(4)

SERVER = "libraries"

STAGES, STEPS, LENGTH, VOCABULARY = (0, 1, 2, 3), 3, 16, 64
EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"
PLAN = {
    **{f"model.layers.*.{w}": ColwiseParallel() for w in ("self_attn.q_proj", "self_attn.k_proj",
       "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")},
    **{f"model.layers.*.{w}": RowwiseParallel() for w in ("self_attn.o_proj", "mlp.down_proj")},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`way`: a function of the example. `dp`, `cp`, `tp`: sizes of the axes; `first`: the name of
    the first one.
    """

    way: str
    dp: int = 1
    cp: int = 4
    tp: int = 1
    micro_batches: int = 1
    checkpointing: bool = False
    first: str = "dp_shard"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("context_parallel", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for i, param in enumerate(model.parameters()):  # also norms, which start as ones
        noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(i))
        param.data.add_(noise * 0.1)
    return model


def step_of(case: Case, dp: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each micro-batch. The first part of four has no label that counts."""
    found = []
    for i in range(case.micro_batches):
        tokens = tokens_of(100 * dp + 10 * step + i, batch=2, length=LENGTH, vocabulary=VOCABULARY)
        labels = tokens.clone()
        labels[0, 1 : 5 + 3 * dp + step] = -100  # the first label is nobody's target
        labels[1, 1 : 6 + i] = -100
        labels[1, LENGTH - 2 * dp - 1 :] = -100
        found.append((tokens, labels))
    return found


def mesh_of(case: Case) -> DeviceMesh:
    return init_device_mesh(
        "cpu", (case.dp, case.cp, case.tp), mesh_dim_names=(case.first, "cp", "tp")
    )


def trained(stage: int, case: Case, data: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Train on the mesh. Returns losses and norms of each step, and on rank 0 the weights."""
    from transformers import AttentionInterface

    import onefold

    given, mesh = example(), mesh_of(case)
    given.DATA = (case.first, "cp")
    AttentionInterface.register("over_cp", partial(getattr(given, case.way), mesh["cp"]))
    model = built("over_cp")
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    if case.tp > 1:
        parallelize_module(model, mesh["tp"], PLAN)
    recipe = onefold.Recipe.zero(stage, gradients="sum", stall_timeout=30.0)
    model = onefold.shard(model.train(), recipe, mesh=mesh, data=data or given.DATA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms, here = [], [], []
    for step in range(STEPS):
        batches = [
            given.part_of(mesh["cp"], tokens, labels)
            for tokens, labels in step_of(case, mesh.get_local_rank(case.first), step)
        ]
        mine = torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum()
        counted, loss = given.summed(mine, mesh), torch.zeros((), device="cpu")
        for i, batch in enumerate(batches):
            last = i + 1 == len(batches)
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                one = model(**batch, num_items_in_batch=counted, use_cache=False).loss
                one.backward()
            loss = loss + one.detach()
        losses.append(given.summed(loss, mesh).item())
        norms.append(onefold.clip_grad_norm_(model, 0.5).item())
        here.append(int(mine))
        optimizer.step()
        optimizer.zero_grad()
    flats = [flat for unit in onefold.engine_of(model).units for flat in unit.flats]
    return {
        "losses": losses,
        "norms": norms,
        "counted": here,
        "divided by": {(flat.in_boxes, flat.size) for flat in flats},
        "owned": sum(flat.owned[1] - flat.owned[0] for flat in flats),
        "numel": sum(flat.layout.numel for flat in flats),
        "weights": onefold.full_state_dict(model),
    }


def at_stages(case: Case) -> list[dict[str, Any]]:
    return [trained(stage, case) for stage in STAGES]


def in_one_process(case: Case, decay: float = 0.01) -> dict[str, Any]:
    """The same training on whole samples."""
    model = built("sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [batch for dp in range(case.dp) for batch in step_of(case, dp, step)]
        counted = torch.stack([(labels[:, 1:] != -100).sum() for _, labels in batches]).sum()
        total = torch.zeros((), device="cpu")
        for tokens, labels in batches:
            loss = model(input_ids=tokens, labels=labels, num_items_in_batch=counted).loss
            loss.backward()
            total = total + loss.detach()
        losses.append(total.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": model.state_dict()}


AXES: dict[str, dict[str, Any]] = {
    "cp 4": {},
    "dp 2 and cp 2": {"dp": 2, "cp": 2},
    "cp 2 and tp 2": {"cp": 2, "tp": 2},
    "micro-batches, recomputed": {"dp": 2, "cp": 2, "micro_batches": 2, "checkpointing": True},
}


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("way", ["gathered", "ulysses"])
def test_every_stage_trains_parts_of_samples_as_one_process_does_whole_ones(
    way: str, axes: str
) -> None:
    case, name = Case(way, **AXES[axes]), f"{way}, {axes}"
    expected = in_one_process(case)
    found = run_ranks(case.dp * case.cp * case.tp, at_stages, case)
    first = None
    for stage, ranks in zip(STAGES, zip(*found, strict=True), strict=True):
        weights = ranks[0]["weights"]
        assert len({tuple(seen["counted"]) for seen in ranks}) > 1, "all ranks count as many tokens"
        data = case.dp * case.cp
        divided = {(False, data * case.tp)} | ({(True, data)} if case.tp > 1 else set())
        for rank, seen in enumerate(ranks):
            told = f"{name}, stage {stage}, rank {rank}: {seen}, expected {expected}"
            assert seen["losses"] == pytest.approx(expected["losses"], rel=2e-5), told
            assert seen["norms"] == pytest.approx(expected["norms"], rel=2e-5), told
            assert seen["divided by"] == divided, told
        for key, value in expected["weights"].items():
            difference = (weights[key] - value).abs().max().item()
            assert difference < 2e-5, f"{name}, stage {stage}: {key} differs by {difference}"
        bits = ranks[0]["losses"], ranks[0]["norms"]
        # Stages 2 and 3 reduce in every micro-batch, and so add up in another order
        if first is None or (stage == 2 and case.micro_batches > 1):
            first = bits, weights
        assert bits == first[0], f"{name}: stage {stage} has other bits: {bits}, {first[0]}"
        for key, value in weights.items():
            assert torch.equal(value, first[1][key]), f"{name}: {key} at stage {stage}"


def by_trainer(folder: str, case: Case) -> dict[str, Any]:
    """The same training by `onefold.hf.Trainer` at stage 3: its loss is over all counted tokens."""
    from transformers import AttentionInterface, TrainingArguments

    import onefold.hf

    os.environ |= {  # as a launcher sets it
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    given, mesh = example(), mesh_of(case)
    cp, dp = mesh["cp"], mesh["dp_shard"]
    AttentionInterface.register("over_cp", partial(getattr(given, case.way), cp))

    def parts(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        tokens, labels = (torch.stack(x) for x in zip(*rows, strict=True))
        return given.part_of(cp, tokens, labels)

    class OverContext(onefold.hf.Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            samples, size = self.train_dataset, self.args.per_device_train_batch_size
            sampler = DistributedSampler(samples, dp.size(), dp.get_local_rank(), shuffle=False)
            return DataLoader(samples, size, sampler=sampler, collate_fn=parts)

    batches = [
        batch for step in range(STEPS) for i in range(case.dp) for batch in step_of(case, i, step)
    ]
    samples = [row for tokens, labels in batches for row in zip(tokens, labels, strict=True)]
    args = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=0.01,
        gradient_accumulation_steps=case.micro_batches, lr_scheduler_type="constant",
        max_grad_norm=0.5, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    recipe = onefold.Recipe.zero(3, stall_timeout=30.0)
    model = onefold.shard(built("over_cp"), recipe, mesh=mesh, data=("dp_shard", "cp"))
    own = onefold.hf.Trainer(model, args, train_dataset=samples, recipe=recipe)
    for loader, call in {
        "train": own.train,
        "eval": lambda: own.evaluate(samples),
        "test": lambda: own.predict(samples),
    }.items():
        with pytest.raises(ValueError, match=f"along 'cp' need parts.*get_{loader}_dataloader"):
            call()
    trainer = OverContext(model, args, train_dataset=samples, recipe=recipe)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "losses": [log["loss"] for log in logs],
        "norms": [float(log["grad_norm"]) for log in logs],
        "weights": onefold.full_state_dict(model),
    }


@pytest.mark.slow
@pytest.mark.slow
def test_trainer_takes_a_model_that_was_sharded_over_context(tmp_path: Path) -> None:
    case = Case("gathered", dp=2, cp=2, micro_batches=2)
    expected = in_one_process(case, decay=0.0)
    found = run_ranks(4, by_trainer, str(tmp_path), case)
    for seen in found:
        for what in ("losses", "norms"):
            assert seen[what] == pytest.approx(expected[what], rel=1e-4), (what, seen, expected)
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found[0]["weights"][key], value, rtol=1e-4, atol=2e-5)


def test_replicas_divide_state_over_context_inside_each() -> None:
    case = Case("ulysses", dp=2, cp=2, first="dp_replicate")
    expected = in_one_process(case)
    found = run_ranks(4, trained, 3, case)
    for seen in found:
        for what in ("losses", "norms"):
            assert seen[what] == pytest.approx(expected[what], rel=2e-5), (what, seen, expected)
        assert seen["owned"] == seen["numel"] // 2, seen
    for key, value in expected["weights"].items():
        difference = (found[0]["weights"][key] - value).abs().max().item()
        assert difference < 2e-5, f"{key} differs by {difference}"


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank of `ranks` sends with collectives."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.nbytes = ranks, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("_c10d_functional::")
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
            each = 1 if name == "all_gather_into_tensor" else 1 / self.ranks  # of what a rank gives
            self.nbytes += args[0].nbytes * (self.ranks - 1) * each
        return func(*args, **(kwargs or {}))


def attended() -> dict[str, tuple[Any, Any]]:
    """{what: (the part of a rank, what it should be)} in fp64: the output, three gradients, and bytes
    sent, for as many heads of keys as of queries, and for fewer than ranks.
    """
    cp = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    return {
        f"{what}, {way}, {heads} heads of keys": pair
        for way in ("gathered", "ulysses")
        for heads in (4, 2, 1)
        for what, pair in attended_with(example(), cp, way, heads).items()
    }


def attended_with(given: Any, cp: DeviceMesh, way: str, heads: int) -> dict[str, tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"query": 4, "key": heads, "value": heads, "gradient": 4}
    whole = {
        what: torch.randn(2, n, LENGTH, 4, dtype=torch.float64, generator=generator)
        for what, n in shapes.items()
    }
    gradient = whole.pop("gradient")
    mine = {what: _part(cp, x).requires_grad_() for what, x in whole.items()}
    whole = {what: x.requires_grad_() for what, x in whole.items()}
    attend = partial(getattr(given, way), cp, None, mask=None, scaling=0.3)
    out, _ = attend(**mine)
    with Sent(cp.size()) as backward:
        out.backward(_part(cp, gradient).transpose(1, 2))
    given.causal_lower_right = lambda q, k: torch.ones(q, k, device="cpu").tril(k - q) > 0
    with Sent(cp.size()) as forward:  # in a mode like this torch 2.13 cannot make its own mask
        again, _ = attend(**mine)
    assert torch.equal(again, out)
    wanted = F.scaled_dot_product_attention(**whole, is_causal=True, scale=0.3, enable_gqa=True)
    wanted.backward(gradient)
    each = (
        2 * LENGTH / cp.size() * 4 * 8 * (cp.size() - 1)
    )  # of a head: samples, tokens, width, bytes
    repeated = heads if heads % cp.size() == 0 else 4
    bytes_sent = each * 2 * heads if way == "gathered" else each / cp.size() * 2 * (4 + repeated)
    seen: dict[str, tuple[Any, Any]] = {
        "output": (out.detach(), _part(cp, wanted.detach()).transpose(1, 2)),
        "bytes": ((forward.nbytes, backward.nbytes), (bytes_sent, bytes_sent)),
    }
    return seen | {f"gradient of {w}": (x.grad, _part(cp, whole[w].grad)) for w, x in mine.items()}


def _part(cp: DeviceMesh, x: Tensor | None) -> Tensor:
    assert x is not None
    return x.chunk(cp.size(), 2)[cp.get_local_rank()].contiguous()


def test_a_part_has_the_attention_and_gradients_of_the_whole_and_sends_the_formula() -> None:
    for rank, seen in enumerate(run_ranks(4, attended)):
        assert len(seen) == 2 * 3 * 5
        for what, (got, expected) in seen.items():
            told = f"rank {rank}, {what}: {got}, expected {expected}"
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=told)


def test_context_ranks_that_data_leaves_out_are_told_of_by_name() -> None:
    case = Case("gathered", dp=2, cp=2)
    with pytest.raises(RankFailure) as told:
        run_ranks(4, trained, 2, case, ("dp_shard",))
    assert "apart along 'cp' only, which data=('dp_shard',) does not name" in str(told.value)
    assert "add 'cp' to data" in str(told.value)
