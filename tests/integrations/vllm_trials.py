"""GRPO with `use_vllm=True` on the ranks of a test, with stand-ins for vLLM's client and engine that
note the weights they are given, beside itself under DDP.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Given:
    """What an engine was given: at each sync {name: value}, and the bytes that were whole then.

    Attributes:
        syncs: one dict a sync. announced: what was said to come before.
        highest: the most bytes that Onefold held whole while a tensor was handed over.
    """

    def __init__(self) -> None:
        self.syncs: list[dict[str, Any]] = []
        self.announced: list[Any] = []
        self.highest = 0
        self.model: Any = None

    def take(self, named: Any) -> None:
        from onefold.memory import GATHERED
        from onefold.runtime.hooks import engine_of, is_sharded

        out: dict[str, Any] = {}
        for name, value in named:
            assert name not in out, name
            out[name] = value.detach().clone()
            if self.model is not None and is_sharded(self.model):
                now = engine_of(self.model).memory.held(GATHERED)
                self.highest = max(self.highest, now)
        self.syncs.append(out)


def stand_in(given: Given, reset: list[int]) -> Any:
    """A class for TRL's VLLMClient, which answers prompts with tokens made of them."""

    class Client:
        def __init__(self, **_: Any) -> None:
            pass

        def init_communicator(self, device: Any = 0) -> None:
            pass

        def update_named_params(self, metadata: Any, named: Any) -> None:
            given.announced.append(metadata)
            given.take(named)

        def reset_prefix_cache(self) -> None:
            reset.append(len(given.syncs))

        def generate(self, prompts: Any, n: int = 1, **_: Any) -> dict[str, Any]:
            completions = [
                [3 + (sum(ids) * (i + 2) + 7 * k) % 60 for k in range(3 + i)]
                for ids in prompts
                for i in range(n)
            ]
            return {
                "prompt_ids": prompts,
                "completion_ids": completions,
                "logprobs": [[[-4.0] for _ in ids] for ids in completions],
            }

    return Client


def run(folder: str, case: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    import trl
    from hf_trials import arguments, built, seen_of
    from trl.generation import vllm_generation
    from trl_trials import data, lengths, tokenizer

    import onefold.hf

    given, reset = Given(), []
    vllm_generation.is_vllm_available = lambda: True
    vllm_generation.VLLMClient = stand_in(given, reset)
    more = {"num_generations": 2, "max_completion_length": 8, "beta": 0.0, "use_vllm": True,
            "vllm_mode": "server", "vllm_importance_sampling_correction": False}  # fmt: skip
    given_arguments = arguments(folder, case["name"], bf16=False, **more)
    args = trl.GRPOConfig(**given_arguments | case.get("arguments", {}))
    model = built(folder, bool(case.get("lora")))
    if case.get("lora") == "modules":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"], bias="none")
        model = get_peft_model(model.get_base_model(), config)
    options = {"train_dataset": data("grpo"), "processing_class": tokenizer()}
    kind: Any = trl.GRPOTrainer
    if case.get("recipe") is not None:
        kind = type("Tuner", (onefold.hf.TrainerMixin, trl.GRPOTrainer), {"vllm_bucket": "16KB"})
        options["recipe"] = case["recipe"]
    trainer = kind(model, args=args, reward_funcs=lengths, **options)
    given.model = trainer.model
    trainer.train()
    # The same weights for an engine in each rank's process
    generation, inside = trainer.vllm_generation, Given()
    place = SimpleNamespace(load_weights=inside.take)
    for name in ("model", "model_runner", "driver_worker", "model_executor", "llm_engine"):
        place = SimpleNamespace(**{name: place})
    place.reset_prefix_cache = lambda: None
    generation.llm, generation.mode, generation.enable_sleep_mode = place, "colocate", False
    generation.sync_weights()
    colocated = {name: value for sync in inside.syncs for name, value in sync.items()}
    return seen_of(trainer) | {
        "rank": dist.get_rank(), "kind": type(trainer.model_wrapped).__name__, "syncs": given.syncs, "announced": given.announced,
        "highest": given.highest, "reset": reset, "colocated": colocated,
        "whole": sum(v.nbytes for v in colocated.values()),
    }  # fmt: skip


def runs(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """{name: what the run's logs say, and what vLLM was given} of each case, in order."""
    from hf_trials import each_of

    return each_of(run, cases, folder)


def runs_under_the_name(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """The same with `deepspeed` served in the process; `stage` in a case makes it DeepSpeed's by
    name.
    """
    import onefold.deepspeed

    onefold.deepspeed.serve()
    from hf_trials import fresh_state, start
    from trainer_trials import ds
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from onefold.integrations import vllm

    vllm.BUCKET = "16KB"
    start(folder)
    out: dict[str, Any] = {}
    for case in cases:
        given = {**case}
        if case["stage"]:
            given["arguments"] = {"deepspeed": ds(case["stage"])}
        unset_hf_deepspeed_config()
        with fresh_state():
            out[case["name"]] = run(folder, given)
    return out


def without_hook() -> str:
    """What is said where TRL has no place to give weights."""
    from trl.generation.vllm_generation import VLLMGeneration

    from onefold.integrations.vllm import refuse_without_hook

    refuse_without_hook()
    del VLLMGeneration._iter_named_params
    try:
        refuse_without_hook()
    except NotImplementedError as error:
        return str(error)
    return ""
