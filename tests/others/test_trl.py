"""TRL's trainers with onefold.hf.TrainerMixin and with `deepspeed={...}`, beside themselves under
DDP; and the weights that GRPO gives to vLLM, for which a stand-in notes what it is given.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import looks
from needed import skip_without
from on_ranks import on_ranks, slow
from onefold.runtime import ShardedParameterError
from others.matrix import TOOLS, check, off

skip_without("trl")
SERVER = "libraries"
#: DDP's norm is summed in fp32: of 262,144 elements it is up to 6e-5 off.
FAR = 1e-4


@on_ranks(2)
@pytest.mark.parametrize(
    "feature", [f if f == "SFTTrainer" else pytest.param(f, marks=slow) for f in TOOLS["trl"].features]
)  # fmt: skip
def test_every_stage_trains_as_ddp_does(feature: str, folder: Path) -> None:
    check("trl", feature, folder)


@slow
@on_ranks(2, server="served")
@pytest.mark.parametrize("feature", TOOLS["trl by name"].features)
def test_every_stage_of_a_json_trains_as_ddp_does(feature: str, folder: Path) -> None:
    check("trl by name", feature, folder)


@slow
@on_ranks(2)
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_reference_models_are_divided_texts_differ_and_bases_rest_in_4_bits(
    kind: str, folder: Path
) -> None:
    from others.runs import tuned

    whole = tuned(folder, kind, 3).trainer
    assert looks.is_sharded(whole.ref_model)
    if kind == "grpo":
        lengths = [row["completions/mean_length"] for row in whole.state.log_history[:4]]
        assert len(set(lengths)) > 1, "texts of different lengths"
    plain = tuned(folder, kind, 3, lora=True)
    base = tuned(folder, kind, {"stage": 3, "frozen": "nf4"}, lora=True)
    assert plain.trainer.ref_model is None and base.losses != plain.losses
    assert base.losses == pytest.approx(plain.losses, abs=1e-3)


def same(ours: Any, ddp: Any) -> None:
    # GRPO's losses are what is left of terms of order 1 that cancel out: fp32 rounds these
    assert len(set(ddp.losses)) == 4
    assert ours.losses == pytest.approx(ddp.losses, rel=1e-5, abs=2e-8)
    assert off(ours.norms, ddp.norms) < FAR


#: Their losses hand `lm_head.weight` to an autograd Function and never call the head. In a
#: distillation the Function takes the head of the teacher, another sharded model, as well: at stage 3
#: it is a part there, since no pass of the teacher is open.
KINDS = ("sft", "dpo", "kto", "grpo", "distillation")


@slow
@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_units_and_never_called_train_as_under_ddp(kind: str, folder: Path) -> None:
    from others.runs import tuned

    ddp = tuned(folder, kind, large=True)
    for stage in (0, 1, 2, 3):
        if kind == "distillation" and stage == 3:
            with pytest.raises(ShardedParameterError, match="read a whole copy"):
                tuned(folder, kind, stage, large=True)
            continue
        ours = tuned(folder, kind, stage, large=True)
        assert "lm_head" in dict(looks.units(ours.trainer.model))
        same(ours, ddp)


REFERENCES: dict[str, dict[str, Any]] = {
    "follows": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "not gathered": {"ds3_gather_for_generation": False},
}


@slow
@on_ranks(2, server="served")
@pytest.mark.parametrize("name", REFERENCES)
def test_references_that_follow_and_texts_of_divided_models_are_those_of_ddp(
    name: str, folder: Path
) -> None:
    from others.runs import by_json, tuned

    kind = "dpo" if name == "follows" else "grpo"
    ddp = tuned(folder, kind, **REFERENCES[name])
    ours = tuned(folder, kind, **REFERENCES[name], **by_json(3))
    assert type(ours.trainer.ref_model).__name__ == "DeepSpeedEngine"
    same(ours, ddp)
    if name == "follows":
        assert ours.losses != tuned(folder, kind).losses


# -- vLLM ------------------------------------------------------------------------------------------


class Given:
    """What an engine was given: at each sync {name: value}, and what was announced before.

    Attributes:
        reset: after how many syncs its cache was reset.
        highest: the most bytes that Onefold held whole while a tensor was handed over.
    """

    def __init__(self) -> None:
        self.syncs: list[dict[str, Any]] = []
        self.announced: list[Any] = []
        self.reset: list[int] = []
        self.highest, self.model = 0, None

    def take(self, named: Any) -> None:
        out: dict[str, Any] = {}
        for name, value in named:
            assert name not in out, name
            out[name] = value.detach().clone()
            if self.model is not None and looks.is_sharded(self.model):
                held = looks.held(self.model)["device"]
                self.highest = max(self.highest, held.get("gathered units", 0))
        self.syncs.append(out)

    def client(self) -> Any:
        """A class for TRL's VLLMClient, which answers prompts with tokens made of them."""
        given = self

        class Client:
            def __init__(self, **_: Any) -> None: ...

            def init_communicator(self, device: Any = 0) -> None: ...

            def update_named_params(self, metadata: Any, named: Any) -> None:
                given.announced.append(metadata)
                given.take(named)

            def reset_prefix_cache(self) -> None:
                given.reset.append(len(given.syncs))

            def generate(self, prompts: Any, n: int = 1, **_: Any) -> dict[str, Any]:
                texts = [
                    [3 + (sum(ids) * (i + 2) + 7 * k) % 60 for k in range(3 + i)]
                    for ids in prompts
                    for i in range(n)
                ]
                logprobs = [[[-4.0] for _ in ids] for ids in texts]
                return {"prompt_ids": prompts, "completion_ids": texts, "logprobs": logprobs}

        return Client


