"""Onefold in torchtitan's trainer, on CPU: what ranks call by name."""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

STEPS = 4


def start() -> None:
    """As torchrun sets it; and the CPU is what torchtitan finds."""
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    torch._utils._get_available_device_type = lambda: "cpu"
    none = {"get_device_name": "CPU", "memory_stats": {}, "empty_cache": None}
    none |= {
        "reset_peak_memory_stats": None,
        "get_device_properties": SimpleNamespace(total_memory=1),
    }
    for name, value in none.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)


def config(folder: str, experts: bool = False, **degrees: int) -> Any:
    """torchtitan's debug model, smaller, on data that is drawn. `degrees`: of its parallelism."""
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **_: None  # by a barrier that gloo has not
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    made = qwen3_moe_debug() if experts else llama3_debugmodel()
    del made.model_spec.model.layers[2:]
    if experts:
        rope = CosSinRoPE.Config(dim=32, max_seq_len=4096, theta=1e6)
        made.model_spec.model.layers = qwen3._build_qwen3_moe_layers(
            fuse_qkv=True, n_layers=2, dim=256, n_heads=4, n_kv_heads=2, head_dim=32, moe_hidden_dim=32,
            num_experts=8, top_k=2, attn_backend="flex", rope=rope, moe_comm_backend="standard",
        )  # fmt: skip
    for layer in made.model_spec.model.layers:  # its FlexAttention has no backward pass on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    made.training.local_batch_size = 2
    made.training.seq_len = 32
    data_ranks = dist.get_world_size() // degrees.get("tensor_parallel_degree", 1)
    made.training.global_batch_size = 4 * data_ranks  # two micro-batches
    for name, degree in degrees.items():
        setattr(made.parallelism, name, degree)
    made.training.steps = STEPS
    made.training.disable_cuda_graphs = True
    made.training.mixed_precision_param = "float32"
    made.validator.enable = False
    made.checkpoint.enable = False
    made.dump_folder = folder
    made.loss = made.loss.loss_fn
    made.debug.seed = 1
    made.parallelism.spmd_backend = "partial_dtensor"

    class Tokens(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 2048

    class Drawn(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(
            self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
        ):
            self.drawn = 0
            self.rank, self.shape = dp_rank, (local_batch_size, seq_len + 1)

        def __iter__(self) -> Any:
            while True:
                generator = torch.Generator().manual_seed(1000 * self.rank + self.drawn)
                self.drawn += 1
                rows = torch.randint(0, 2048, self.shape, generator=generator)
                positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1)
                yield {"input": rows[:, :-1], "positions": positions}, rows[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"drawn": self.drawn}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.drawn = state_dict["drawn"]

    made.tokenizer, made.dataloader = Tokens.Config(), Drawn.Config()
    return made


def watched(trainer: Any) -> list[tuple[float, float]]:
    """(loss, norm) of each step."""
    seen: list[tuple[float, float]] = []
    trainer.metrics_processor.log = lambda step, mean, most, norm, **_: seen.append((mean, norm))
    trainer.metrics_processor.should_log = lambda step: True
    trainer.train()
    return seen


def by_torchtitan(folder: str) -> dict[str, Any]:
    """Losses and norms of torchtitan's trainer by FSDP2 and by Onefold."""
    start()
    from torch.distributed.fsdp import FSDPModule

    import onefold
    from onefold.integrations.torchtitan import by_onefold

    out: dict[str, Any] = {}
    for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        theirs = config(folder)
        theirs.training.mixed_precision_param = dtype
        trainer = theirs.build()
        (model,) = trainer.model_parts
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo has no sum that divides
                module.set_force_sum_reduction_for_comms(True)
        state = {key: p.full_tensor().clone() for key, p in model.named_parameters()}
        out[f"{name} fsdp2"] = watched(trainer)
        for stage in (1, 3) if name == "fp32" else (3,):
            ours = by_onefold(config(folder), f'{{"stage": {stage}}}')
            ours.training.mixed_precision_param = dtype
            trainer = ours.build()
            (model,) = trainer.model_parts
            with torch.no_grad(), onefold.full_params(model, write=True):
                drawn = {key: (p.mean(), p.std()) for key, p in model.named_parameters()}
                for key, p in model.named_parameters():
                    p.copy_(state[key])
            out["drawn"] = {
                key: (*map(float, values), float(state[key].mean()), float(state[key].std()))
                for key, values in drawn.items()
            }
            out[f"{name} {stage}"] = watched(trainer)
    return out


AXES: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel_degree": 2},
    "two replicas": {"data_parallel_replicate_degree": 2},
    "ep 2": {"experts": True, "expert_parallel_degree": 2},
    "tp 2 and ep 4": {
        "experts": True,
        "tensor_parallel_degree": 2,
        "expert_parallel_degree": 4,
    },
}


