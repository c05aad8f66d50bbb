"""Runs of onefold.hf's Trainer on the ranks of a test, several in one process, beside Trainer
under DDP.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def start(folder: str) -> None:
    """As a launcher sets it, and a model to load in `folder`/model."""
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    import trainer_script

    if dist.get_rank() == 0 and not (Path(folder) / "model").exists():
        trainer_script.made().save_pretrained(Path(folder) / "model")
    dist.barrier()


@contextlib.contextmanager
def fresh_state() -> Any:
    """accelerate keeps what it knows of the process in globals."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    yield
    dist.barrier()


def each_of(
    run: Callable[[str, dict[str, Any]], Any], cases: list[dict[str, Any]], folder: str
) -> dict[str, Any]:
    """{name: what `run(folder, case)` says} of each case, in order, as if each were a process."""
    start(folder)
    out: dict[str, Any] = {}
    for case in cases:
        with fresh_state():
            out[case["name"]] = run(folder, case)
    return out


def arguments(folder: str, name: str, **more: Any) -> dict[str, Any]:
    """What the runs have in common."""
    return {
        "output_dir": f"{folder}/{name}",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
        "max_steps": 4,
        "save_strategy": "no",
        **more,
    }


def built(folder: str, lora: Any = False, meta: bool = False, seed: int = 0) -> Any:
    """The model of `folder`/model, with adapters if asked; or without memory, to be read later."""
    import torch
    from transformers import LlamaForCausalLM

    import onefold.hf

    if meta:
        model = onefold.hf.from_pretrained(f"{folder}/model", dtype=torch.float32)
        assert all(p.is_meta for p in model.parameters())
    else:
        model = LlamaForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
    if lora:
        from trainer_script import with_adapters

        model = with_adapters(model, lora, seed)
    return model


def seen_of(trainer: Any) -> dict[str, Any]:
    logs = trainer.state.log_history
    return {
        key: [row[key] for row in logs if key in row]
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss")
    } | {"logs": logs, "sharded": hasattr(next(trainer.model.parameters()), "onefold")}


def run(folder: str, case: dict[str, Any]) -> Any:
    """One run; the trainer. `recipe` in `case` makes it Onefold's, else it is Trainer's own."""
    import transformers
    from trainer_script import Data

    import onefold.hf

    args = transformers.TrainingArguments(
        **arguments(folder, case["name"], **case.get("arguments", {}))
    )
    model = built(folder, case.get("lora"), case.get("meta", False), case.get("seed", 0))
    given = {"train_dataset": Data(), "eval_dataset": Data(), **case.get("more", {})}
    if case.get("recipe") is None:
        trainer = transformers.Trainer(model, args, **given)
    else:
        trainer = onefold.hf.Trainer(model, args, recipe=case["recipe"], **given)
    trainer.train(resume_from_checkpoint=case.get("resume"))
    return trainer


def runs(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """{name: what the run's logs say} of each case, in order."""
    start(folder)
    out: dict[str, Any] = {}
    for case in cases:
        with fresh_state():
            trainer = run(folder, case)
            if case.get("save"):
                trainer.save_model(f"{folder}/{case['save']}")
            out[case["name"]] = seen_of(trainer)
    return out


def continued(folder: str) -> dict[str, Any]:
    """Runs of four steps, and runs that begin at the second step of one of them."""
    saves = {"save_strategy": "steps", "save_steps": 2}
    best = {
        **saves,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }

    def at(name: str) -> str:
        return f"{folder}/{name}/checkpoint-2"

    cases = [
        {"name": "ddp", "recipe": None, "arguments": saves},
        {"name": "from ddp", "recipe": 2, "resume": at("ddp")},
        {"name": "first", "recipe": 3, "arguments": saves},
        {"name": "resumed", "recipe": 1, "resume": at("first")},
        {"name": "whole", "recipe": 3, "arguments": {**saves, "save_total_limit": 1}},
        {"name": "read later", "recipe": 3, "meta": True},
        {"name": "read later again", "recipe": 2, "meta": True, "resume": at("first")},
        {"name": "lora read later", "recipe": 3, "lora": True, "meta": True, "save": "adapters"},
        {"name": "lora", "recipe": 1, "lora": True, "arguments": saves},
        {"name": "lora resumed", "recipe": 3, "lora": True, "resume": at("lora")},
    ]
    out = runs(cases, folder)
    with fresh_state():
        # A rate that makes it worse from step to step
        more = {"learning_rate": 3.0, "lr_scheduler_type": "constant", **best}
        trainer = run(folder, {"name": "best", "recipe": 3, "arguments": more})
        losses = seen_of(trainer)["eval_loss"]
        out["best"] = {
            "best": trainer.state.best_model_checkpoint,
            "losses": losses,
            "after": trainer.evaluate()["eval_loss"],
        }
    return out


def quantized(folder: str) -> dict[str, Any]:
    """Adapters over a base that rests as it is, in 8 bits and in 4."""
    import onefold

    start(folder)
    out: dict[str, Any] = {}
    for codec in (None, "int8", "nf4"):
        recipe = {"stage": 3, **({"frozen": codec} if codec else {})}
        saves = {"save_strategy": "steps", "save_steps": 2}
        case = {"name": str(codec), "recipe": recipe, "lora": True, "arguments": saves}
        with fresh_state():
            trainer = run(folder, case)
            engine = onefold.engine_of(trainer.model)
            peft_names = {
                name.replace(".default", "")
                for name, p in trainer.model.named_parameters()
                if p.requires_grad
            }
            logs = trainer.state.log_history
            out[str(codec)] = seen_of(trainer) | {
                "encoded": any(f.storage.encoded for u in engine.units for f in u.flats),
                "memory": logs[-2]["onefold/memory_bytes"],
                "adapters": peft_names,
            }
            if codec:  # and goes on
                again = run(folder, {**case, "resume": f"{folder}/{codec}/checkpoint-2"})
                assert seen_of(again)["loss"] == out[str(codec)]["loss"]
    return out