def generated(folder: Path, recipe: Any = None, **given: Any) -> tuple[Any, Given, dict[str, Any]]:
    """A run of GRPO, what vLLM's server was given on this rank, and what an engine in each rank's
    process is given at the end.
    """
    from trl.generation import vllm_generation

    from others.runs import tuned

    server, inside = Given(), Given()
    asks = {"beta": 0.0, "use_vllm": True, "vllm_mode": "server"}
    asks["vllm_importance_sampling_correction"] = False

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        server.model = self.model
        return super(type(self), self).train(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        patch.setattr(vllm_generation, "VLLMClient", server.client(), raising=False)
        run = tuned(folder, "grpo", recipe, mixin={"train": train}, **asks, **given)
        generation = run.trainer.vllm_generation
        place = SimpleNamespace(load_weights=inside.take)
        for name in ("model", "model_runner", "driver_worker", "model_executor", "llm_engine"):
            place = SimpleNamespace(**{name: place})
        place.reset_prefix_cache = lambda: None
        generation.llm, generation.mode, generation.enable_sleep_mode = place, "colocate", False
        generation.sync_weights()
    return run, server, {name: value for sync in inside.syncs for name, value in sync.items()}


def same_weights(ours: Given, ddp: Given, inside: Any, inside_ddp: Any) -> None:
    from torch.testing import assert_close

    assert len(ours.syncs) == len(ddp.syncs)
    for mine, theirs in zip(ours.syncs, ddp.syncs, strict=True):
        assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert_close(inside, inside_ddp, rtol=1e-5, atol=1e-5)
    if ours.syncs:  # on rank 0
        first, last = ours.syncs[0], ours.syncs[-1]
        assert len(ours.syncs) == 4 and any(not v.equal(last[n]) for n, v in first.items())
        whole = sum(value.nbytes for value in inside.values())
        assert 0 < ours.highest < whole


@slow
@on_ranks(2)
@pytest.mark.parametrize("kind", ["plain", "lora", "modules", "bf16"])
def test_vllm_is_given_the_weights_of_ddp_in_bounded_memory(kind: str, folder: Path) -> None:
    given: dict[str, Any] = {
        "plain": {},
        "lora": {"lora": True},
        "modules": {"lora": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}},
        "bf16": {"bf16": True},
    }[kind]
    if kind == "bf16":  # it is what is computed with
        _, ours, _ = generated(folder, 3, **given)
        for sync, announced in zip(ours.syncs, ours.announced, strict=True):
            assert {value.dtype for value in sync.values()} == {torch.bfloat16}
            assert all(dtype == "bfloat16" for _, dtype, _ in announced)
        return
    run_ddp, ddp, inside_ddp = generated(folder, **given)
    for stage in (1, 3):
        run, ours, inside = generated(folder, stage, **given)
        assert run.losses == pytest.approx(run_ddp.losses, rel=1e-4, abs=1e-6)
        same_weights(ours, ddp, inside, inside_ddp)
        for sync, announced in zip(ours.syncs, ours.announced, strict=True):
            shapes = [(name, list(value.shape)) for name, value in sync.items()]
            assert shapes == [(name, shape) for name, _, shape in announced]
        assert ours.reset == ([1, 2, 3, 4] if ours.syncs else [])
