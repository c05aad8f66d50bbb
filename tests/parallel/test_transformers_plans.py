"""transformers' own plans for tensor and expert parallelism, under `shard()`: at every stage the same
as one process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranks import run_ranks
from zoo import tokens_of

pytestmark = pytest.mark.one_in(9)

SERVER = "libraries"

STEPS, VOCABULARY = 3, 64
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "max_position_embeddings": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}  # fmt: skip
MOE = {
    **TEXT,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", TEXT),
    "Llama, tied": ("Llama", {**TEXT, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", TEXT),
    "Mixtral": ("Mixtral", {**MOE, "num_local_experts": 4}),
    "OLMoE": ("Olmoe", {**{k: v for k, v in MOE.items() if k != "head_dim"}, "num_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", {**MOE, "num_experts": 4, "moe_intermediate_size": 8}),
    "Qwen3-MoE, 8 experts": (
        "Qwen3Moe",
        {**MOE, "num_experts": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 1},
    ),
}


@dataclass(frozen=True)
class Case:
    """`fsdp`, `tp`, `ep`: sizes of transformers' DistributedConfig; `ep` 1 leaves experts to the plan
    for tensor parallelism. `implementation`: how experts get their tokens. `tokens`: (samples of a
    batch, tokens of each).
    """

    family: str
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    implementation: str = "auto"
    micro_batches: int = 1
    stages: tuple[int, ...] = (1, 3)
    tokens: tuple[int, int] = (2, 7)
    options: dict[str, Any] = field(default_factory=dict)


def built(case: Case) -> Any:
    import transformers

    kind, options = FAMILIES[case.family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():  # also norms, which start as ones
        with torch.no_grad():
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def batches_of(case: Case, data_rank: int) -> list[Tensor]:
    batch, length = case.tokens
    return [
        tokens_of(100 * data_rank + i, batch=batch, length=length, vocabulary=VOCABULARY)
        for i in range(STEPS * case.micro_batches)
    ]


def meshes(case: Case) -> tuple[DeviceMesh, DeviceMesh]:
    """The two meshes that transformers makes of its DistributedConfig."""
    efsdp = case.fsdp * case.tp // case.ep
    return (
        init_device_mesh(
            "cpu", (1, 1, case.fsdp, case.tp), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
        ),
        init_device_mesh(
            "cpu", (1, 1, efsdp, case.ep), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")
        ),
    )


def parallelized(case: Case, dense: DeviceMesh, experts: DeviceMesh) -> Any:
    """As `from_pretrained(distributed_config=...)` does it, up to FSDP."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = built(case)
    config = DistributedConfig(tp_size=case.tp, fsdp_size=case.fsdp, ep_size=case.ep)
    tp_plan, ep_plan, _ = model._resolve_parallel_plans(config)
    if case.tp > 1:
        # The plan wants them untied, as they are while weights are loaded
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        apply_tensor_parallelism(model, dense["tp"], tp_plan)
        model.tie_weights()
    if case.ep > 1:
        apply_expert_parallelism(model, experts["ep"], dense["tp"], ep_plan, case.implementation)
    return model


