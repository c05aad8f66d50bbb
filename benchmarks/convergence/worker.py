"""One rank of one side, started by `launch.run_ranks`."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from benchmarks.convergence.settings import SIDES, Case
from benchmarks.launch import join as meet
from onefold.comm import MOVES
from onefold.data.order import DataOrder
from onefold.data.samples import Data, eval_batches, held_out_batch, load_data
from onefold.models.build import Loaded, load_model, load_on_first_rank
from onefold.processes.ranks import Ranks
from onefold.train.prepare import lr_factor, names_without_decay, parameter_groups

HELD_OUT_SHARE = 0.1
WARMUP = 0.05
LAST_LR = 0.1
CLIP = 1.0
DECAY = 0.01


def adapted(module: nn.Module, rank: int, seed: int) -> nn.Module:
    """The module with LoRA adapters (Hu et al. 2021) around linear layers; the rest is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    wrapped: Any = get_peft_model(module, config)  # type: ignore[arg-type]
    return wrapped


def nudged(module: nn.Module, by: float, seed: int) -> None:
    """Multiply every weight that is here by 1 + `by` x a normal random number."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_meta:
                parameter.mul_(1.0 + by * torch.randn(parameter.shape, generator=generator))


def held_out_loss(model: nn.Module, data: Data, case: Case, ranks: Ranks) -> float:
    """Mean loss a token of the first `case.held_out` held-out samples. Collective."""
    total = counted = 0.0
    model.eval()
    with torch.no_grad():
        for indices, real in eval_batches(
            len(data.held_out), case.held_out, ranks.rank, ranks.world_size, case.eval_batch
        ):
            batch, count = held_out_batch(data.held_out, indices, real)
            total += float(model(**batch, use_cache=False).loss) * count
            counted += count
    model.train()
    total, counted = ranks.sum(total, counted)
    return total / counted


def loss_of_masters(model: nn.Module, data: Data, case: Case, ranks: Ranks) -> float:
    """The same of what a checkpoint holds, nothing encoded: by rank 0 alone. Collective."""
    state = onefold.full_state_dict(model)
    loss = 0.0
    if ranks.is_first:
        whole = load_model(case.model, case.tokenizer, case.seed, case.seq).module
        whole.load_state_dict(state)
        loss = held_out_loss(
            whole, data, case, Ranks(0, 1, 0, 1, ranks.device, ranks.backend, None)
        )
    return float(ranks.from_first(loss))


def _between(traffic: Any) -> int:
    """Bytes of parameters and gradients to other nodes; the model's own buffers are left out."""
    return sum(nbytes for move, nbytes in traffic.between_by_move().items() if move in MOVES)


def train(case: Case, name: str, ranks: Ranks, patience: float) -> dict[str, Any]:
    """Train one side of a case. Collective.

    Args:
        patience: seconds that a rank waits for the others.

    Returns: losses of all steps (mean over ranks), [step, loss] of the held-out text, seconds of
    all steps, bytes.
    """
    side = SIDES[name]
    loaded: Loaded = load_on_first_rank(case.model, case.tokenizer, case.seed, case.seq, ranks)
    assert loaded.tokenizer is not None
    data = load_data(case.data, loaded.tokenizer, case.seq, case.seed, HELD_OUT_SHARE)
    module = adapted(loaded.module, case.lora, case.seed) if case.lora else loaded.module
    if side.nudge:
        nudged(module, side.nudge, case.seed)
    whole = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    without_decay = names_without_decay(module)
    recipe = onefold.Recipe.zero(
        3, precision=case.precision, group="node", stall_timeout=patience, **side.arguments
    )
    model = onefold.shard(module, recipe, device=ranks.device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model.named_parameters(), without_decay, DECAY), lr=case.lr, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lr_factor("cosine", case.steps, round(WARMUP * case.steps), LAST_LR)
    )
    order = DataOrder(len(data.train), case.micro_batch * ranks.world_size, case.seed + side.seed)
    traffic = onefold.engine_of(model).traffic
    held_out, losses, seconds, between = [[0, held_out_loss(model, data, case, ranks)]], [], [], 0
    for step in range(case.steps):
        begun, before = time.perf_counter(), _between(traffic)
        (indices,) = order.micro_batches(step, ranks.rank, ranks.world_size, case.micro_batch)
        loss = model(**data.train.batch(indices), use_cache=False).loss
        loss.backward()
        onefold.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(ranks.sum(loss.item())[0] / ranks.world_size)
        seconds.append(time.perf_counter() - begun)
        between += _between(traffic) - before
        if (step + 1) % case.every == 0 or step + 1 == case.steps:
            held_out.append([step + 1, held_out_loss(model, data, case, ranks)])
        if ranks.is_first and (step < 3 or (step + 1) % 10 == 0):
            print(
                f"step {step + 1}: loss {losses[-1]:.4f}, held out {held_out[-1][1]:.4f},"
                f" {seconds[-1]:.2f} s",
                flush=True,
            )
    masters = loss_of_masters(model, data, case, ranks) if recipe.parameters.codec else None
    return {
        "rank": ranks.rank,
        "losses": losses,
        "held_out": held_out,
        "masters": masters,
        "step_s": seconds,
        "parameters": whole,
        "trained": trained,
        "between_bytes": between / case.steps,
        "held_out_samples": len(data.held_out),
    }


def join(job: dict[str, Any]) -> None:
    """As a launcher would say where nodes end."""
    os.environ["LOCAL_WORLD_SIZE"] = str(job["case"]["ranks_a_node"])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    meet(job, timeout=datetime.timedelta(seconds=job["timeout"]))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train the job's side on this rank."""
    case, rank, patience = Case.of(job["case"]), job["rank"], float(job["timeout"])
    control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=patience))
    ranks = Ranks(rank, case.ranks, rank, case.ranks, torch.device("cpu"), "gloo", control)
    return train(case, job["side"], ranks, patience)
