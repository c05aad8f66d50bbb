"""Ray Train places the ranks and restarts them; each runs `onefold train`.

ray job submit --working-dir . -- python examples/launch/ray_train.py
"""

import os
import subprocess
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

RANKS, GPUS = 16, True  # EDIT 1: ranks on all machines, and whether each has a GPU
FOLDER = "/shared/runs/ray"  # EDIT 2: where Ray notes what it does; all machines see it
TRAIN = [  # EDIT 3: model, data, output
    *("--model", "/shared/models/llama-8b", "--data", "/shared/data/notes.jsonl"),
    *("--output", "/shared/runs/a", "--stage", "3", "--precision", "bf16"),
    *("--save-every", "200", "--resume", "auto"),
]


def rank() -> None:
    """Ray has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; a group of its own
    listens on that port already, so the run takes the next one.
    """
    port = str(int(os.environ["MASTER_PORT"]) + 1)
    command = [sys.executable, "-m", "onefold", "train", *TRAIN]
    subprocess.run(command, env={**os.environ, "MASTER_PORT": port}, check=True)


def main() -> None:
    TorchTrainer(
        rank,
        scaling_config=ScalingConfig(num_workers=RANKS, use_gpu=GPUS),
        run_config=RunConfig(storage_path=FOLDER, failure_config=FailureConfig(max_failures=10)),
    ).fit()


if __name__ == "__main__":
    main()
