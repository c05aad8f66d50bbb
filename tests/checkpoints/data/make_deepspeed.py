"""Make the checkpoints in this folder with DeepSpeed 0.19.8 itself:
`python make_deepspeed.py FOLDER [CASE ...]`.

    DeepSpeed, N gloo ranks: 3 steps │ save_checkpoint │ 4 steps more
                                     │                 └─ their losses       ─┐
                                     ├─ the tag folder and `latest`          ─┼─► FOLDER/CASE.zip
                                     └─ DeepSpeed's own view of each tensor  ─┘   (digests, in case.json)

The interpreter needs torch and deepspeed alone. Tests import `Tiny`, `CASES` and `batches` from
here, without DeepSpeed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

BEFORE, AFTER = 3, 4
SAMPLES, LENGTH, WORDS, WIDTH = 12, 5, 11, 6
TAG = "three steps"


@dataclass(frozen=True)
class Case:
    """One run: its stage, ranks, precision ("fp32", "bf16", "fp16"), and further keys of its
    configuration.
    """

    stage: int
    ranks: int
    precision: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def config(self, ranks: int | None = None) -> dict[str, Any]:
        """The configuration, for `ranks` ranks if it is not to be the saved run's own number."""
        precision = (
            {}
            if self.precision == "fp32"
            else {self.precision: {"enabled": True, **self.more.get(self.precision, {})}}
        )
        return {
            "train_micro_batch_size_per_gpu": SAMPLES // (ranks or self.ranks),
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": 0.02,
                    "betas": [0.8, 0.9],
                    "weight_decay": 0.1,
                    "torch_adam": True,
                },
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6, "warmup_type": "linear"},
            },
            **{name: value for name, value in self.more.items() if name != self.precision},
            **precision,
        }


ROUND_ROBIN, FP32_SUMS = (
    {"round_robin_gradients": True},
    {"data_types": {"grad_accum_dtype": "fp32"}},
)
CASES = {
    "stage-1-fp32-2": Case(1, 2),
    "stage-1-bf16-3": Case(1, 3, "bf16"),
    # Written by another of its classes
    "stage-1-bf16-fp32-sums-2": Case(1, 2, "bf16", more=FP32_SUMS),
    "stage-2-fp32-3": Case(2, 3, zero=ROUND_ROBIN),
    "stage-2-bf16-2": Case(2, 2, "bf16", zero={"parameter_alignment": True}),
    "stage-2-fp16-2": Case(
        2,
        2,
        "fp16",
        more={"fp16": {"initial_scale_power": 16, "hysteresis": 1, "loss_scale_window": 2}},
    ),
    "stage-3-fp32-2": Case(3, 2, zero={"sub_group_size": 50}),
    "stage-3-fp32-3": Case(3, 3),
    "stage-3-bf16-3": Case(3, 3, "bf16", zero={"stage3_param_persistence_threshold": 0}),
}


class Tiny(nn.Module):
    """tokens [batch, length] -> the mean next-token loss. Odd sizes, a tied head, a frozen
    parameter, a buffer, two groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.fixed = nn.Linear(7, 7, bias=False)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.fixed.weight.requires_grad_(False)
        self.register_buffer("gains", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.down(torch.tanh(self.fixed(self.up(self.norm(x) * self.gains.to(x.dtype)))))
        logits = self.head(x)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def groups(self) -> list[dict[str, Any]]:
        """Matrices decay, vectors do not and learn faster."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.dim() > 1]},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]


def batches() -> list[Tensor]:
    """The batch of all ranks for each step, [SAMPLES, LENGTH]."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator) for _ in range(BEFORE + AFTER)
    ]


def digest(tensor: Tensor) -> str:
    """Of the values as fp32."""
    return hashlib.sha256(tensor.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()[
        :16
    ]


# -- with DeepSpeed --------------------------------------------------------------------------------


def train(rank: int, name: str, folder: str) -> None:
    """One rank of one case."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    case = CASES[name]
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/rendezvous", case.ranks),
        rank=rank,
        world_size=case.ranks,
    )
    torch.manual_seed(1)
    model = Tiny()
    with torch.no_grad():
        model.gains.mul_(1.25)  # else a freshly built model would have the same
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.groups(), config=case.config()
    )
    losses, shares = [], SAMPLES // case.ranks
    case_file: dict[str, Any] = {}
    for step, batch in enumerate(batches()):
        if step == BEFORE:
            engine.save_checkpoint(
                f"{folder}/saved",
                TAG,
                client_state={"note": "by hand", "epoch": 2, "seen": torch.arange(3)},
            )
            # It looks for the states after the first group's first step, when the second group has
            # none
            if case.stage < 3:
                engine.optimizer._hp_optimizer_states_linked = False
                engine.optimizer._lazy_init_hp_params_optimizer_state()
            case_file["parameters"] = {n: digest(safe_get_full_fp32_param(p)) for n, p in named}
            for state in ("exp_avg", "exp_avg_sq"):
                case_file[state] = {
                    n: digest(safe_get_full_optimizer_state(p, state)) for n, p in named
                }
            case_file["gains"], case_file["scale"] = (
                digest(model.gains),
                float(getattr(engine.optimizer, "cur_scale", 1.0)),
            )
            case_file["counts"] = [engine.global_steps, engine.skipped_steps]
            case_file["rates"] = [float(rate) for rate in engine.get_lr()]
        loss = engine(batch[rank * shares : (rank + 1) * shares])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / case.ranks)
    if rank == 0:
        case_file.update(
            losses=losses[BEFORE:],
            batches=[b.tolist() for b in batches()[BEFORE:]],
            deepspeed=deepspeed.__version__,
        )
        Path(folder, "case.json").write_text(json.dumps(case_file))
    dist.barrier()
    # At an ordinary end, threads that DeepSpeed leaves running sometimes abort the process
    os._exit(0)


def make(name: str, target: Path) -> Path:
    """`target`/`name`.zip: case.json, and under saved/ what DeepSpeed wrote but the scripts that it
    puts beside.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Its ninja
    os.environ["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", "")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (name, folder), nprocs=CASES[name].ranks)
        files = [
            Path(folder, "case.json"),
            *(
                f
                for f in sorted(Path(folder, "saved").rglob("*"))
                if f.is_file() and f.suffix != ".py"
            ),
        ]
        with zipfile.ZipFile(target / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                archive.write(file, file.relative_to(folder))
    return target / f"{name}.zip"


if __name__ == "__main__":
    into = Path(sys.argv[1])
    into.mkdir(parents=True, exist_ok=True)
    for chosen in sys.argv[2:] or CASES:
        made = make(chosen, into)
        print(f"{made}  {made.stat().st_size} bytes")
