"""Tool x feature x stage: what Onefold gives beside the tool's own DDP. Writes benchmarks/results/matrix.md.

    python tests/others/matrix.py write

Each cell is a run of a few steps on two ranks, in the same process as the run under DDP that it is
compared with. A cell says "equal" (losses to the last bit), "within 2e-7" (the greatest relative
difference of a loss, rounded up to a power of ten or twice or five times one), or "refused (a)",
with the sentence. The tests of this folder run the same cells, and ask for what `Tool` expects.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "benchmarks" / "results" / "matrix.md"
STAGES = (1, 2, 3)
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "lightning")
#: {what is asked for: (how, how far a loss may be from DDP's, relative to it)}. "refused" in a case
#: is what refusals below stage 3 say.
Features = dict[str, tuple[dict[str, Any], float]]


@dataclass(frozen=True)
class Tool:
    """One way in.

    Attributes:
        name: for people.
        run: (case, stage or None for DDP, folder) -> `runs.Seen`. Runs on a rank.
        served: whether the name deepspeed is served in the process.
    """

    name: str
    run: Callable[..., Any]
    features: Features
    served: bool = False


# -- the tools -------------------------------------------------------------------------------------

TRAINER: Features = {
    "fp32": ({"save": True}, 0),
    "bf16": ({"bf16": True}, 1e-2),
    "fp16": ({"fp16": True}, 1e-2),
    "accumulation, recomputation, warmup, evaluation, clipping": (
        {
            "gradient_accumulation_steps": 2, "activation_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2,
            "warmup_steps": 2, "max_grad_norm": 0.3, "save": True,
        },
        1e-6,
    ),
    "LoRA": ({"lora": True, "save": True}, 0),
    "resumed from a checkpoint of stage 3": ({"resumed": True}, 0),
}  # fmt: skip
TRL: Features = {
    "SFTTrainer": ({"kind": "sft"}, 1e-5),
    "SFTTrainer, LoRA": ({"kind": "sft", "lora": True}, 1e-5),
    "DPOTrainer": ({"kind": "dpo"}, 1e-5),
    "DPOTrainer, LoRA": ({"kind": "dpo", "lora": True}, 1e-5),
    "RewardTrainer": ({"kind": "reward"}, 1e-5),
    "GRPOTrainer, generating": ({"kind": "grpo"}, 1e-5),
}
LIGHTNING: Features = {
    "fp32, validation": ({"validate": True}, 0),
    "accumulation": ({"accumulate_grad_batches": 2}, 1e-6),
    "gradients clipped": ({"gradient_clip_val": 0.1}, 1e-6),
    "bf16-true": ({"precision": "bf16-true"}, 2e-2),
}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}


def by_recipe(case: dict[str, Any], stage: int | None, folder: Path) -> Any:
    from others import runs

    case = dict(case)
    frozen, recipe = case.pop("frozen", None), None
    if stage is not None:
        recipe = {"stage": stage, **({"frozen": frozen} if frozen else {})}
    elif case.pop("fp16", False):  # on the host Trainer refuses it under DDP
        case["bf16"] = True
    if case.pop("resumed", False) and stage is not None:
        case["resume"] = runs.checkpoint(runs.trained(folder, 3, **runs.SAVES))
    return runs.trained(folder, recipe, **case)


def by_json(case: dict[str, Any], stage: int | None, folder: Path) -> Any:
    from others import runs

    case = dict(case)
    json, offload = case.pop("json", {}), case.pop("offload", False)
    if stage is None and case.pop("fp16", False):
        case["bf16"] = True
    json = json | {name: {"enabled": "auto"} for name in ("bf16", "fp16") if name in case}
    if case.pop("resumed", False) and stage is not None:
        case["resume"] = runs.checkpoint(runs.trained(folder, **runs.by_json(3), **runs.SAVES))
    return runs.trained(folder, **runs.by_json(stage, offload, **json), **case)


def tuned(case: dict[str, Any], stage: int | None, folder: Path) -> Any:
    from others import runs

    return runs.tuned(folder, recipe=stage, **case)


def tuned_by_json(case: dict[str, Any], stage: int | None, folder: Path) -> Any:
    from others import runs

    return runs.tuned(folder, **runs.by_json(stage), **case)


def lit(case: dict[str, Any], stage: int | None, folder: Path) -> Any:
    from others import lit

    return lit.fitted(folder, "ddp" if stage is None else {"stage": stage}, **case)


def lit_by_name(case: dict[str, Any], stage: int | None, folder: Path) -> Any:
    from others import lit

    case, given = dict(case), {"stage": stage}
    if case.pop("offload", False):
        given |= {"offload_optimizer": True, "offload_parameters": stage == 3}
    return lit.fitted(folder, "ddp" if stage is None else lit.deepspeeds(**given), **case)


TOOLS = {
    "hf": Tool(
        "transformers' Trainer: `onefold.hf.Trainer`",
        by_recipe,
        {
            **TRAINER,
            "LoRA over a base in 4 bits (nf4)": (
                {"lora": True, "frozen": "nf4", "refused": "use stage 3"},
                1e-2,
            ),
        },
    ),
    "hf by name": Tool(
        "transformers' Trainer: `deepspeed={...}` under `python -m onefold.deepspeed`",
        by_json,
        {
            **TRAINER,
            "optimizer of the JSON": ({"json": {"optimizer": ADAMW}}, 1e-6),
            "states and parameters on the host": ({"offload": True}, 1e-5),
        },
        served=True,
    ),
    "trl": Tool("TRL: `onefold.hf.TrainerMixin`", tuned, TRL),
    "trl by name": Tool(
        "TRL: `deepspeed={...}` under `python -m onefold.deepspeed`", tuned_by_json, TRL, True
    ),
    "lightning": Tool(
        "Lightning: `onefold.lightning.Strategy`",
        lit,
        {
            **LIGHTNING,
            "bf16-mixed": ({"precision": "bf16-mixed"}, 0),
            "16-mixed (on the host Lightning computes in bf16)": ({"precision": "16-mixed"}, 0),
            "64-true": ({"precision": "64-true"}, 0),
        },
    ),
    "lightning by name": Tool(
        "Lightning: its own `DeepSpeedStrategy` under `python -m onefold.deepspeed`",
        lit_by_name,
        {**LIGHTNING, "states and parameters on the host": ({"offload": True}, 1e-5)},
        served=True,
    ),
}


# -- finding out -----------------------------------------------------------------------------------


def cells(tool: Tool, feature: str, folder: Path) -> tuple[Any, dict[int, Any]]:
    """The run under DDP, and at each stage the run or the sentence by which it is refused."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    case = {k: v for k, v in tool.features[feature][0].items() if k != "refused"}
    ddp, found = tool.run(case, None, folder), {}
    for stage in STAGES:
        try:
            found[stage] = tool.run(case, stage, folder)
        except (ValueError, NotImplementedError, MisconfigurationException) as error:
            found[stage] = " ".join(str(error).split())
    return ddp, found


