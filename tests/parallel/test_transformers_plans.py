"""transformers' own plans for tensor and expert parallelism, under `shard()` and by `onefold.hf.Trainer`:
at every stage the same as one process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import onefold
from on_ranks import on_ranks, slow
from reference import differences
from tiny_transformers import divisible
from zoo import tokens_of

SERVER = "libraries"

STEPS, VOCABULARY = 2, 64
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.05}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {}),
    "Mixtral": ("Mixtral", {**ROUTED, "num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", {**ROUTED, "num_experts": 4, "moe_intermediate_size": 8}),
    "Qwen3-MoE, 8 experts": (
        "Qwen3Moe",
        {**ROUTED, "num_experts": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 1},
    ),
}


@dataclass(frozen=True)
class Case:
    """`fsdp`, `tp`, `ep`: sizes of transformers' DistributedConfig; `ep` 1 leaves experts to the plan
    for tensor parallelism. `implementation`: how experts get their tokens. `length`: of a sample.
    """

    family: str
    fsdp: int = 2
    tp: int = 2
    ep: int = 1
    implementation: str = "auto"
    micro_batches: int = 1
    length: int = 7
    ci: bool = False


def built(case: Case) -> Any:
    kind, options = FAMILIES[case.family]
    return divisible(kind, **options)


def batches_of(case: Case, data_rank: int) -> list[Tensor]:
    count, samples = STEPS * case.micro_batches, 2 if case.length > 3 else 1
    return [tokens_of(100 * data_rank + i, samples, case.length, VOCABULARY) for i in range(count)]


def meshes(case: Case) -> tuple[DeviceMesh, DeviceMesh]:
    """The two meshes that transformers makes of its DistributedConfig."""
    sizes = (case.fsdp, case.tp), (case.fsdp * case.tp // case.ep, case.ep)
    names = ("fsdp", "tp"), ("efsdp", "ep")
    dense, experts = (
        init_device_mesh("cpu", (1, 1, *size), mesh_dim_names=("pp", "dp_replicate", *name))
        for size, name in zip(sizes, names, strict=True)
    )
    return dense, experts


def parallelized(case: Case) -> tuple[Any, DeviceMesh]:
    """As `from_pretrained(distributed_config=...)` does it, up to FSDP."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model, (dense, experts) = built(case), meshes(case)
    config = DistributedConfig(tp_size=case.tp, fsdp_size=case.fsdp, ep_size=case.ep)
    tp_plan, ep_plan, _ = model._resolve_parallel_plans(config)
    if case.tp > 1:
        # The plan wants them untied, as they are while weights are loaded
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        apply_tensor_parallelism(model, dense["tp"], tp_plan)
        model.tie_weights()
    if case.ep > 1:
        apply_expert_parallelism(model, experts["ep"], dense["tp"], ep_plan, case.implementation)
    return model, dense["dp_replicate", "fsdp", "tp"]


def over(mesh: DeviceMesh, model: Any, stage: int, **options: Any) -> Any:
    recipe = onefold.Recipe.zero(stage, stall_timeout=60.0)
    return onefold.shard(model, recipe, mesh=mesh, data=("dp_replicate", "fsdp"), **options)


Seen = tuple[list[float], list[float], dict[str, Tensor]]