def over_axes(folder: str, names: list[str]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Losses and norms of torchtitan's trainer by FSDP2 and by Onefold, by its degrees."""
    start()
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor

    import onefold
    from onefold.integrations.torchtitan import by_onefold

    out: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in names:
        trainer = config(folder, **AXES[name]).build()
        (model,) = trainer.model_parts
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo has no sum that divides
                module.set_force_sum_reduction_for_comms(True)
        state = {key: p.full_tensor().detach().clone() for key, p in model.named_parameters()}
        out[name] = {"fsdp2": watched(trainer)}
        for stage in (1, 3):
            trainer = by_onefold(config(folder, **AXES[name]), f'{{"stage": {stage}}}').build()
            (model,) = trainer.model_parts
            with torch.no_grad(), onefold.full_params(model, write=True):
                for key, p in model.named_parameters():
                    placed = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
                    value = state[key]
                    p.copy_(
                        distribute_tensor(value, *placed, src_data_rank=None) if placed else value
                    )
            out[name][f"stage {stage}"] = watched(trainer)
    return out


MATRICES = r"layers\..*\.(wqkv|wq|wk|wv|wo|w1|w2|w3|w13)\.weight$"


def by_muon(folder: str) -> dict[str, Any]:
    """Losses and norms with torchtitan's DistMuon in the configuration, which is torch's Muon here;
    of Adafactor; and what is said of matrices in blocks, and of stacks.
    """
    start()
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed.flex_shard.optimizer_reshard import BlockShard, ComputeLayout

    import onefold
    from onefold.integrations.torchtitan import by_onefold

    def run(stage: int, *names: str, **options: Any) -> Any:
        made = by_onefold(config(folder), f'{{"stage": {stage}}}')
        patterns = [".*"] if len(names) == 1 else [MATRICES, ".*"]
        groups = [
            ParamGroupConfig(pattern=each, optimizer_name=name, optimizer_kwargs={"lr": rate})
            for each, name, rate in zip(patterns, names, (0.02, 1e-3), strict=False)
        ]
        made.optimizer = OptimizersContainer.Config(
            param_groups=groups, implementation="for-loop",
            optimizer_factory_kwargs_by_name={names[0]: options} if options else {},
        )  # fmt: skip
        try:
            trainer = made.build()
        except ValueError as error:
            return str(error)
        (model,) = trainer.model_parts
        kinds = [type(each).__name__ for each in trainer.optimizers.optimizers]
        with torch.no_grad(), onefold.full_params(model, write=True):
            for number, p in enumerate(model.parameters()):
                torch.manual_seed(number)
                p.copy_(torch.randn(p.shape) * 0.02 if p.ndim > 1 else torch.ones_like(p))
        return kinds, watched(trainer)

    blocks = ComputeLayout(shardings_by_mesh_axis={"dp_shard": BlockShard(dim=0, block_size=32)})
    name = "layers.0.attention.wo.weight"
    return {
        "muon": [run(stage, "DistMuon", "AdamW") for stage in (0, 1, 3)],
        "adafactor": [run(stage, "Adafactor") for stage in (0, 3)],
        "blocks": run(
            3, "DistMuon", "AdamW", compute_sharding_by_fqn={name: blocks}, bucket_configs=()
        ),
        "all": run(3, "DistMuon"),
    }


def resumed(folder: str) -> dict[str, Any]:
    """A run of torchtitan's command, broken off and resumed at another stage, beside a whole one."""
    start()
    from torchtitan.config import ConfigManager

    from onefold.integrations import torchtitan

    def run(steps: int, stage: int, into: str, keep: bool) -> list[tuple[float, float]]:
        made = torchtitan.by_onefold(config(folder), f'{{"stage": {stage}}}')
        made.training.steps, made.dump_folder = steps, f"{folder}/{into}"
        made.lr_scheduler.total_steps = 2 * STEPS
        made.checkpoint.enable, made.checkpoint.interval = keep, 2
        trainer = made.build()
        seen = watched(trainer)
        trainer.close()
        return seen

    given = ["--module", "onefold.integrations.torchtitan", "--config", "llama3_debugmodel"]
    parsed = ConfigManager().parse_args([*given, "--recipe", '{"stage": 2}'])
    return {
        "whole": run(STEPS, 3, "whole", False),
        "first": run(2, 3, "broken", True),
        "second": run(STEPS, 1, "broken", True),
        "parsed": (type(parsed).__qualname__, parsed.recipe, parsed.loss.__class__.__qualname__),
        "refused": refused(parsed),
    }


def refused(parsed: Any) -> dict[str, str]:
    """What a trainer says to each of these keys."""
    keys = {
        "parallelism.pipeline_parallel_degree": 2,
        "training.enable_cpu_offload": True,
        "training.disable_cuda_graphs": False,
        "checkpoint.last_save_in_hf": True,
        "validator.enable": True,
        "compile.enable": True,
        "recipe": "3",
    }
    said = {}
    for key, value in keys.items():
        made = copy.deepcopy(parsed)
        made.validator.enable = False
        *path, last = key.split(".")
        part = functools.reduce(getattr, path, made)
        setattr(part, last, value)
        try:
            type(made)._owner(made)
        except ValueError as error:
            said[key] = str(error)
    return said
