"""Runs of trainer_script.py on the ranks of a test, several in one process, beside DDP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def ds(stage: int, **more: Any) -> dict[str, Any]:
    """A configuration as it stands in transformers' documentation, with "auto"."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "sub_group_size": 1e9,
        }
    return {"zero_optimization": zero, "steps_per_print": float("inf"), **BATCH, **more}


def runs(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """{name: what rank 0 of the script saw} of each case, in order; a failure is its message."""
    # As a launcher sets them: Trainer reads them
    import torch.distributed as dist

    import onefold.deepspeed

    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    onefold.deepspeed.serve()
    import trainer_script
    from accelerate.state import AcceleratorState

    if dist.get_rank() == 0 and not (Path(folder) / "model").exists():
        trainer_script.made().save_pretrained(Path(folder) / "model")
    dist.barrier()
    out: dict[str, Any] = {}
    for case in cases:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]
        trainer_script.main({"folder": folder, "keep_group": True, **case})
        dist.barrier()
        out[case["name"]] = json.loads((Path(folder) / f"{case['name']}.json").read_text())
    return out
