"""Tables about bytes: states, the largest model, activations, by papers and other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.validation.formulas import activations, estimators, states, streaming
from benchmarks.validation.tables import BILLION, GB, GIB, TIB, Row, Rows, facts, ints, table
from onefold.plan.shapes import Transformer, architecture

CONVENTIONS = states.CONVENTIONS
Lines = Iterator[tuple[Any, ...]]


def trained(capacity: float, convention: str, stage: int, *ranks: int) -> float:
    """Billions of parameters that can be expected to train, by the states."""
    allowed = states.largest_model(capacity, CONVENTIONS[convention], stage, *ranks)
    return states.USABLE * allowed / BILLION


@table("ZeRO Table 1: model states", "formula", "ZeRO, Table 1", "zero_table1_model_states")
def zero_states(rows: Rows) -> Lines:
    """Model states a GPU at 16 bytes a parameter. The paper truncates some figures (128B and 1T at
    stages 1 and 2).
    """
    for r in rows:
        numel, (ranks, stage) = float(r["params_billion"]), ints(r, "dp_degree", "zero_stage")
        held = states.model_states(numel * BILLION, CONVENTIONS["16"], stage, ranks) / GB
        what = f"{r['params_billion']}B, N = {ranks}, stage {stage}"
        yield what, held, r["published_GB_per_gpu(decimal)"], "GB"


@table("ZeRO Table 2: the largest model", "memory", "ZeRO, Table 2", "zero_table2_max_model")
def zero_largest(rows: Rows) -> Lines:
    """Largest model on 32 GB GPUs: what the states allow, and 0.8 of it against what was
    trained.
    """
    for r in rows:
        mp, dp = ints(r, "mp_degree", "dp_degree")
        for stage, key in ((0, "baseline"), (1, "Pos"), (2, "Pos+g"), (3, "Pos+g+p")):
            largest = states.largest_model(32 * GB, CONVENTIONS["16"], stage, dp, mp) / BILLION
            yield f"MP {mp}, states allow, stage {stage}", largest, r[f"theory_{key}_B"], "B"
        for stage, key in ((0, "measured_baseline_B"), (1, "measured_ZeRO-OS(Pos)_B")):
            expected = trained(32 * GB, "16", stage, dp, mp)
            yield f"MP {mp}, trained, stage {stage}", expected, r[key], "B"


@table(
    "ZeRO-Offload Table 1: strategies",
    "formula",
    "ZeRO-Offload, Table 1",
    "offload_table1_strategies",
)
def offload_strategies(rows: Rows) -> Lines:
    """What stays on the GPU when kinds of state go to the host. The paper misprints the memory of
    the last row, not its reduction.
    """
    convention = CONVENTIONS["16"]
    for r in rows:
        optimizer = convention.optimizer if r["param32_opt_on"] == "gpu" else 0
        gradients = convention.gradients if r["grad16_on"] == "gpu" else 0
        held = convention.parameters + gradients + optimizer
        where = f"optimizer {r['param32_opt_on']}, gradients {r['grad16_on']}"
        yield f"{where}, reduction", convention.total / held, r["reduction_x"], "x"


@table(
    "ZeRO-Offload Fig. 7: the largest model",
    "memory",
    "ZeRO-Offload, Fig. 7",
    "offload_fig7_max_model",
)
def offload_largest(rows: Rows) -> Lines:
    """0.8 of what the states allow. On 4 and 16 GPUs the published ZeRO-Offload runs add model
    parallelism, which is not modelled.
    """
    for r in rows:
        (gpus,) = ints(r, "gpus(V100-32GB,1.5TB host)")
        yield f"{gpus} GPUs, PyTorch", trained(32 * GB, "16", 0, gpus), r["PyTorch_B"], "B"
        yield f"{gpus} GPUs, ZeRO-2", trained(32 * GB, "16", 2, gpus), r["ZeRO-2_B"], "B"
        if gpus == 1:
            kept = states.largest_trainable(32 * GB, CONVENTIONS["16"].parameters) / BILLION
            yield "1 GPU, ZeRO-Offload", kept, r["ZeRO-Offload_B"], "B"


@table(
    "ZeRO-Infinity Fig. 6a and 1: the largest model",
    "memory",
    "ZeRO-Infinity, Figs. 1 and 6a",
    "infinity_fig1_table4_max_model",
)
def infinity_largest(rows: Rows) -> Lines:
    """One DGX-2 node at 20 bytes a parameter, 0.8 of what the slowest tier in use allows; then Fig.
    1 by nodes, where the paper rounds down to 1T a node.
    """

    def kept(capacity: float, held: float) -> float:
        return states.largest_trainable(capacity, held) / BILLION

    convention = CONVENTIONS["20"]
    by_config = {
        "Data parallel": trained(32 * GB, "20", 0, 16),
        "ZeRO-2": trained(32 * GB, "20", 2, 16),
        "ZeRO-Offload": kept(32 * GB, convention.parameters),
        "ZeRO-3": trained(32 * GB, "20", 3, 16),
        "ZeRO-Inf-CPU": kept(1500 * GB, convention.total),
        "ZeRO-Inf-NVMe": kept(28_000 * GB, convention.total),
    }
    for r in rows:
        if r["figure"] == "6a" and r["config"] in by_config:
            yield r["config"], by_config[r["config"]], r["max_params_B"], "B"
    for r in rows:
        if r["figure"] == "1" and r["config"] == "ZeRO-Infinity":
            largest = kept(28_000 * GB * int(r["gpus"]) / 16, convention.total)
            yield f"ZeRO-Infinity, {r['gpus']} GPUs, NVMe", largest, r["max_params_B"], "B"


@table(
    "ZeRO-Infinity Fig. 2a: memory", "formula", "ZeRO-Infinity, Fig. 2a", "infinity_fig2a_memory"
)
def infinity_memory(rows: Rows) -> Lines:
    """The paper prints TB and GB and means TiB and GiB; its working memory of the 0.1T model (1.95)
    contradicts its own formula (1.56).
    """
    for r in rows:
        layers, hidden, heads = ints(r, "layers", "hidden", "attn_heads")
        working = streaming.activation_working_bytes
        kept = 2 * activations.checkpoint_elements(layers, hidden, 32, 1024)
        every = layers * working(64, 1024, hidden, heads)
        for what, nbytes, unit, key in (
            ("states", streaming.model_states(layers, hidden), TIB, "states_TiB"),
            ("activations of a node", every, TIB, "act_TiB_per_node"),
            ("checkpoints of a node", kept, TIB, "act_ckpt_TiB_per_node"),
            ("working memory, states", streaming.parameter_working_bytes(hidden), GIB, "MSWM_GiB"),
            ("working memory, activations", working(4, 1024, hidden, heads), GIB, "AWM_GiB"),
        ):
            named = "TiB" if unit == TIB else "GiB"
            yield f"{r['params_T']}T, {what}", nbytes / unit, r[f"{key}_published"], named


# -- other libraries and runs ----------------------------------------------------------------------


def _estimated(r: Row) -> tuple[str, estimators.Estimate]:
    """A row's case, and what DeepSpeed's estimator should print for it."""
    numel, (gpus, nodes) = float(r["total_params"]), ints(r, "gpus", "nodes")
    optimizer = r["offload_optimizer"] == "cpu"
    if r["stage"] == "ZeRO-3":
        got = estimators.zero3_estimate(
            numel,
            float(r["largest_layer_params"]),
            gpus // nodes,
            nodes,
            offload_optimizer=optimizer,
            offload_parameters=r["offload_param"] == "cpu",
            zero_init=r["zero_init"] == "1",
        )
        where = f"parameters {r['offload_param']}, optimizer {r['offload_optimizer']}"
        return f"stage 3, {where}, zero.Init {r['zero_init']}", got
    how, version = (
        ("", "documented") if "code" not in r["case"] else (", as the code has it", "code")
    )
    got = estimators.zero2_estimate(
        numel, gpus // nodes, nodes, offload_optimizer=optimizer, version=version
    )
    return f"stage 2, optimizer {r['offload_optimizer']}{how}", got


@table(
    "DeepSpeed's estimators",
    "formula",
    "DeepSpeed, memory.rst",
    "deepspeed_estimator",
    "deepspeed_t5large_example",
)
def deepspeed(rows: Rows, examples: Rows) -> Lines:
    """What DeepSpeed's own estimators print (GiB, called GB). The GPU column of stage 3 prints two
    digits.
    """
    for r in rows:
        name, got = _estimated(r)
        yield f"{name}: host", got.host / GIB, r["published_per_cpu_GiB(printed GB)"], "GiB"
        gpu = r["published_per_gpu_GiB(printed GB)"].split()[0]
        yield f"{name}: GPU", got.gpu / GIB, gpu, "GiB"
    for r in examples:
        size = float(r["total_params"]), float(r["largest_layer_params"]), int(r["gpus"])
        both = {"offload_optimizer": True, "offload_parameters": True}
        for what, how, key in (
            ("no offload", {}, "case1_none_MiB"),
            ("both offloaded", both, "case2_offload_both_MiB"),
        ):
            got = estimators.zero3_estimate(*size, **how)
            yield f"t5-large on 4 GPUs, {what}", got.gpu / 2**20, r[key], "MiB"


@table(
    "Bytes a parameter",
    "formula",
    "Megatron-LM, dist_optimizer.md; ultra-scale playbook; ZeRO-Offload, section 3",
    "megatron_distopt_bytes_per_param",
    "playbook_memory_table",
    "offload_formulas",
)
def conventions(megatron: Rows, playbook: Rows, offload: Rows) -> Lines:
    """Bytes a parameter, by who counts: 16, 18, 20. ZeRO-Offload prints 284 GB for 17.2B where its
    formula gives 275.
    """
    names = {"fp16/fp16": "20", "bf16/fp32": "18", "fp32/fp32": "fp32"}
    for r in megatron:
        convention = CONVENTIONS[names[f"{r['param_dtype']}/{r['grad_dtype']}"]]
        fixed, shared = r["distributed(d=DP size)"].split("+")
        name = f"Megatron {r['param_dtype']} parameters, {r['grad_dtype']} gradients"
        yield f"{name}, not distributed", convention.total, r["non_distributed"], "B"
        at_8 = float(fixed) + float(shared.removesuffix("/d")) / 8
        yield f"{name}, d = 8", states.model_states(1, convention, 1, 8), at_8, "B"
    for r in playbook:
        for at, key in (("16", "params_grads_opt_16B(GB)"), ("20", "with_fp32_grad_accum_20B(GB)")):
            held = CONVENTIONS[at].total * float(r["params_B"]) * BILLION / GB
            yield f"{r['params_B']}B at {at}", held, r[key], "GB"
    for r in offload:
        if r["id"].startswith("O-ex"):
            numel = {"O-ex1": 8e9, "O-ex2": 11e9, "O-ex3": 17.2e9}[r["id"]]
            held = CONVENTIONS["16"].total * numel / GB
            yield r["quantity"], held, r["value"].split()[0], "GB"


@table("BLOOM's facts", "formula", "BigScience, tr11-176B-ml", "bloom_facts")
def bloom(rows: Rows) -> Lines:
    """Parameters from the architecture's table."""
    said, model = facts(rows), architecture("bloom-176b")
    words = "word_embeddings.weight"
    embedding = next(p.numel for p in model.units[0].parameters if p.name.endswith(words))
    checkpoint = said["full checkpoint (README value = 14*176e9)"]
    weights = said["bf16 weights (= 2*176e9; du shows 329G)"]
    yield "parameters", model.numel / BILLION, float(said["params"]) / BILLION, "B"
    layer = float(said["layer params"]) / 1e6
    yield "parameters of a layer", model.units[1].numel / 1e6, layer, "M"
    words = float(said["embedding params"]) / 1e6
    yield "parameters of the embedding", embedding / 1e6, words, "M"
    yield "full checkpoint", states.checkpoint_bytes(176e9) / GIB, checkpoint, "GiB"
    yield "weights in bf16", 2 * 176e9 / GIB, weights, "GiB"
    yield "bytes a parameter", CONVENTIONS["18"].total, said["rule of thumb"], "B"


