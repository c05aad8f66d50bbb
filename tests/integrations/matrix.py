"""Tool x feature x stage: what Onefold gives beside the tool's own DDP. Writes benchmarks/results/matrix.md.

    python tests/integrations/matrix.py write

Each cell is a run of a few steps on two ranks, in the same process as the run under DDP that it is
compared with. A cell says "equal" (losses to the last bit), "within 2e-7" (the greatest relative
difference of a loss, rounded up to a power of ten or twice or five times one), or "refused (a)",
with the sentence.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "benchmarks" / "results" / "matrix.md"
STAGES = (1, 2, 3)
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "lightning")

Case = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """One way in.

    Attributes:
        name: for people.
        run: (case, stage or None for DDP, folder) -> losses. Runs on a rank.
        features: {what is asked for: the case}. "reference" in a case is what DDP gets instead.
        before: called once on each rank, before anything of the tool is imported.
        ranks: how many ranks run it.
    """

    name: str
    run: Callable[[Case, int | None, str], list[float]]
    features: dict[str, Case]
    before: Callable[[], None] = field(default=lambda: None)
    ranks: int = 2


# -- the tools -------------------------------------------------------------------------------------

TRAINER: dict[str, Case] = {
    "fp32": {},
    "bf16": {"arguments": {"bf16": True}},
    "fp16": {"arguments": {"fp16": True}, "reference": {"arguments": {"bf16": True}}},
    "accumulation, recomputation, warmup, evaluation": {
        "arguments": {
            "gradient_accumulation_steps": 2, "activation_checkpointing": True,
            "eval_strategy": "steps", "eval_steps": 2, "warmup_steps": 2,
        }
    },
    "gradients clipped": {"arguments": {"max_grad_norm": 0.3}},
    "LoRA": {"lora": True},
    "resumed from a checkpoint of stage 3": {"resumed": True},
}  # fmt: skip


TRL: dict[str, Case] = {
    "SFTTrainer": {"kind": "sft"},
    "SFTTrainer, LoRA": {"kind": "sft", "lora": True},
    "DPOTrainer": {"kind": "dpo"},
    "DPOTrainer, LoRA": {"kind": "dpo", "lora": True},
    "RewardTrainer": {"kind": "reward"},
    "GRPOTrainer, generating": {"kind": "grpo"},
}


def _name(case: Case, stage: int | None) -> str:
    return re.sub(r"\W+", "-", f"{case['name']} {stage}")


def native(case: Case, stage: int | None, folder: str) -> list[float]:
    import hf_trials

    given = {k: v for k, v in case.items() if k not in ("resumed", "frozen")}
    recipe: Any = stage
    if stage is not None and "frozen" in case:
        recipe = {"stage": stage, "frozen": case["frozen"]}
    if case.get("resumed") and stage is not None:
        saves = {"save_strategy": "steps", "save_steps": 2}
        first = {"name": f"before-{stage}", "recipe": 3, "arguments": saves}
        hf_trials.runs([first], folder)
        given["resume"] = f"{folder}/before-{stage}/checkpoint-2"
    name = _name(case, stage)
    return hf_trials.runs([{**given, "name": name, "recipe": recipe}], folder)[name]["loss"]


def by_name(case: Case, stage: int | None, folder: str) -> list[float]:
    import trainer_trials

    given = {k: v for k, v in case.items() if k not in ("resumed", "config", "offload")}
    given["from_pretrained"] = True
    config = dict(case.get("config", {}))
    if case.get("arguments", {}).get("bf16"):
        config["bf16"] = {"enabled": "auto"}
    if case.get("arguments", {}).get("fp16"):
        config["fp16"] = {"enabled": "auto"}
    if case.get("resumed") and stage is not None:
        saves = {"save_strategy": "steps", "save_steps": 2}
        first = {"name": f"before-{stage}", "arguments": saves, "from_pretrained": True}
        trainer_trials.runs([{**first, "deepspeed": trainer_trials.ds(3)}], folder)
        given["resume"] = f"{folder}/before-{stage}/checkpoint-2"
    if stage is not None:
        given["deepspeed"] = trainer_trials.ds(stage, **config)
        for what in ("offload_optimizer", "offload_param") if case.get("offload") else ():
            given["deepspeed"]["zero_optimization"][what] = {"device": "cpu"}
    name = _name(case, stage)
    return trainer_trials.runs([{**given, "name": name}], folder)[name]["losses"]


def tuned(case: Case, stage: int | None, folder: str) -> list[float]:
    import trl_trials

    name = _name(case, stage)
    return trl_trials.runs([{**case, "name": name, "recipe": stage}], folder)[name]["loss"]


def tuned_by_name(case: Case, stage: int | None, folder: str) -> list[float]:
    import trl_trials

    name = _name(case, stage)
    run = {**case, "name": name, "stage": stage}
    return trl_trials.runs_under_the_name([run], folder)[name]["loss"]


def lit_by_name(case: Case, stage: int | None, folder: str) -> list[float]:
    import lightning_name_trials
    import lightning_trials

    given = {k: v for k, v in case.items() if k not in ("name", "offload")}
    offload = {"offload_optimizer": True, "offload_parameters": stage == 3}
    strategy: Any = "ddp"
    if stage is not None:
        more = offload if case.get("offload") else {}
        strategy = lightning_name_trials.strategy(stage=stage, **more)
    name = _name(case, stage)
    run = {**given, "name": name, "strategy": strategy}
    return lightning_trials.runs([run], folder)[name]["loss"]


def lit(case: Case, stage: int | None, folder: str) -> list[float]:
    import lightning_trials

    given = {k: v for k, v in case.items() if k != "name"}
    strategy: Any = "ddp" if stage is None else {"stage": stage}
    name = _name(case, stage)
    run = {**given, "name": name, "strategy": strategy}
    return lightning_trials.runs([run], folder)[name]["loss"]


def on_a_mesh(case: Case, stage: int | None, folder: str) -> list[float]:
    import axes_trials

    return axes_trials.run(case, stage)


def _serve() -> None:
    import onefold.deepspeed

    onefold.deepspeed.serve()


TOOLS = (
    Tool(
        "transformers' Trainer: `onefold.hf.Trainer`",
        native,
        {**TRAINER, "LoRA over a base in 4 bits (nf4)": {"lora": True, "frozen": "nf4"}},
    ),
    Tool(
        "transformers' Trainer: `deepspeed={...}` under `python -m onefold.deepspeed`",
        by_name,
        {
            **TRAINER,
            "optimizer of the JSON": {
                "config": {
                    "optimizer": {
                        "type": "AdamW",
                        "params": {
                            "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto",
                        },
                    }
                }
            },
            "states and parameters on the host": {"offload": True},
        },
        _serve,
    ),
    Tool("TRL: `onefold.hf.TrainerMixin`", tuned, TRL),
    Tool(
        "TRL: `deepspeed={...}` under `python -m onefold.deepspeed`", tuned_by_name, TRL, _serve
    ),
    Tool(
        "Lightning: `onefold.lightning.Strategy`",
        lit,
        {
            "fp32, validation": {"validate": True},
            "accumulation": {"accumulate_grad_batches": 2},
            "gradients clipped": {"gradient_clip_val": 0.1},
            "bf16-mixed": {"precision": "bf16-mixed"},
            "bf16-true": {"precision": "bf16-true"},
            "16-mixed (on the host Lightning computes in bf16)": {"precision": "16-mixed"},
        },
    ),
    Tool(
        "Lightning: its own `DeepSpeedStrategy` under `python -m onefold.deepspeed`",
        lit_by_name,
        {
            "fp32, validation": {"validate": True},
            "accumulation": {"accumulate_grad_batches": 2},
            "gradients clipped": {"gradient_clip_val": 0.1},
            "bf16-true": {"precision": "bf16-true"},
            "states and parameters on the host": {"offload": True},
        },
        _serve,
    ),
    Tool(
        "Other axes, on eight ranks: `onefold.shard(mesh=, data=)`",
        on_a_mesh,
        {
            "tensor parallelism: dp 4 × tp 2": {"axis": "tp"},
            "the same with sequence parallelism": {"axis": "tp", "plan": "sequence"},
            "hybrid: dp_replicate 2 × dp_shard 2 × tp 2": {"axis": "tp", "replicas": 2},
            "experts: dp 4 × ep 2": {"axis": "ep"},
            "a 1F1B pipeline: pp 2 × dp 4": {"axis": "pp"},
            "context parallelism: dp 4 × cp 2": {"axis": "cp"},
        },
        ranks=8,
    ),
)  # fmt: skip


# -- finding out -----------------------------------------------------------------------------------


def found_by(number: int, folder: str) -> dict[str, dict[str, str]]:
    """{feature: {stage: what was found}} of one tool. Runs on each rank, rank 0's counts."""
    tool = TOOLS[number]
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    tool.before()
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    out: dict[str, dict[str, str]] = {}
    for feature, asked in tool.features.items():
        case = {k: v for k, v in asked.items() if k != "reference"} | {"name": feature}
        plain = asked.get("reference", case) | {"name": f"{feature} ddp"}
        reference = tool.run(plain, None, folder)
        cells = out.setdefault(feature, {})
        for stage in STAGES:
            try:
                losses = tool.run(case, stage, folder)
            except (ValueError, NotImplementedError, MisconfigurationException) as error:
                cells[str(stage)] = f"refused: {' '.join(str(error).split())}"
                continue
            cells[str(stage)] = compared(losses, reference)
    return out