def trained(case: Case) -> dict[int, dict[str, Any]]:
    """Train at each stage. Returns losses and norms of each step, and on rank 0 the weights."""
    import onefold

    dense, experts = meshes(case)
    out = {}
    for stage in case.stages:
        model = parallelized(case, dense, experts)
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0, **case.options)
        mesh = dense["dp_replicate", "fsdp", "tp"]
        model = onefold.shard(model, recipe, mesh=mesh, data=("dp_replicate", "fsdp"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses, norms = [], []
        batches = iter(batches_of(case, dense.get_local_rank("fsdp")))
        for _ in range(STEPS):
            for i in range(case.micro_batches):
                last = i + 1 == case.micro_batches
                with contextlib.nullcontext() if last else onefold.no_sync(model):
                    tokens = next(batches)
                    loss = model(input_ids=tokens, labels=tokens).loss
                    losses.append(loss.item())
                    (loss / case.micro_batches).backward()
            norms.append(onefold.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        out[stage] = {
            "losses": losses,
            "norms": norms,
            "weights": onefold.full_state_dict(model),
            "marked": sorted(e.slot.name for e in onefold.engine_of(model).entries if e.parts > 1),
            "placed": {
                e.slot.name: e.box.kind.describe()
                for e in onefold.engine_of(model).entries
                if e.box is not None
            },
            "data rank": dense.get_local_rank("fsdp"),
        }
    return out


def in_one_process(case: Case) -> dict[str, Any]:
    """The same training on all data ranks' batches together. "unused": names of experts' weights of
    which some expert had a gradient of zeros in some step.
    """
    model = built(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    every = [iter(batches_of(case, rank)) for rank in range(case.fsdp)]
    losses: list[list[float]] = [[] for _ in every]
    norms, unused = [], set()
    for _ in range(STEPS):
        for _ in range(case.micro_batches):
            for rank, batches in enumerate(every):
                tokens = next(batches)
                loss = model(input_ids=tokens, labels=tokens).loss
                losses[rank].append(loss.item())
                (loss / case.fsdp / case.micro_batches).backward()
        for name, param in model.named_parameters():
            if "experts" in name and (param.grad.flatten(1).abs().sum(1) == 0).any():
                unused.add(name)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "weights": dict(model.state_dict()),
        "unused": unused,
    }


def compare(name: str, case: Case) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Compare with one process. Returns its results, and rank 0's."""
    expected = in_one_process(case)
    ranks = run_ranks(case.fsdp * case.tp, trained, case)
    for stage in case.stages:
        for rank, every in enumerate(ranks):
            seen, told = every[stage], f"{name}, stage {stage}, rank {rank}"
            losses = expected["losses"][seen["data rank"]]
            assert close(seen["losses"], losses), f"{told}: {seen['losses']} {losses}"
            assert close(seen["norms"], expected["norms"]), (
                f"{told}: norms {seen['norms']}, one process {expected['norms']}"
            )
        weights = ranks[0][stage]["weights"]
        for key, value in expected["weights"].items():
            assert close(weights[key], value, 1e-4), (
                f"{name}, stage {stage}: {key} apart by {(weights[key] - value).abs().max():.2e}"
            )
    return expected, ranks[0]


def close(got: Any, expected: Any, tolerance: float = 2e-5) -> bool:
    a, b = torch.as_tensor(got), torch.as_tensor(expected)
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance))


DENSE = {
    "Llama": Case("Llama", fsdp=2, tp=2, stages=(1, 2, 3)),
    "Llama, accumulation": Case("Llama", fsdp=2, tp=2, micro_batches=2, stages=(1, 2, 3)),
    "Llama, tied": Case("Llama, tied", fsdp=2, tp=2),
    "Qwen3": Case("Qwen3", fsdp=2, tp=2, stages=(1, 2, 3)),
    "Qwen3, accumulation": Case("Qwen3", fsdp=2, tp=2, micro_batches=2, stages=(1, 2, 3)),
    "Qwen3, tensor parallel alone": Case("Qwen3", tp=2, micro_batches=2),
}


@pytest.mark.parametrize("name", DENSE)
def test_plans_for_tensor_parallelism_train_as_one_process(name: str) -> None:
    case = DENSE[name]
    _, seen = compare(name, case)
    qk = [f"model.layers.{i}.self_attn.{x}_norm.weight" for i in range(2) for x in "kq"]
    for stage in case.stages:
        assert seen[stage]["marked"] == (qk if case.family == "Qwen3" else [])


PACKED = {
    "Mixtral": Case("Mixtral", fsdp=2, tp=2),
    "OLMoE": Case("OLMoE", fsdp=2, tp=2),
    "Qwen3-MoE": Case("Qwen3-MoE", fsdp=2, tp=2, micro_batches=2),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_experts_under_tensor_parallelism_train_as_one_process(name: str) -> None:
    case = PACKED[name]
    _, seen = compare(name, case)
    placed = seen[1]["placed"]["model.layers.0.mlp.experts.gate_up_proj"]
    assert placed == "_S(1, 2) over tp", placed


EXPERTS = {
    "Mixtral": Case("Mixtral", fsdp=2, ep=2, implementation="all_to_all"),
    "Mixtral, beside tensor parallelism": Case("Mixtral", fsdp=2, tp=2, ep=4),
    "Mixtral, all-reduce": Case("Mixtral", fsdp=2, tp=2, ep=2, implementation="all_reduce"),
    "OLMoE": Case("OLMoE", fsdp=4, ep=2, micro_batches=2, implementation="all_to_all"),
    "OLMoE, all-reduce": Case("OLMoE", tp=2, ep=2, implementation="all_reduce"),
    "Qwen3-MoE": Case("Qwen3-MoE", fsdp=2, ep=2, micro_batches=2),
    "Qwen3-MoE, beside tensor parallelism": Case(
        "Qwen3-MoE", fsdp=2, tp=2, ep=2, implementation="all_to_all", micro_batches=2
    ),
    "Qwen3-MoE, all-reduce": Case(
        "Qwen3-MoE", fsdp=2, tp=2, ep=2, implementation="all_reduce", micro_batches=2
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_plans_for_expert_parallelism_train_as_one_process(name: str) -> None:
    _, seen = compare(name, EXPERTS[name])
    placed = seen[3]["placed"]["model.layers.0.mlp.experts.gate_up_proj"]
    assert placed == "S(0) over ep", placed


@pytest.mark.parametrize("implementation", ["all_to_all", "all_reduce"])
def test_experts_that_nobody_chose_train_as_in_one_process(implementation: str) -> None:
    # 6 tokens a step for 8 experts, one each
    sizes = {"all_to_all": {"fsdp": 2}, "all_reduce": {"tp": 2, "fsdp": 1}}[implementation]
    case = Case("Qwen3-MoE, 8 experts", ep=2, implementation=implementation, tokens=(1, 3), **sizes)
    expected, _ = compare(implementation, case)
    assert len(expected["unused"]) == 4, expected["unused"]


Q_NORM = "model.layers.0.self_attn.q_norm"


def hooks_met_otherwise(how: str) -> str:
    """Shard a Qwen3 whose norm of q is not what `shard()` looks for, and train a step."""
    import onefold

    case = Case("Qwen3", tp=2, micro_batches=2)
    dense, experts = meshes(case)
    model = parallelized(case, dense, experts)
    norm = model.get_submodule(Q_NORM)
    tp_forward = norm.forward
    hook = inspect.getclosurevars(tp_forward).nonlocals["_all_reduce_grad"]
    partial: Any = None
    if how.startswith("wrapped"):  # as other tools wrap it
        norm.forward = functools.partial(tp_forward)
        partial = [f"{Q_NORM}.weight"] if how == "wrapped and marked" else None
    elif how == "another name":  # as another version may call it
        hook.__qualname__ = hook.__name__ = "summed"
        hook.__module__ = "transformers.elsewhere"
    elif how == "of another package, marked":
        hook.__module__, partial = "plans", [f"{Q_NORM}.weight"]
    elif how == "of another package":
        hook.__module__ = "plans"
    elif how == "no hook":
        norm.forward = inspect.getclosurevars(tp_forward).nonlocals["original_forward"]
    recipe = onefold.Recipe.zero(1 if "package" in how else 2, stall_timeout=30.0)
    mesh = dense["fsdp", "tp"]
    model = onefold.shard(model, recipe, mesh=mesh, data="fsdp", partial=partial)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = batches_of(case, 0)[0]
    try:
        for _ in range(2):
            with onefold.no_sync(model):
                model(input_ids=tokens, labels=tokens).loss.backward()
        model(input_ids=tokens, labels=tokens).loss.backward()
    except ValueError as error:
        return str(error)
    optimizer.step()
    got = onefold.full_state_dict(model).get(f"{Q_NORM}.weight")  # on rank 0
    whole = built(case)
    whole(input_ids=tokens, labels=tokens).loss.backward()
    weight = whole.get_parameter(f"{Q_NORM}.weight")
    expected = weight - 3 * weight.grad
    return "right" if got is None or close(got, expected) else f"{got}, expected {expected}"


MET = {
    "wrapped": "transformers adds up the gradient of 'model.layers.0.self_attn.q_norm.weight' over ranks 0, 1",
    "wrapped and marked": "right",
    "another name": "right",
    "of another package, marked": "is marked partial, and ranks 0 and 1, apart along 'tp', have the same gradient",
    "of another package": "Leave the hook out, and give shard() partial=['model.layers.0.self_attn.q_norm.weight']",
    "no hook": "have different gradients of 'model.layers.0.self_attn.q_norm.weight'",
}


@pytest.mark.parametrize("how", MET)
def test_a_hook_that_shard_does_not_find_trains_right_or_is_told(how: str) -> None:
    for said in run_ranks(2, hooks_met_otherwise, how):
        assert MET[how] in said, said


def under_adapters(folder: str, targets: list[str]) -> list[float] | str:
    """The losses of a sharded model under peft's adapters over a plan, or the error of `shard()`."""
    import transformers
    from peft import LoraConfig, get_peft_model

    import onefold

    case = Case("Llama", tp=2)
    dense, _ = meshes(case)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", device_mesh=dense["tp"]
    )
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    mesh = dense["fsdp", "tp"]
    try:
        model = onefold.shard(model, onefold.Recipe.zero(1), mesh=mesh, data=("fsdp",))
    except ValueError as error:
        return str(error)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    losses = []
    for tokens in batches_of(case, 0):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both_targets(folder: str) -> list[Any]:
    return [under_adapters(folder, ["q_proj", second]) for second in ("v_proj", "o_proj")]


def test_adapters_over_a_plan_train_and_are_told_where_peft_fails(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    built(Case("Llama")).save_pretrained(tmp_path)
    (first, told), (second, _) = run_ranks(2, both_targets, str(tmp_path))
    assert first == second and len(first) == STEPS, (first, second)
    assert "self_attn.o_proj' is divided by its inputs" in told and "target_modules" in told