def train(model: Any, case: Case, ranks: list[int], sharded: bool) -> Seen:
    """(losses, norms, weights): on the batches of these data ranks."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, eps=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        for i in range(case.micro_batches):
            waits = sharded and i + 1 < case.micro_batches
            with onefold.no_sync(model) if waits else contextlib.nullcontext():
                for rank in ranks:
                    tokens = batches_of(case, rank)[step * case.micro_batches + i]
                    loss = model(input_ids=tokens, labels=tokens).loss
                    losses.append(loss.item())
                    (loss / case.micro_batches / len(ranks)).backward()
        norm = (
            onefold.clip_grad_norm_(model, 0.5)
            if sharded
            else nn.utils.clip_grad_norm_(params, 0.5)
        )
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, onefold.full_state_dict(model) if sharded else dict(model.state_dict())


def compare(case: Case, stage: int, adapt: Callable[[Any], Any] = lambda model: model) -> None:
    model, mesh = parallelized(case)
    at = mesh.get_local_rank("fsdp")
    losses, norms, weights = train(adapt(built(case)), case, list(range(case.fsdp)), False)
    seen = train(over(mesh, adapt(model), stage), case, [at], True)
    assert seen[0] == pytest.approx(losses[at :: case.fsdp], rel=2e-5)
    assert seen[1] == pytest.approx(norms, rel=2e-5)
    assert not seen[2] or not differences(weights, seen[2], 1e-4, 1e-4)


CASES = {
    "Llama, tied": Case("Llama, tied"),
    "Llama": Case("Llama"),
    "Qwen3, accumulation": Case("Qwen3", micro_batches=2, ci=True),  # norms of q and k are partial
    "Mixtral, packed": Case("Mixtral"),
    "Qwen3-MoE, packed": Case("Qwen3-MoE", micro_batches=2),
    "Mixtral, all to all": Case("Mixtral", tp=1, fsdp=4, ep=2, implementation="all_to_all"),
    "Mixtral, beside tensor parallelism": Case("Mixtral", ep=4, ci=True),
    "Qwen3-MoE, all-reduce": Case("Qwen3-MoE", ep=2, implementation="all_reduce", micro_batches=2),
    # 6 tokens a step for 8 experts, one each
    "experts that nobody chose": Case("Qwen3-MoE, 8 experts", tp=1, fsdp=4, ep=2, length=3),
}


@on_ranks(4)
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=() if c.ci else slow) for n, c in CASES.items()]
)
def test_plans_train_as_one_process(case: Case, every: bool) -> None:
    for stage in (1, 3) if every else (3,):
        compare(case, stage)


@on_ranks(4)
@slow
def test_adapters_on_a_base_under_tensor_parallelism_train_as_in_one_process() -> None:
    """On layers that are divided by columns. On those divided by rows peft fails."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.tensor import DTensor, distribute_tensor
    from transformers.distributed import DistributedConfig

    case = Case("Llama")

    def adapt(model: Any) -> Any:
        if any(
            isinstance(p, DTensor) for p in model.parameters()
        ):  # as from_pretrained leaves them
            model._device_mesh = meshes(case)[0]
            model.config.distributed_config = DistributedConfig(tp_size=2, fsdp_size=2)
        model = get_peft_model(
            model, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"])
        )
        for name, p in model.named_parameters():
            if "lora_" in name:
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                value = torch.randn(p.shape, generator=generator) * 0.1
                divided = isinstance(p, DTensor)
                with torch.no_grad():
                    p.copy_(
                        distribute_tensor(value, p.device_mesh, p.placements) if divided else value
                    )
        return model

    compare(case, 3, adapt)


# -- hooks by which transformers adds up the gradients of norms of q and k -------------------------

Q_NORM = "model.layers.0.self_attn.q_norm"


def wrapped(norm: Any, hook: Any) -> None:  # as other tools wrap it
    norm.forward = functools.partial(norm.forward)


def without(norm: Any, hook: Any) -> None:
    norm.forward = inspect.getclosurevars(norm.forward).nonlocals["original_forward"]


MET: list[tuple[Callable[[Any, Any], None], bool, int, str]] = [
    (wrapped, False, 2, ""),
    (wrapped, True, 2, f"'{Q_NORM}.weight' is marked partial"),
    (without, False, 2, f"have different gradients of '{Q_NORM}.weight'"),
]


