"""What a run was, for people and for files: its plan before the first step, what its ledgers saw
after the last.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import onefold
from onefold.observe.measure import reconciled
from onefold.observe.runfile import write_observed
from onefold.train.prepare import Run
from onefold.train.tiers import in_a_sentence
from onefold.train.wires import wire_arguments


def observe(run: Run, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Leave what the ledgers saw in the output folder, for `onefold report`. Each rank writes its
    own file.
    """
    if run.measured is None or not rows:
        return
    later = rows[1:] or rows
    step_s = statistics.median(row["step_ms"] for row in later) / 1000
    tokens_per_s = statistics.median(row["tokens_per_s"] for row in later)
    shares = [row["mfu"] for row in later if row.get("mfu") is not None]
    account = replace(
        run.measured,
        seconds={**run.measured.seconds, "step": step_s},
        tokens_per_s=tokens_per_s,
        mfu=statistics.median(shares) if shares else None,
    )
    write_observed(
        folder,
        run.ranks.rank,
        run.ranks.world_size,
        account,
        recipe=run.recipe,
        plan=run.choice.predicted,
        step=run.recording,
        machine=reconciled(run.model, account),
        facts={
            key: value
            for key, value in describe(run).items()
            if isinstance(value, (str, int, float))
            and value != ""
            and key not in ("recipe", "borders")
        },
    )


def describe(run: Run) -> dict[str, Any]:
    """What was chosen and why, ready for JSON."""
    config = run.config
    return {
        "model": run.loaded.name,
        "parameters": run.trained + run.frozen,
        "trained": run.trained,
        "data": run.data.name,
        "samples": len(run.data.train),
        "held_out": len(run.data.held_out),
        "ranks": run.ranks.world_size,
        "device": str(run.ranks.device.type),
        "backend": run.ranks.backend,
        "threads": torch.get_num_threads(),
        "stage": run.choice.stage,
        "reason": run.choice.reason,
        "needed": {str(stage): size for stage, size in run.choice.needed.items()},
        "available": run.choice.available,
        "predicted": run.choice.predicted.to_json() if run.choice.predicted else None,
        "notes": list(run.choice.notes),
        "recipe": run.recipe.describe(),
        "tiers": {
            row: getattr(run.recipe, row).tier.value
            for row in ("parameters", "gradients", "optimizer")
        },
        "off_the_device": in_a_sentence(run.recipe),
        "wires": wire_arguments(config),
        "borders": onefold.engine_of(run.model).group.borders,
        "precision": config.precision,
        "micro_batch": run.choice.micro_batch,
        "global_batch": run.order.global_batch,
        "accumulation": run.accumulation,
        "seq": config.seq,
        "steps": run.steps,
        "epochs": run.steps * run.order.global_batch / len(run.data.train),
        "schedule": f"lr {config.lr:g}, {config.schedule}",
        "output": config.output,
    }
