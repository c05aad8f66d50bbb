"""Runs of onefold.hf's Trainer in fp16, and of Trainer under DDP in fp16, which on the host needs
to be told: accelerate neither casts nor scales there.
"""

from __future__ import annotations

from typing import Any

#: What accelerate's scaler is made with.
SCALING = {"init_scale": 2.0**12, "growth_interval": 3}


def trainers(scaling: dict[str, Any]) -> tuple[Any, Any]:
    """Trainer under DDP with torch's autocast and GradScaler, and Onefold's."""
    import torch
    import transformers
    from accelerate.utils import GradScalerKwargs

    import onefold.hf

    class Scales(transformers.Trainer):
        """Notes the scale that each step was made with, and whether it was skipped."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler_handler = GradScalerKwargs(**scaling)
            self.scales: list[float] = []

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.accelerator.scaler is not None:
                self.scales.append(self.accelerator.scaler.get_scale())
            return super().training_step(*args, **kwargs)

    class UnderDDP(Scales):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", **scaling)

    class Ours(onefold.hf.TrainerMixin, Scales):
        pass

    return UnderDDP, Ours


def run(folder: str, case: dict[str, Any]) -> dict[str, Any]:
    import transformers
    from hf_trials import arguments, built, seen_of
    from trainer_script import Data

    under_ddp, ours = trainers({**SCALING, **case.get("scaling", {})})
    given = {"fp16": True, **case.get("arguments", {})}
    args = transformers.TrainingArguments(**arguments(folder, case["name"], **given))
    model = built(folder, case.get("lora", False))
    data = {"train_dataset": Data(), "eval_dataset": Data()}
    if case.get("recipe") is None:
        trainer = under_ddp(model, args, **data)
    else:
        trainer = ours(model, args, recipe=case["recipe"], **data)
    trainer.train(resume_from_checkpoint=case.get("resume"))
    if case.get("save"):
        trainer.save_model(f"{folder}/{case['save']}")
    scaler = trainer.accelerator.scaler
    return seen_of(trainer) | {
        "scales": [*trainer.scales, *([] if scaler is None else [scaler.get_scale()])],
        "scaler": type(scaler).__module__.partition(".")[0],
        "kind": str(getattr(trainer, "recipe", None) and trainer.recipe.compute_dtype),
    }


def runs(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """{name: what the run's logs say} of each case, in order."""
    from hf_trials import each_of

    return each_of(run, cases, folder)
