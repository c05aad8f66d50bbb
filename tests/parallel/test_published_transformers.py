"""What transformers' tests of tensor and expert parallelism check, and where it is checked here.

| they check, against one process                    | here                                                          |
|----------------------------------------------------|---------------------------------------------------------------|
| logits of a forward pass                           | below                                                         |
| gradients of every parameter                       | below, by `torch.autograd.grad`; steps in test_transformers_plans |
| generated tokens                                   | below                                                         |
| what is saved equals the model's weights           | below, and test_checkpoints_of_meshes                         |
| packed weights (gate and up in one)                | test_transformers_plans: packed experts                       |
| experts over ep, by all-to-all and by all-reduce   | test_transformers_plans                                       |
| tied embeddings                                    | test_transformers_plans "Llama, tied"                         |
| Trainer with a DistributedConfig                   | test_transformers_trainer                                     |
| adapters of peft on a base under tensor parallelism | below                                                        |
| quantized weights under tensor parallelism         | none                                                          |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_transformers_plans import Case, batches_of, built, close, meshes, parallelized
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ranks import run_ranks

pytestmark = pytest.mark.one_in(3)

SERVER = "libraries"

CASES = {
    "Llama": Case("Llama", tp=2),
    "Llama, tied": Case("Llama, tied", tp=2),
    "Mixtral, experts over ep": Case("Mixtral", tp=2, ep=2, implementation="all_reduce"),
}


def looked_at(case: Case, folder: str) -> dict[str, Any]:
    import onefold

    dense, experts = meshes(case)
    model = parallelized(case, dense, experts)
    recipe = onefold.Recipe.zero(3, stall_timeout=60.0)
    model = onefold.shard(model, recipe, mesh=dense["fsdp", "tp"], data="fsdp")
    tokens = batches_of(case, 0)[0]
    named = dict(model.named_parameters())
    loss = model(input_ids=tokens, labels=tokens).loss
    grads = torch.autograd.grad(loss, [*named.values()])
    model.config.output_router_logits = False  # transformers cannot generate with it
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        said = model.generate(tokens[:, :4], max_new_tokens=6, do_sample=False)
    onefold.export(model, folder)
    return {
        "logits": whole(logits).clone(),
        "grads": {name: whole(g).clone() for name, g in zip(named, grads, strict=True)},
        "said": said,
    }


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


@pytest.mark.parametrize("name", CASES)
def test_forward_backward_generation_and_saving_are_those_of_one_process(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    plain = built(case)
    tokens = batches_of(case, 0)[0]
    loss = plain(input_ids=tokens, labels=tokens).loss
    params = dict(plain.named_parameters())
    grads = dict(zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True))
    plain.config.output_router_logits = False
    with torch.no_grad():
        logits = plain(input_ids=tokens).logits
        said = plain.generate(tokens[:, :4], max_new_tokens=6, do_sample=False)
    for seen in run_ranks(2, looked_at, case, str(tmp_path / "out")):
        assert close(seen["logits"], logits), (
            f"logits differ by {(seen['logits'] - logits).abs().max()}"
        )
        assert torch.equal(seen["said"], said), (seen["said"], said)
        assert seen["grads"].keys() == grads.keys()
        for key, grad in grads.items():
            apart = (seen["grads"][key] - grad).abs().max().item()
            assert apart < 2e-5, f"{name}: the gradient of {key} differs by {apart}"
    again = type(plain).from_pretrained(tmp_path / "out", dtype=torch.float32)
    for key, value in again.named_parameters():
        assert torch.equal(value, params[key]), f"{name}: {key} was saved with other values"


# -- adapters --------------------------------------------------------------------------------------


def with_adapters(model: nn.Module) -> nn.Module:
    """Adapters on layers that are divided by columns. (peft 0.21's on layers divided by rows fail in
    their forward pass, also without Onefold.)
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(model, config)
    for name, param in model.named_parameters():
        if "lora_" not in name:
            continue
        seed = sum(map(ord, name))
        value = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
        if isinstance(param, DTensor):
            value = distribute_tensor(value, param.device_mesh, param.placements)
        with torch.no_grad():
            param.copy_(value)
    return model


def adapters_trained(case: Case) -> list[dict[str, Any]]:
    from transformers.distributed import DistributedConfig

    import onefold

    dense, experts = meshes(case)
    found = []
    for stage in (1, 3):
        base = parallelized(case, dense, experts)
        # As from_pretrained leaves them, for peft
        base._device_mesh = dense
        base.config.distributed_config = DistributedConfig(tp_size=case.tp, fsdp_size=case.fsdp)
        model = with_adapters(base)
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0)
        model = onefold.shard(model, recipe, mesh=dense["fsdp", "tp"], data="fsdp")
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=0.01, eps=1e-3)
        losses, norms = [], []
        for tokens in batches_of(case, dense.get_local_rank("fsdp"))[:2]:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.item())
            norms.append(onefold.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(
            {
                "losses": losses,
                "norms": norms,
                "weights": onefold.full_state_dict(model),
                "at": dense.get_local_rank("fsdp"),
                "divided": sum(
                    e.box is not None and e.active for e in onefold.engine_of(model).entries
                ),
            }
        )
    return found


def test_adapters_on_a_base_under_tensor_parallelism_train_as_in_one_process() -> None:
    case = Case("Llama", fsdp=2, tp=2)
    plain = with_adapters(built(case))
    trainable = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01, eps=1e-3)
    losses: list[list[float]] = [[], []]
    norms = []
    for step in range(2):
        for rank in range(2):
            tokens = batches_of(case, rank)[step]
            loss = plain(input_ids=tokens, labels=tokens).loss
            losses[rank].append(loss.item())
            (loss / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(trainable, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    ranks = run_ranks(4, adapters_trained, case)
    for i, stage in enumerate((1, 3)):
        for rank, seen in enumerate(each[i] for each in ranks):
            told = f"stage {stage}, rank {rank}"
            assert seen["divided"] == 4, f"{told}: {seen['divided']} adapters are DTensors"
            assert close(seen["losses"], losses[seen["at"]]), f"{told}: {seen['losses']} {losses}"
            assert close(seen["norms"], norms), f"{told}: {seen['norms']} {norms}"
        for key, value in plain.state_dict().items():
            apart = (ranks[0][i]["weights"][key] - value).abs().max().item()
            assert apart < 2e-5, f"stage {stage}: {key} differs by {apart}"
