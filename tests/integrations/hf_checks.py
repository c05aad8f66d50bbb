"""What the ranks of test_hf.py look at: each function returns sentences about what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_trials import arguments, built, fresh_state, seen_of, start


def refused(folder: str) -> list[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """(a part of the sentence, recipe, training arguments, keywords) of what cannot be."""
    import onefold

    in_backward = onefold.Recipe.zero(2, offload_optimizer="cpu", step_in_backward=True)
    return [
        ("was given no recipe", None, {}, {}),
        ("names no stage", {"frozen": "nf4"}, {}, {}),
        ("expected a Recipe, a stage", 3.5, {}, {}),
        ("stage", 7, {}, {}),
        ("expected a Recipe, a stage", "three", {}, {}),
        ("cannot be read", f"{folder}/none.json", {}, {}),
        ("is no JSON", '{"stage"', {}, {}),
        ("clips by the norm", in_backward, {}, {}),
        ("auto_find_batch_size", 3, {"auto_find_batch_size": True}, {}),
        ("bf16_full_eval", 3, {"bf16_full_eval": True}, {}),
        ("save_on_each_node", 3, {"save_on_each_node": True}, {}),
        ("steps inside the backward pass", 3, {"optim": "lomo"}, {}),
        ("computes in float32", {"stage": 3, "precision": "fp32"}, {"bf16": True}, {}),
        ("fp16 skips steps", in_backward, {"fp16": True, "max_grad_norm": 0.0}, {}),
        ("asks for FSDP", 3, {}, {"ACCELERATE_USE_FSDP": "true"}),
        ("asks for DeepSpeed", 3, {}, {"ACCELERATE_USE_DEEPSPEED": "true"}),
    ]


def interface() -> list[str]:
    """What of transformers, accelerate and TRL is overridden or called, and has moved."""
    import inspect

    import transformers
    import trl
    from accelerate import Accelerator
    from trl.distributed import DistributedBackend

    from onefold.integrations.hf.accelerator import ShardingAccelerator
    from onefold.integrations.hf.generating import WholeWeights
    from onefold.integrations.hf.trainer import TrainerMixin

    wrong = []

    def compare(ours: Any, theirs: Any, own: tuple[str, ...]) -> None:
        """Every method of `ours` overrides one of `theirs`, with parameters that its calls have."""
        for name, method in vars(ours).items():
            if name in own or name.startswith("__") or not inspect.isfunction(method):
                continue
            host = getattr(theirs, name, None)
            if host is None:
                wrong.append(f"{theirs.__name__} has no {name} any more")
                continue
            mine = list(inspect.signature(method).parameters.values())
            if any(p.kind is p.VAR_POSITIONAL for p in mine):
                continue
            names = [p.name for p in mine if p.kind is not p.VAR_KEYWORD]
            others = [
                p.name
                for p in inspect.signature(host).parameters.values()
                if p.kind is not p.VAR_KEYWORD
            ]
            if names != others:
                wrong.append(f"{theirs.__name__}.{name} takes {others}, not {names}")

    own = ("_shard_model", "_torch_optimizer", "_steps_done", "_first_rank_writes",
           "_scale_loss", "_unscale")  # fmt: skip
    compare(TrainerMixin, transformers.Trainer, own)
    compare(ShardingAccelerator, Accelerator, ())
    compare(WholeWeights, DistributedBackend, ())
    source = inspect.getsource(transformers.Trainer)
    for used in (
        "self.create_accelerator_and_postprocess()",
        "model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)",
        "self.accelerator.prepare_model(model, evaluation_mode=True)",
        "self._load_optimizer_and_scheduler(resume_from_checkpoint)",
        "self._load_from_checkpoint(resume_from_checkpoint)",
        "grad_norm = self._clip_grad_norm(model)",
        "self._save(output_dir)",
        "self._load_best_model()",
        "functools.partial(self.accelerator.no_sync, model=model)",
        "self._move_model_to_device(model, args.device)",
    ):
        if used not in source:
            wrong.append(f"Trainer no longer says {used}")
    if "self._dist = DistributedBackend(self.accelerator)" not in inspect.getsource(
        trl.GRPOTrainer
    ):
        wrong.append("GRPOTrainer no longer has _dist")
    if (
        "self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)"
        not in inspect.getsource(trl.DPOTrainer)
    ):
        wrong.append("DPOTrainer no longer prepares its reference model by prepare_model")
    return wrong


def alone(folder: str) -> list[str]:
    """Sentences about what is not as it should be; [] if all is well."""
    import transformers
    from trainer_script import Data

    import onefold
    import onefold.hf

    start(folder)
    wrong = interface()
    for said, recipe, more, environment in refused(folder):
        with fresh_state():
            model = built(folder)
            try:
                args = transformers.TrainingArguments(**arguments(folder, "refused", **more))
                os.environ |= environment
                trainer = onefold.hf.Trainer(model, args, train_dataset=Data(), recipe=recipe)
                trainer.train()
                wrong.append(f"not refused: {said}")
            except (ValueError, NotImplementedError) as error:
                if said not in str(error):
                    wrong.append(f"{said!r} is refused by {error!r}")
            finally:
                for name in environment:
                    del os.environ[name]
    for bases in ((transformers.Trainer, onefold.hf.TrainerMixin), (onefold.hf.TrainerMixin,)):
        try:
            type("Odd", bases, {})
            wrong.append(f"not refused: {bases}")
        except TypeError as error:
            if "TrainerMixin" not in str(error):
                wrong.append(str(error))
    with fresh_state():  # models that something else has quantized or placed
        for attribute, value in (("is_quantized", True), ("hf_device_map", {"": 0, "a": 1})):
            model = built(folder)
            args = transformers.TrainingArguments(**arguments(folder, "odd"))
            trainer = onefold.hf.Trainer(model, args, train_dataset=Data(), recipe=1)
            setattr(model, attribute, value)
            try:
                trainer.train()
                wrong.append(f"not refused: {attribute}")
            except (ValueError, NotImplementedError):
                pass
        args = transformers.TrainingArguments(**arguments(folder, "frozen"))
        trainer = onefold.hf.Trainer(
            built(folder).requires_grad_(False), args, train_dataset=Data(), recipe=1
        )
        try:  # as merge_and_unload() leaves them
            trainer.train()
            wrong.append("not refused: nothing to train")
        except ValueError as error:
            if "takes a gradient" not in str(error):
                wrong.append(str(error))
    for name in ("./nowhere", "nobody/nothing"):  # of which the second may be in the hub
        try:
            onefold.hf.from_pretrained(name)
            wrong.append(f"not refused: {name}")
        except FileNotFoundError as error:
            if f"there is no folder {name!r}" not in str(error):
                wrong.append(str(error))
    parser = transformers.HfArgumentParser(onefold.hf.TrainingArguments)
    (Path(folder) / "recipe.json").write_text('{"stage": 1}')
    for text, stage in (("2", 2), ('{"stage": 3, "prefetch": 2}', 3), (f"{folder}/recipe.json", 1)):
        with fresh_state():
            words = ["--output_dir", f"{folder}/parsed", "--use_cpu", "--onefold", text,
                     "--max_steps", "1", "--report_to", "none"]  # fmt: skip
            (args,) = parser.parse_args_into_dataclasses(words)
            trainer = onefold.hf.Trainer(built(folder), args, train_dataset=Data())
            trainer.train()
            if trainer.recipe.stage != stage or not args.to_json_string():
                wrong.append(f"{text}: {trainer.recipe}")
    try:
        onefold.hf.Trainer(built(folder), args, train_dataset=Data(), recipe=1)
        wrong.append("not refused: two recipes")
    except ValueError as error:
        if "given twice" not in str(error):
            wrong.append(str(error))
    return wrong


def scalars(folder: str) -> dict[str, list[float]]:
    """What TensorBoard would show of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder)
    events.Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def around(folder: str) -> list[str]:
    """Sentences about what is not as it should be; [] if all is well."""
    import torch
    import transformers
    from torch import nn
    from trainer_script import Data, made

    import onefold
    import onefold.hf
    from onefold.runtime.state import dicts as state_dicts

    start(folder)
    wrong: list[str] = []
    rank = torch.distributed.get_rank()

    def expect(what: str, seen: Any, expected: Any) -> None:
        if seen != expected:
            wrong.append(f"{what}: {seen} instead of {expected}")

    def args(name: str, **more: Any) -> Any:
        return transformers.TrainingArguments(**arguments(folder, name, **more))

    # Evaluation and prediction before training, as under DDP; figures for TensorBoard
    seen: dict[Any, Any] = {}
    for recipe in (None, 3):
        with fresh_state():
            os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/board {recipe}"
            kind, more = (
                (transformers.Trainer, {})
                if recipe is None
                else (onefold.hf.Trainer, {"recipe": recipe})
            )
            given = args(f"board {recipe}", report_to=["tensorboard"])
            trainer = kind(built(folder), given, train_dataset=Data(), eval_dataset=Data(), **more)
            first = trainer.evaluate()["eval_loss"]
            if recipe is None:  # which would train without DDP after that
                trainer = kind(built(folder), given, train_dataset=Data(), **more)
            trainer.train()
            predicted = trainer.predict(Data())
            seen[recipe] = first, predicted.metrics["test_loss"], predicted.predictions.shape
    expect("evaluate and predict", seen[3], seen[None])
    batch = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    expected = transformers.Trainer.floating_point_ops(trainer, batch)
    expect("operations", trainer.floating_point_ops(batch), expected)
    del os.environ["TENSORBOARD_LOGGING_DIR"]
    if rank == 0:
        shown = scalars(f"{folder}/board 3")
        wire = shown.get("train/onefold/wire_bytes", [])
        expect("steps on the board", len(wire), 4)
        engine = onefold.engine_of(trainer.model)
        # 3Ψ(N−1)/N, less what stays gathered from the forward to the backward pass, and padding
        psi = 4 * sum(p.numel() for p in trainer.model.parameters())
        if not 2 * psi / 2 <= wire[-1] <= 1.05 * 3 * psi / 2:
            wrong.append(f"{wire[-1]} bytes a step of a model of {psi}")
        expect("memory", shown["train/onefold/memory_bytes"][-1] > psi / 2, True)
        expect("engine", engine.world_size, 2)

    # Saving streams, leaves other files alone, and replaces weights that were there
    whole, state_dicts.to_first = state_dicts.to_first, None
    try:
        target = Path(folder) / "saved"
        if rank == 0:
            target.mkdir()
            (target / "notes.txt").write_text("mine")
            (target / "model-00001-of-00002.safetensors").write_text("old")
        torch.distributed.barrier()
        trainer.save_model(str(target))
    finally:
        state_dicts.to_first = whole
    names = {path.name for path in target.iterdir()}
    expect("saved", names, {"notes.txt", "model.safetensors", "config.json",
                            "generation_config.json", "training_args.bin"})  # fmt: skip
    again = transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    with onefold.full_params(trainer.model):
        for (name, mine), theirs in zip(
            again.named_parameters(), trainer.model.parameters(), strict=True
        ):
            expect(name, torch.equal(mine, theirs), True)

    # Before training, of a model whose weights are still to be read
    with fresh_state():
        trainer = onefold.hf.Trainer(built(folder, meta=True), args("early"), recipe=3)
        trainer.save_model(f"{folder}/early")
    early = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/early").state_dict()
    for name, tensor in built(folder).state_dict().items():
        expect(f"{name}, saved before training", torch.equal(tensor, early[name]), True)

    # A model that is only asked, such as DPO's reference
    with fresh_state():
        trainer = onefold.hf.Trainer(built(folder), args("asked"), recipe=1)
        asked = trainer.accelerator.prepare_model(built(folder, meta=True), evaluation_mode=True)
        tokens = torch.arange(16).reshape(1, 16)
        same = torch.equal(asked(tokens).logits, built(folder).eval()(tokens).logits)
        expect("a reference that is still to be read", same, True)

    # Compiled blocks, an optimizer of the user's own, and the model that was given
    losses = []
    for compiled in (False, True):
        with fresh_state():
            model = built(folder)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            more = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
            trainer = onefold.hf.Trainer(
                model, args("compiled", **more), train_dataset=Data(), recipe=3,
                optimizers=(optimizer, None),
            )  # fmt: skip
            trainer.train()
            expect("the model", trainer.model is model and trainer.model_wrapped is model, True)
            expect(
                "compiled",
                hasattr(model.model.layers[0].forward, "_torchdynamo_orig_callable"),
                compiled,
            )
            losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    expect("compiled blocks", losses[1], losses[0])

    # A model that is none of transformers', made anew for each run
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made()

        def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
            return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}

    with fresh_state():
        trainer = onefold.hf.Trainer(
            args=args("plain", save_strategy="steps", save_steps=2, save_only_model=True),
            model_init=Plain, train_dataset=Data(), recipe={"stage": 2},
        )  # fmt: skip
        trainer.train()
        third = seen_of(trainer)["loss"][2]
        folder_of_state = Path(folder) / "plain" / "checkpoint-2" / "onefold"
        expect("model only", folder_of_state.exists(), False)
        trainer.train(resume_from_checkpoint=str(folder_of_state.parent))
        expect("from weights alone", seen_of(trainer)["loss"][2], third)

    # Generating while evaluating, with texts of different lengths
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    texts = []
    for recipe in (None, 3):
        with fresh_state():
            torch.manual_seed(0)
            model = transformers.T5ForConditionalGeneration(config)
            host = transformers.Seq2SeqTrainer
            given = transformers.Seq2SeqTrainingArguments(
                **arguments(folder, "t5", predict_with_generate=True, generation_max_length=7)
            )
            more = {}
            if recipe is not None:
                host, more = type("Both", (onefold.hf.TrainerMixin, host), {}), {"recipe": recipe}
            trainer = host(model, given, train_dataset=Data(), eval_dataset=Data(), **more)
            trainer.train()
            texts.append(trainer.predict(Data()).predictions.tolist())
    expect("generated", texts[1], texts[0])
    return wrong