def check(name: str, feature: str, folder: Path) -> None:
    """Fail with a sentence for each way in which a stage differs from DDP by more than it may."""
    from reference import differences

    case, near = TOOLS[name].features[feature]
    ddp, found = cells(TOOLS[name], feature, folder)
    trains = len(ddp.losses) >= 4 and len(set(ddp.losses)) > 1
    said = [] if trains else [f"DDP's losses are {ddp.losses}"]
    for stage, ours in found.items():
        if isinstance(ours, str):
            expected = stage < 3 and case.get("refused", "nothing") in ours
            said += [] if expected else [f"stage {stage} is refused: {ours}"]
            continue
        pairs = [("losses", near), ("evaluated", near)]
        # With an optimizer of the JSON the engine moves the schedule on before Trainer logs its rate
        pairs += [] if "json" in case else [("rates", 0.0)]
        pairs += [("norms", 10 * near + 1e-5)] if near < 1e-2 else []
        for what, bound in pairs:
            mine, theirs = getattr(ours, what), getattr(ddp, what)
            if off(mine, theirs) > bound:
                said.append(f"stage {stage}: {what} {mine} beside {theirs}")
        if near < 1e-2 and ours.weights:
            said += [f"stage {stage}: {d}" for d in differences(ddp.weights, ours.weights, 0, 1e-4)]
    assert not said, "\n".join(said)


def off(mine: list[float], theirs: list[float]) -> float:
    """The greatest relative difference; infinite if one is no number or there are not as many."""
    if len(mine) != len(theirs) or not all(map(math.isfinite, (*mine, *theirs))):
        return 0.0 if mine == theirs else math.inf
    gaps = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(mine, theirs, strict=True)]
    return max(gaps, default=0.0)


def found_by(name: str, folder: str) -> dict[str, dict[int, str]]:
    """{feature: {stage: what is on the page}} of one tool. Runs on each rank, rank 0's counts."""
    if TOOLS[name].served:
        import onefold.deepspeed

        onefold.deepspeed.serve()
    out = {}
    for feature in TOOLS[name].features:
        ddp, found = cells(TOOLS[name], feature, Path(folder))
        out[feature] = {
            stage: f"refused: {ours}" if isinstance(ours, str) else told(off(ours.losses, ddp.losses))
            for stage, ours in found.items()
        }  # fmt: skip
    return out


def told(far: float) -> str:
    if far == 0 or far > 0.2:
        return "equal" if far == 0 else "wrong"
    power = 10.0 ** math.floor(math.log10(far))
    bound = next(step * power for step in (1, 2, 5, 10) if step * power >= far)
    return f"within {bound:.0e}"


# -- the page --------------------------------------------------------------------------------------


def written(found: dict[str, dict[str, dict[int, str]]]) -> str:
    versions = ", ".join(f"{p} {importlib.metadata.version(p).partition('+')[0]}" for p in PACKAGES)
    lines = [
        "# Tools and features, and how near their losses are to DDP's",
        "",
        "Written by `make matrix`. Each cell is a run of a few steps of a small model on two ranks on the host, beside the",
        "same script under DDP: losses equal to the last bit, the greatest relative difference of a loss, or the sentence by",
        "which it is refused. 16 bits differ where DDP casts in each operation, or steps in 16 bits; Trainer's fp16 is compared",
        "with bf16 under DDP, a base in 4 bits with one in fp32.",
        "",
        f"Versions: {versions}.",
    ]
    sentences: list[str] = []
    for name, features in found.items():
        lines += ["", f"## {TOOLS[name].name}", "", "| what | stage 1 | stage 2 | stage 3 |"]
        lines.append("|---|---|---|---|")
        for feature, by_stage in features.items():
            row = []
            for cell in by_stage.values():
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


def main() -> None:
    from ranks import run_ranks

    found = {}
    for name in TOOLS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run_ranks(2, found_by, name, folder, fresh=True, timeout=1200)[0]
    page = written(found)
    if sys.argv[1:] == ["write"]:
        PAGE.write_text(page)
    print(page)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    from others import matrix

    matrix.main()