@table("FSDP Fig. 8: memory", "memory", "PyTorch FSDP, Fig. 8 (digitized)", "fsdp_fig8_memory")
def fsdp_memory(rows: Rows) -> Lines:
    """Bytes allocated at peak: fp32 states over all ranks, two units gathered and one unit's
    gradients in 16 bits, a checkpoint a block, one block being recomputed, logits.
    """
    dims = Transformer(96, 12_288, 96, 4 * 12_288, 50_000, 2048, fused_attention=False)
    numel, unit = 175e9, 175e9 / 96
    for r in rows:
        gpus, batch = ints(r, "gpus", "batch_per_gpu")
        kept = activations.total_bytes(dims, batch, recompute="full")
        kept += activations.logits_bytes(dims, batch)
        held = states.model_states(numel, CONVENTIONS["fp32"], 3, gpus) + 2 * 2 * unit + 2 * unit
        what = f"{r['model']}, batch {batch}, {gpus} GPUs"
        yield what, (held + kept) / GB, r["allocated_GB"], "GB"


@table(
    "torchtitan: memory freed by more ranks",
    "memory",
    "torchtitan benchmarks and paper",
    "torchtitan_llama31_h100",
    "torchtitan_paper_tables",
    "torchtitan_h200_fp8",
)
def torchtitan_memory(benchmarks: Rows, paper: Rows, fp8: Rows) -> Lines:
    """How much less a GPU holds at its peak on more ranks: the states' share alone. Each peak is
    printed to 0.1 GiB.
    """
    by_name: dict[str, dict[int, float]] = {}
    for r in [*benchmarks[:6], *paper]:
        name = f"{r.get('parallelism') or 'paper: ' + r['technique']}"
        gpus = int(r.get("gpus(H100-96GB)") or r["gpus"])
        by_name.setdefault(name, {})[gpus] = float(r["peak_memory_GiB"])
    numel, convention = architecture("llama-3-8b").numel, CONVENTIONS["fp32"]
    freed = states.freed_by_more_ranks(numel, convention, 3, 8, 128) / GIB
    for name, at in by_name.items():
        if {8, 128} <= set(at):
            yield f"{name}, 8 to 128 GPUs", freed, at[8] - at[128], "GiB"
    few, many = (float(r["peak_memory_GiB"]) for r in fp8)
    freed = states.freed_by_more_ranks(numel, convention, 3, 32, 64) / GIB
    yield "H200, 32 to 64 GPUs", freed, few - many, "GiB"
