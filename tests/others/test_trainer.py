"""transformers' Trainer with a recipe, beside itself under DDP: what it trains, saves, resumes,
shows, takes and refuses. With `deepspeed={...}` it is in each cell of the matrix, and in tests/ds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import looks
import onefold
from needed import skip_without
from on_ranks import on_ranks, slow
from others.matrix import TOOLS, check
from reference import differences, on_each_rank

skip_without("accelerate")
skip_without("peft")
SERVER = "libraries"
MOST = "accumulation, recomputation, warmup, evaluation, clipping"
FEATURES = [f if f == MOST else pytest.param(f, marks=slow) for f in TOOLS["hf"].features]


@on_ranks(2)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_stage_trains_and_saves_as_ddp_does(feature: str, folder: Path) -> None:
    check("hf", feature, folder)


@slow
@on_ranks(2, server="served")
@pytest.mark.parametrize("feature", TOOLS["hf by name"].features)
def test_every_stage_of_a_json_trains_and_saves_as_ddp_does(feature: str, folder: Path) -> None:
    check("hf by name", feature, folder)


# -- checkpoints -----------------------------------------------------------------------------------


def goes_on(first: Any, second: Any) -> None:
    assert len(first.losses) == 4
    assert (second.losses, second.rates) == (first.losses, first.rates)


@slow
@on_ranks(2)
def test_runs_go_on_at_another_stage_from_ddp_and_with_models_read_later(folder: Path) -> None:
    from others.runs import SAVES, checkpoint, trained

    ddp = trained(folder, **SAVES)
    goes_on(ddp, trained(folder, 2, resume=checkpoint(ddp)))
    goes_on(ddp, trained(folder, 3, meta=True))
    three = trained(folder, 3, **SAVES, save_total_limit=1)
    last = checkpoint(three, 4)
    assert [p.name for p in last.parent.glob("checkpoint-*")] == ["checkpoint-4"]
    assert {path.name for path in last.iterdir()} >= {
        "config.json", "model.safetensors", "onefold", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt",
        "trainer_state.json", "training_args.bin",
    }  # fmt: skip
    three = trained(folder, 3, **SAVES)
    goes_on(three, trained(folder, 1, resume=checkpoint(three)))
    goes_on(three, trained(folder, 2, resume=checkpoint(three), meta=True))
    # The weights alone go on with other states
    alone = trained(folder, 2, **SAVES, save_only_model=True)
    assert not (checkpoint(alone) / "onefold").exists()
    assert trained(folder, 2, resume=checkpoint(alone)).losses[2] == alone.losses[2]


@slow
@on_ranks(2)
def test_adapters_go_on_and_leave_the_base_where_it_is(folder: Path) -> None:
    from others.runs import SAVES, checkpoint, trained

    first = trained(folder, 1, lora=True, **SAVES)
    goes_on(first, trained(folder, 3, lora=True, resume=checkpoint(first)))
    there = {path.name for path in checkpoint(first).iterdir()}
    assert "adapter_model.safetensors" in there and "model.safetensors" not in there
    manifest = (checkpoint(first) / "onefold" / "manifest.json").read_text()
    assert "lora_A" in manifest and "mlp" not in manifest
    # Adapters around a model that is read later are drawn as it is sharded
    later = trained(folder, 3, lora=True, meta=True, save=True)
    assert len(set(later.losses)) == 4
    assert later.weights.keys() == trained(folder, 3, lora=True, save=True).weights.keys()


@slow
@on_ranks(2)
def test_the_best_weights_are_loaded_at_the_end(folder: Path) -> None:
    from others.runs import SAVES, checkpoint, trained

    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    highest = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # the first
    run = trained(folder, 3, **SAVES, **best, **highest, save_total_limit=2)
    assert run.trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert run.evaluated[1] < run.evaluated[0]
    after = run.trainer.evaluate()["eval_loss"]
    assert after == pytest.approx(run.evaluated[0], rel=1e-6)
    run.trainer._load_from_checkpoint(str(checkpoint(run, 4)))  # as scripts do between evaluations
    after = run.trainer.evaluate()["eval_loss"]
    assert after == pytest.approx(run.evaluated[1], rel=1e-6)


# What adapters of peft train besides; `seed` gives a run that goes on other values to begin with.
BESIDE: dict[str, dict[str, Any]] = {
    "whole modules": {"modules_to_save": ["lm_head", "norm"]},
    "adapters on embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "more tokens": {"tokens": 70},
}


@slow
@pytest.mark.parametrize("kind", BESIDE)
@on_ranks(2)
def test_modules_and_embeddings_beside_adapters_are_saved_and_go_on(
    kind: str, folder: Path
) -> None:
    from others.runs import SAVES, checkpoint, trained

    # Where gradients are not scaled by their norm, its rounding is not in the weights
    given = {"lora": BESIDE[kind], "max_grad_norm": 0.0, "save": True, **SAVES}
    ddp = trained(folder, **given)
    assert any("lora_" not in name for name in ddp.weights)
    for stage in (1, 3):
        first = trained(folder, stage, **given)
        again = trained(folder, 4 - stage, seed=5, resume=checkpoint(first), **given)
        for ours in (first, again):
            assert ours.losses == ddp.losses
            assert not differences(ddp.weights, ours.weights, 0, 1e-4)
            for name, value in ours.weights.items():
                if "base_layer" in name or name.endswith("embed_tokens.weight"):
                    assert torch.equal(value, ddp.weights[name]), name


@slow
@on_ranks(2)
def test_a_frozen_base_is_held_quantized_and_goes_on(folder: Path) -> None:
    from others.runs import SAVES, checkpoint, trained

    plain = trained(folder, 3, lora=True)
    for codec, most in (("int8", 0.02), ("nf4", 0.1)):
        recipe = {"stage": 3, "frozen": codec}
        ours = trained(folder, recipe, lora=True, save=True, **SAVES)
        memory = [sum(looks.held(run.trainer.model)["device"].values()) for run in (plain, ours)]
        assert memory[1] < memory[0], codec
        assert ours.losses != plain.losses
        assert ours.losses == pytest.approx(plain.losses, abs=most)
        assert all("lora" in name for name in ours.weights)
        goes_on(ours, trained(folder, recipe, lora=True, resume=checkpoint(ours)))


@slow
@on_ranks(2)
def test_the_scale_of_fp16_grows_skips_and_goes_on(folder: Path) -> None:
    """A step that is skipped moves neither the weights nor the rate."""
    from others.runs import SAVES, checkpoint, trained

    def run(recipe: Any, power: int, interval: int, **given: Any) -> tuple[Any, list[float]]:
        import transformers
        from accelerate.utils import GradScalerKwargs

        scales: list[float] = []
        host = transformers.Trainer.create_accelerator_and_postprocess
        step = transformers.Trainer.training_step

        def create(self: Any) -> None:
            host(self)
            handler = GradScalerKwargs(init_scale=2.0**power, growth_interval=interval)
            self.accelerator.scaler_handler = handler

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            scales.append(self.accelerator.scaler.get_scale() if self.args.fp16 else 0.0)
            return step(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", create)
            patch.setattr(transformers.Trainer, "training_step", training_step)
            return trained(folder, recipe, **{"fp16": True, **given}), scales

    whole, scales = run(3, 12, 3, max_steps=5, **SAVES)
    assert scales == [2.0**12] * 3 + [2.0**13] * 2
    plain = trained(folder, None, max_steps=5)
    assert whole.losses == pytest.approx(plain.losses, rel=1e-2)
    assert (checkpoint(whole) / "scaler.pt").is_file()
    at = checkpoint(whole)
    resumed, scales = run(1, 12, 3, max_steps=5, resume=at)
    assert resumed.losses == whole.losses and scales == [2.0**12, 2.0**13, 2.0**13]
    bf16, _ = run(2, 12, 3, max_steps=5, resume=at, fp16=False, bf16=True, **SAVES)
    assert bf16.losses == pytest.approx(whole.losses, rel=2e-2)
    assert not (checkpoint(bf16, 4) / "scaler.pt").exists()

    # A fused kernel would skip steps by itself
    over = {"max_steps": 9, "max_grad_norm": 0.0, "optim": "adamw_torch"}
    ours, scales = run(3, 20, 100, **over)
    assert scales == on_each_rank(scales)[0]
    skipped = [b < a for a, b in zip(scales, scales[1:], strict=False)]
    assert skipped[0] and not all(skipped), scales
    rates = ours.rates
    assert [a == b for a, b in zip(rates, rates[1:], strict=False)] == skipped
    ours.trainer.train()
    scaler = ours.trainer.accelerator.scaler
    assert ours.trainer.optimizer.scaler is scaler, "gradients are unscaled twice"


# -- beside training -------------------------------------------------------------------------------


@slow
@on_ranks(2)
def test_it_evaluates_and_predicts_before_and_after(folder: Path) -> None:
    import transformers

    from others.runs import arguments, fresh, opened, saved, tokens, with_recipe

    found: dict[Any, Any] = {}
    for recipe in (None, 3):
        with fresh():
            kind, more = with_recipe(transformers.Trainer, recipe)
            args = arguments(folder)
            data = {"train_dataset": tokens(), "eval_dataset": tokens()}
            trainer: Any = kind(opened(saved(folder)), args, **data, **more)
            first = trainer.evaluate()["eval_loss"]
            if recipe is None:  # which would train without DDP after that
                trainer = kind(opened(saved(folder)), args, **data)
            trainer.train()
            predicted = trainer.predict(tokens())
            found[recipe] = first, predicted.metrics["test_loss"], predicted.predictions.shape
    assert found[3] == found[None]


# -- what is taken and refused ---------------------------------------------------------------------


def refusals(folder: Path) -> list[tuple[str, Any, dict[str, Any], dict[str, str]]]:
    """(a part of the sentence, recipe, training arguments, environment) of what cannot be."""
    in_backward = onefold.Recipe.zero(2, offload_optimizer="cpu", step_in_backward=True)
    return [
        ("was given no recipe", None, {}, {}),
        ("names no stage", {"frozen": "nf4"}, {}, {}),
        ("expected a Recipe, a stage", 3.5, {}, {}),
        ("stage", 7, {}, {}),
        ("cannot be read", f"{folder}/none.json", {}, {}),
        ("is no JSON", '{"stage"', {}, {}),
        ("clips by the norm", in_backward, {}, {}),
        ("auto_find_batch_size", 3, {"auto_find_batch_size": True}, {}),
        ("bf16_full_eval", 3, {"bf16_full_eval": True}, {}),
        ("save_on_each_node", 3, {"save_on_each_node": True}, {}),
        ("steps inside the backward pass", 3, {"optim": "lomo"}, {}),
        ("the recipe in float32", {"stage": 3, "precision": "fp32"}, {"bf16": True}, {}),
        ("fp16 skips steps", in_backward, {"fp16": True, "max_grad_norm": 0.0}, {}),
        ("asks for FSDP", 3, {}, {"ACCELERATE_USE_FSDP": "true"}),
        ("asks for DeepSpeed", 3, {}, {"ACCELERATE_USE_DEEPSPEED": "true"}),
    ]


@slow
@on_ranks(1)
def test_what_cannot_be_is_refused_in_words(folder: Path) -> None:
    import peft
    import transformers

    import onefold.hf
    from others.runs import arguments, fresh, opened, saved, tokens

    def refused(words: str, recipe: Any, model: Any, environment: Any = (), **more: Any) -> None:
        args = arguments(folder, **more)
        os.environ |= environment
        with pytest.raises((ValueError, NotImplementedError), match=words):
            onefold.hf.Trainer(model, args, train_dataset=tokens(), recipe=recipe).train()

    for words, recipe, more, environment in refusals(folder):
        with fresh():
            refused(words, recipe, opened(saved(folder)), environment, **more)
    with fresh():  # models that something else has quantized or placed, or that nobody trains
        for attribute, value in (("is_quantized", True), ("hf_device_map", {"": 0, "a": 1})):
            model = opened(saved(folder))
            setattr(model, attribute, value)
            refused("", 1, model)
        refused("takes a gradient", 1, opened(saved(folder)).requires_grad_(False))
        prompts = peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)
        prompted = peft.get_peft_model(opened(saved(folder)), prompts)
        refused("save_strategy", 1, prompted, save_strategy="steps")
    for bases in ((transformers.Trainer, onefold.hf.TrainerMixin), (onefold.hf.TrainerMixin,)):
        with pytest.raises(TypeError, match="TrainerMixin"):
            type("Odd", bases, {})
    with pytest.raises(FileNotFoundError, match="there is no folder 'nobody/nothing'"):
        onefold.hf.from_pretrained("nobody/nothing")


@slow
@on_ranks(1)
def test_a_recipe_may_stand_on_the_command_line(folder: Path) -> None:
    import transformers

    import onefold.hf
    from others.runs import fresh, opened, saved, tokens

    parser = transformers.HfArgumentParser(onefold.hf.TrainingArguments)
    (folder / "recipe.json").write_text(json.dumps({"stage": 1}))
    for text, stage in (("2", 2), ('{"stage": 3, "prefetch": 2}', 3), (f"{folder}/recipe.json", 1)):
        words = f"--output_dir {folder}/run --use_cpu --max_steps 1 --report_to none --onefold"
        with fresh():
            (args,) = parser.parse_args_into_dataclasses([*words.split(), text])
            trainer = onefold.hf.Trainer(opened(saved(folder)), args, train_dataset=tokens())
            trainer.train()
            assert trainer.recipe.stage == stage and args.to_json_string()
            with pytest.raises(ValueError, match="given twice"):
                onefold.hf.Trainer(opened(saved(folder)), args, recipe=1)