def compared(losses: list[float], reference: list[float]) -> str:
    """ "equal", "within 2e-07" or what is wrong."""
    if len(losses) < 2 or len(losses) != len(reference):
        return f"wrong: {len(losses)} losses beside {len(reference)}"
    if losses == reference:
        return "equal"
    if not all(map(math.isfinite, (*losses, *reference))):
        return f"wrong: {losses} beside {reference}"
    off = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(losses, reference, strict=True))
    if off > 0.2:
        return f"wrong: {losses} beside {reference}"
    power = 10.0 ** math.floor(math.log10(off))
    bound = next(step * power for step in (1, 2, 5, 10) if step * power >= off)
    return f"within {bound:.0e}"


def find() -> dict[str, dict[str, dict[str, str]]]:
    """{tool: {feature: {stage: what was found}}}."""
    from ranks import run_ranks

    out = {}
    for number, tool in enumerate(TOOLS):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(tool.ranks, found_by, number, folder, fresh=True, timeout=1200)
        out[tool.name] = found[0]
    return out


# -- the page --------------------------------------------------------------------------------------


def written(found: dict[str, dict[str, dict[str, str]]]) -> str:
    versions = ", ".join(f"{p} {importlib.metadata.version(p).partition('+')[0]}" for p in PACKAGES)
    lines = [
        "# Tools and features, and how near their losses are to DDP's",
        "",
        "Written by `make matrix`; `make test-all` checks that every cell is as it finds it. Each cell is a run of a few",
        "steps of a small model on two ranks on the host (eight for other axes), beside the same script under DDP: losses",
        "equal to the last bit, the greatest relative difference of a loss, or the sentence by which it is refused. 16 bits",
        "differ where DDP casts in each operation, or steps in 16 bits; Trainer's fp16 is compared with bf16 under DDP, a base",
        "in 4 bits with one in fp32. Other axes add up in another order than the whole model does.",
        "",
        f"Versions: {versions}.",
    ]
    sentences: list[str] = []
    for tool, features in found.items():
        lines += [
            "",
            f"## {tool}",
            "",
            "| what | stage 1 | stage 2 | stage 3 |",
            "|---|---|---|---|",
        ]
        for feature, cells in features.items():
            row = []
            for stage in STAGES:
                cell = cells[str(stage)]
                if cell.startswith("refused: "):
                    sentence = cell.removeprefix("refused: ")
                    if sentence not in sentences:
                        sentences.append(sentence)
                    cell = f"refused ({chr(ord('a') + sentences.index(sentence))})"
                row.append(cell)
            lines.append(f"| {feature} | {' | '.join(row)} |")
    if sentences:
        lines += ["", "## Refused", ""]
        lines += [f"- ({chr(ord('a') + n)}) {text}" for n, text in enumerate(sentences)]
    return "\n".join(lines) + "\n"


def read(page: str) -> dict[str, dict[str, list[str]]]:
    """{tool: {feature: its cells}} of a page."""
    out: dict[str, dict[str, list[str]]] = {}
    tool = ""
    for line in page.splitlines():
        if line.startswith("## "):
            tool = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| what |"):
            feature, *cells = (part.strip() for part in line.strip("|").split("|"))
            out.setdefault(tool, {})[feature] = cells
    return out


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    page = written(find())
    if sys.argv[1:] == ["write"]:
        PAGE.write_text(page)
    print(page)
