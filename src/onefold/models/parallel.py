"""`--tp` and `--ep`: divide the layers and experts of a model by transformers' own plans.

    ranks        data × tp, tp the fastest                       dense mesh    (dp, tp)
    experts      divided among ep × tp ranks, each one whole     expert mesh   (rest, ep × tp)

    model ──► heads and experts divide? ──► parameters become DTensors, forwards are wrapped ──► `onefold.shard(mesh=...)`

The experts of a mixture are never cut: tensor parallelism divides them among its ranks as `--ep`
does. So a rank holds as many bytes of experts as with cut ones, and its experts lie together in
checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onefold.plan.modules import transformer_of
from onefold.wording import TrainError

#: The axes of the mesh that a model is sharded over. Ranks along `DATA` have different samples.
AXES, DATA = ("dp", "tp"), "dp"


def parallelize(
    model: Any, device: torch.device, ranks: int, *, tp: int, ep: int
) -> tuple[nn.Module, DeviceMesh]:
    """Divide a model of transformers in place, and return it with its mesh, which has `AXES`.
    Collective.

    Args:
        model: with its values on every rank, or on the meta device.
        ranks: all of the run.
        tp: ranks that divide each layer.
        ep: data-parallel ranks with different experts.

    Raises:
        TrainError: transformers has no plan for this model, or its heads or experts do not divide.
    """

    def mesh_of(**axes: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    dense = mesh_of(dp=ranks // tp, tp=tp)
    tp_plan, ep_plan = _plans(model, ranks, tp, ep) if tp > 1 or ep > 1 else ({}, {})
    if tp_plan:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        head, words = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and head.weight is words.weight:
            # The plan divides each by itself, and `tie_weights` makes them one again
            head.weight = nn.Parameter(torch.empty_like(words.weight))
        apply_tensor_parallelism(model, dense["tp"], tp_plan)
        model.tie_weights()
    if ep_plan:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        experts = mesh_of(efsdp=ranks // (ep * tp), ep=ep * tp)
        apply_expert_parallelism(model, experts["ep"], dense["tp"], ep_plan)
    return model, dense


def _plans(model: Any, ranks: int, tp: int, ep: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return transformers' plans for tensor and expert parallelism, by the name of each module.

    Raises:
        TrainError: see `parallelize`.
    """
    asked = " ".join(f"--{n} {size}" for n, size in (("tp", tp), ("ep", ep)) if size > 1)
    try:
        from transformers.distributed import DistributedConfig

        resolve = model._resolve_parallel_plans
    except (ImportError, AttributeError):
        raise TrainError(
            f"{asked}: a {type(model).__name__} has no plans for parallelism. It takes a model of"
            " transformers 5.21 or later, such as llama:10m or a folder of a Llama; for any other use"
            " parallelize_module and onefold.shard(mesh=...), as docs/axes.md shows."
        ) from None
    has_experts = bool(getattr(model, "ep_plan", None))
    if tp > 1 and not model.tp_plan:
        raise TrainError(
            f"{asked}: transformers has no tensor-parallel plan for {type(model).__name__}. Use --ep, a"
            " higher --stage, or a model that has one, such as llama:10m."
        )
    if ep > 1 and not has_experts:
        raise TrainError(
            f"{asked}: {type(model).__name__} has no experts, or transformers no plan for them; leave"
            " --ep out."
        )
    experts = ep * tp if has_experts else 1
    dims = transformer_of(model)
    if dims is not None and dims.experts % experts:
        by = " × ".join(f"--{n} {size}" for n, size in (("ep", ep), ("tp", tp)) if size > 1)
        raise TrainError(
            f"{by} does not divide {dims.experts} experts, which are divided among {experts} ranks:"
            f" choose degrees whose product divides {dims.experts}."
        )
    config = DistributedConfig(tp_size=tp, fsdp_size=ranks // tp, ep_size=experts)
    tp_plan, ep_plan, _ = resolve(config)
    return tp_plan, ep_plan