@on_ranks(2)
@pytest.mark.parametrize(("change", "marked", "stage", "words"), [
    pytest.param(*row, marks=() if row[0] is without else slow) for row in MET
])  # fmt: skip
def test_a_hook_that_adds_up_trains_right_and_needs_no_mark(
    change: Callable[[Any, Any], None], marked: bool, stage: int, words: str
) -> None:
    case = Case("Qwen3", fsdp=1)
    model, mesh = parallelized(case)
    norm, plain = model.get_submodule(Q_NORM), built(case)
    change(norm, inspect.getclosurevars(norm.forward).nonlocals["_all_reduce_grad"])
    model = over(mesh, model, stage, partial=[f"{Q_NORM}.weight"] if marked else None)
    tokens = batches_of(case, 0)[0]
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        for each, factor in ((model, 1), (plain, 3)):
            for last in (False, False, True)[-3 // factor :]:
                with contextlib.nullcontext() if last else onefold.no_sync(model):
                    (each(input_ids=tokens, labels=tokens).loss * factor).backward()
            torch.optim.SGD(each.parameters(), lr=1.0).step()
        weights = onefold.full_state_dict(model)
        assert not weights or not differences(dict(plain.named_parameters()), weights, 1e-4, 1e-4)


# -- by a trainer ----------------------------------------------------------------------------------


def rows() -> Tensor:
    return tokens_of(5, 24, 8, VOCABULARY)


def trainer_of(folder: Path, sizes: dict[str, int], **more: Any) -> Any:
    """Three steps of 8 samples with accumulation of 2."""
    import transformers
    from accelerate import ParallelismConfig
    from transformers.distributed import DistributedConfig

    import onefold.hf

    # accelerate takes it on devices, and refuses it on CPUs
    ParallelismConfig._validate_accelerator = lambda *_: None
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world,
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    data = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    samples = [{"input_ids": row, "labels": row} for row in rows()]
    args = transformers.TrainingArguments(**{
        "output_dir": str(folder / "out"), "use_cpu": True, "max_steps": 3, "per_device_train_batch_size": 4 // data,
        "per_device_eval_batch_size": 4 // data, "gradient_accumulation_steps": 2, "learning_rate": 0.01,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "train_sampling_strategy": "sequential", "disable_tqdm": True, "adam_epsilon": 1e-3, **more,
    })  # fmt: skip
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    config = DistributedConfig(**sizes)
    model = onefold.hf.from_pretrained(folder, kind, torch.float32, distributed_config=config)
    recipe = onefold.Recipe.zero(3, stall_timeout=60.0)
    return onefold.hf.Trainer(
        model, args, recipe=recipe, train_dataset=samples, eval_dataset=samples[:8]
    )


def logged(trainer: Any, what: str = "loss") -> list[float]:
    return [float(log[what]) for log in trainer.state.log_history if what in log]


def as_one_process(model: Any) -> tuple[list[float], list[float], float]:
    """Losses, norms, and the loss of an evaluation at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    losses, norms = [], []
    for batch in rows().chunk(3):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return losses, norms, model(input_ids=rows()[:8], labels=rows()[:8]).loss.item()


@on_ranks(4)
@slow
@pytest.mark.parametrize(("family", "sizes", "again"), [
    ("Qwen3", {"fsdp_size": 2, "tp_size": 2}, {"fsdp_size": 4}),
    ("Qwen3-MoE", {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, {"fsdp_size": 4}),
    ("Qwen3", {"dp_replicate_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "fsdp_size": 2}),
])  # fmt: skip
def test_trainer_trains_evaluates_saves_and_resumes_on_another_mesh(
    family: str, sizes: dict[str, int], again: dict[str, int], folder: Path
) -> None:
    plain = built(Case(family))
    plain.config.output_router_logits = False
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    losses, norms, evaluated = as_one_process(plain)
    trainer = trainer_of(folder, sizes, save_strategy="steps", save_steps=1)
    trainer.train()
    assert logged(trainer) == pytest.approx(losses, rel=1e-3)
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated, rel=1e-3)
    with pytest.raises(NotImplementedError, match="was given objects"):
        trainer.accelerator.gather_for_metrics(["of no tensor"])
    trainer.save_model(str(folder / "saved"))
    dist.barrier()
    weights = onefold.full_state_dict(trainer.model)
    saved = type(plain).from_pretrained(folder / "saved").state_dict()
    assert not weights or not differences(weights, saved)
    resumed = trainer_of(folder, again, output_dir=str(folder / "again"))
    resumed.train(resume_from_checkpoint=str(folder / "out/checkpoint-1"))
    assert logged(resumed)[-2:] == pytest.approx(losses[1:], rel=1e-3)


def config_refused(**sizes: int) -> None:
    from accelerate import ParallelismConfig

    from onefold.hf.refusals import refuse_arguments

    args = SimpleNamespace(parallelism_config=ParallelismConfig(**sizes))
    refuse_arguments(args, onefold.Recipe.zero(3))


def loaded_with(**sizes: int) -> None:
    from transformers.distributed import DistributedConfig

    import onefold.hf

    config: Any = sizes if "cp_size" in sizes else DistributedConfig(**sizes)
    onefold.hf.from_pretrained(Path(__file__).parent, distributed_config=config)


def model_refused(name: str, value: Any) -> None:
    from onefold.hf.refusals import refuse_model

    model = divisible("Llama")
    setattr(model, name, value)
    refuse_model(model)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: config_refused(tp_size=2), "In place of tp_size and dp_replicate_size, load"),
    (lambda: loaded_with(tp_size=2, pp_size=2), "pipelines do not train"),
    (lambda: loaded_with(tp_size=2, cp_size=2), "unexpected keyword argument 'cp_size'"),
    (lambda: model_refused("_is_fsdp_managed_module", True), "has applied its FSDP"),
]


@on_ranks(1)
def test_what_a_trainer_cannot_do_with_a_parallelized_model_is_told() -> None:
    for call, words in REFUSED:
        with pytest.raises((ValueError, NotImplementedError), match=words):
            call()
