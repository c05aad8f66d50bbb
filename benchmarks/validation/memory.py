"""Tables about bytes: model states, the largest model, activations, checkpoints."""

from __future__ import annotations

from benchmarks.validation.formulas import activations, estimators, states, streaming
from benchmarks.validation.tables import Line, Table, read
from onefold.plan.architectures import architecture
from onefold.plan.shapes import Transformer

GB, GIB, TIB, BILLION = 1e9, 2**30, 2**40, 1e9
CONVENTIONS = states.CONVENTIONS


def zero_states() -> Table:
    lines = [
        Line(
            f"{r['params_billion']}B, N = {r['dp_degree']}, stage {r['zero_stage']}",
            states.model_states(
                float(r["params_billion"]) * BILLION,
                CONVENTIONS["16"],
                int(r["zero_stage"]),
                int(r["dp_degree"]),
            )
            / GB,
            float(r["published_GB_per_gpu(decimal)"]),
            "GB",
        )
        for r in read("zero_table1_model_states")
    ]
    says = (
        "Model states a GPU at 16 bytes a parameter. The paper truncates some figures (128B and 1T"
        " at stages 1 and 2)."
    )
    return Table(
        "ZeRO Table 1: model states",
        "formula",
        "ZeRO, Table 1",
        ("zero_table1_model_states",),
        says,
        lines,
    )


def zero_largest() -> Table:
    lines = []
    for r in read("zero_table2_max_model"):
        mp, dp = int(r["mp_degree"]), int(r["dp_degree"])
        for stage, key in ((0, "baseline"), (1, "Pos"), (2, "Pos+g"), (3, "Pos+g+p")):
            largest = states.largest_model(32 * GB, CONVENTIONS["16"], stage, dp, mp) / BILLION
            lines.append(
                Line(
                    f"MP {mp}, states allow, stage {stage}",
                    largest,
                    float(r[f"theory_{key}_B"]),
                    "B",
                )
            )
        for stage, key in ((0, "measured_baseline_B"), (1, "measured_ZeRO-OS(Pos)_B")):
            trained = (
                states.USABLE
                * states.largest_model(32 * GB, CONVENTIONS["16"], stage, dp, mp)
                / BILLION
            )
            lines.append(Line(f"MP {mp}, trained, stage {stage}", trained, float(r[key]), "B"))
    says = (
        f"Largest model on 32 GB GPUs: what the states allow, and {states.USABLE} of it against"
        " what was trained."
    )
    return Table(
        "ZeRO Table 2: the largest model",
        "memory",
        "ZeRO, Table 2",
        ("zero_table2_max_model",),
        says,
        lines,
    )


def offload_strategies() -> Table:
    convention = CONVENTIONS["16"]
    lines = []
    for r in read("offload_table1_strategies"):
        optimizer = convention.optimizer if r["param32_opt_on"] == "gpu" else 0
        gradients = convention.gradients if r["grad16_on"] == "gpu" else 0
        held = convention.parameters + gradients + optimizer
        where = f"optimizer {r['param32_opt_on']}, gradients {r['grad16_on']}"
        lines.append(
            Line(f"{where}, reduction", convention.total / held, float(r["reduction_x"]), "x")
        )
    says = (
        "What stays on the GPU when kinds of state go to the host. The paper misprints the memory"
        " of the last row, not its reduction."
    )
    return Table(
        "ZeRO-Offload Table 1: strategies",
        "formula",
        "ZeRO-Offload, Table 1",
        ("offload_table1_strategies",),
        says,
        lines,
    )


def offload_largest() -> Table:
    lines = []
    for r in read("offload_fig7_max_model"):
        gpus = int(r["gpus(V100-32GB,1.5TB host)"])
        plain = states.USABLE * states.largest_model(32 * GB, CONVENTIONS["16"], 0, gpus) / BILLION
        two = states.USABLE * states.largest_model(32 * GB, CONVENTIONS["16"], 2, gpus) / BILLION
        offload = states.largest_trainable(32 * GB, CONVENTIONS["16"].parameters) / BILLION
        lines.append(Line(f"{gpus} GPUs, PyTorch", plain, float(r["PyTorch_B"]), "B"))
        lines.append(Line(f"{gpus} GPUs, ZeRO-2", two, float(r["ZeRO-2_B"]), "B"))
        if gpus == 1:
            lines.append(Line("1 GPU, ZeRO-Offload", offload, float(r["ZeRO-Offload_B"]), "B"))
    says = (
        "0.8 of what the states allow. On 4 and 16 GPUs the published ZeRO-Offload runs add model"
        " parallelism, which is not modelled."
    )
    return Table(
        "ZeRO-Offload Fig. 7: the largest model",
        "memory",
        "ZeRO-Offload, Fig. 7",
        ("offload_fig7_max_model",),
        says,
        lines,
    )


def infinity_largest() -> Table:
    sixteen = 16
    by_config = {
        "Data parallel": (
            states.USABLE * states.largest_model(32 * GB, CONVENTIONS["20"], 0, sixteen)
        ),
        "ZeRO-2": states.USABLE * states.largest_model(32 * GB, CONVENTIONS["20"], 2, sixteen),
        "ZeRO-Offload": states.largest_trainable(32 * GB, CONVENTIONS["20"].parameters),
        "ZeRO-3": states.USABLE * states.largest_model(32 * GB, CONVENTIONS["20"], 3, sixteen),
        "ZeRO-Inf-CPU": states.largest_trainable(1500 * GB, CONVENTIONS["20"].total),
        "ZeRO-Inf-NVMe": states.largest_trainable(28_000 * GB, CONVENTIONS["20"].total),
    }
    lines = [
        Line(r["config"], by_config[r["config"]] / BILLION, float(r["max_params_B"]), "B")
        for r in read("infinity_fig1_table4_max_model")
        if r["figure"] == "6a" and r["config"] in by_config
    ]
    lines += [
        Line(
            f"ZeRO-Infinity, {r['gpus']} GPUs, NVMe",
            states.largest_trainable(28_000 * GB * int(r["gpus"]) / 16, CONVENTIONS["20"].total)
            / BILLION,
            float(r["max_params_B"]),
            "B",
        )
        for r in read("infinity_fig1_table4_max_model")
        if r["figure"] == "1" and r["config"] == "ZeRO-Infinity"
    ]
    says = (
        "One DGX-2 node at 20 bytes a parameter, 0.8 of what the slowest tier in use allows; then"
        " Fig. 1 by nodes, where the paper rounds down to 1T a node."
    )
    source = "ZeRO-Infinity, Figs. 1 and 6a"
    return Table(
        "ZeRO-Infinity Fig. 6a and 1: the largest model",
        "memory",
        source,
        ("infinity_fig1_table4_max_model",),
        says,
        lines,
    )


def infinity_memory() -> Table:
    lines = []
    for r in read("infinity_fig2a_memory"):
        layers, hidden, heads = int(r["layers"]), int(r["hidden"]), int(r["attn_heads"])
        name = f"{r['params_T']}T"
        kept = 2 * activations.checkpoint_elements(layers, hidden, 32, 1024)
        every = layers * streaming.activation_working_bytes(64, 1024, hidden, heads)
        lines += [
            Line(
                f"{name}, states",
                streaming.model_states(layers, hidden) / TIB,
                float(r["states_TiB_published"]),
                "TiB",
            ),
            Line(
                f"{name}, activations of a node",
                every / TIB,
                float(r["act_TiB_per_node_published"]),
                "TiB",
            ),
            Line(
                f"{name}, checkpoints of a node",
                kept / TIB,
                float(r["act_ckpt_TiB_per_node_published"]),
                "TiB",
            ),
            Line(
                f"{name}, working memory, states",
                streaming.parameter_working_bytes(hidden) / GIB,
                float(r["MSWM_GiB_published"]),
                "GiB",
            ),
            Line(
                f"{name}, working memory, activations",
                streaming.activation_working_bytes(4, 1024, hidden, heads) / GIB,
                float(r["AWM_GiB_published"]),
                "GiB",
            ),
        ]
    says = (
        "The paper prints TB and GB and means TiB and GiB; its working memory of the 0.1T model"
        " (1.95) contradicts its own formula (1.56)."
    )
    return Table(
        "ZeRO-Infinity Fig. 2a: memory",
        "formula",
        "ZeRO-Infinity, Fig. 2a",
        ("infinity_fig2a_memory",),
        says,
        lines,
    )


def deepspeed() -> Table:
    lines = []
    for r in read("deepspeed_estimator"):
        numel, gpus, nodes = float(r["total_params"]), int(r["gpus"]), int(r["nodes"])
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
            name = (
                f"stage 3, parameters {r['offload_param']}, optimizer {r['offload_optimizer']},"
                f" zero.Init {r['zero_init']}"
            )
        else:
            code = "code" in r["case"]
            got = estimators.zero2_estimate(
                numel,
                gpus // nodes,
                nodes,
                offload_optimizer=optimizer,
                version="code" if code else "documented",
            )
            name = (
                "stage 2, optimizer"
                f" {r['offload_optimizer']}{', as the code has it' if code else ''}"
            )
        lines.append(
            Line(
                f"{name}: host",
                got.host / GIB,
                float(r["published_per_cpu_GiB(printed GB)"]),
                "GiB",
            )
        )
        lines.append(
            Line(
                f"{name}: GPU",
                got.gpu / GIB,
                float(r["published_per_gpu_GiB(printed GB)"].split()[0]),
                "GiB",
            )
        )
    for r in read("deepspeed_t5large_example"):
        numel, layer, gpus = (
            float(r["total_params"]),
            float(r["largest_layer_params"]),
            int(r["gpus"]),
        )
        none = estimators.zero3_estimate(numel, layer, gpus).gpu
        both = estimators.zero3_estimate(
            numel, layer, gpus, offload_optimizer=True, offload_parameters=True
        ).gpu
        lines.append(
            Line("t5-large on 4 GPUs, no offload", none / 2**20, float(r["case1_none_MiB"]), "MiB")
        )
        lines.append(
            Line(
                "t5-large on 4 GPUs, both offloaded",
                both / 2**20,
                float(r["case2_offload_both_MiB"]),
                "MiB",
            )
        )
    says = (
        "What DeepSpeed's own estimators print (GiB, called GB). The GPU column of stage 3 prints"
        " two digits."
    )
    files = ("deepspeed_estimator", "deepspeed_t5large_example")
    return Table("DeepSpeed's estimators", "formula", "DeepSpeed, memory.rst", files, says, lines)


def conventions() -> Table:
    lines = []
    for r in read("megatron_distopt_bytes_per_param"):
        convention = CONVENTIONS[
            {"fp16/fp16": "20", "bf16/fp32": "18", "fp32/fp32": "fp32"}[
                f"{r['param_dtype']}/{r['grad_dtype']}"
            ]
        ]
        fixed, shared = r["distributed(d=DP size)"].split("+")
        name = f"Megatron {r['param_dtype']} parameters, {r['grad_dtype']} gradients"
        lines.append(
            Line(f"{name}, not distributed", convention.total, float(r["non_distributed"]), "B")
        )
        at_8 = float(fixed) + float(shared.removesuffix("/d")) / 8
        lines.append(Line(f"{name}, d = 8", states.model_states(1, convention, 1, 8), at_8, "B"))
    for r in read("playbook_memory_table"):
        numel = float(r["params_B"]) * BILLION
        lines.append(
            Line(
                f"{r['params_B']}B at 16",
                CONVENTIONS["16"].total * numel / GB,
                float(r["params_grads_opt_16B(GB)"]),
                "GB",
            )
        )
        lines.append(
            Line(
                f"{r['params_B']}B at 20",
                CONVENTIONS["20"].total * numel / GB,
                float(r["with_fp32_grad_accum_20B(GB)"]),
                "GB",
            )
        )
    for r in read("offload_formulas"):
        if r["id"].startswith("O-ex"):
            numel = {"O-ex1": 8e9, "O-ex2": 11e9, "O-ex3": 17.2e9}[r["id"]]
            lines.append(
                Line(
                    r["quantity"],
                    CONVENTIONS["16"].total * numel / GB,
                    float(r["value"].split()[0]),
                    "GB",
                )
            )
    says = (
        "Bytes a parameter, by who counts: 16, 18, 20. ZeRO-Offload prints 284 GB for 17.2B where"
        " its formula gives 275."
    )
    files = ("megatron_distopt_bytes_per_param", "playbook_memory_table", "offload_formulas")
    source = "Megatron-LM, dist_optimizer.md; ultra-scale playbook; ZeRO-Offload, section 3"
    return Table("Bytes a parameter", "formula", source, files, says, lines)


def bloom() -> Table:
    facts = {r["item"]: r["value"] for r in read("bloom_facts")}
    model = architecture("bloom-176b")
    block = model.units[1].numel
    embedding = next(
        p.numel for p in model.units[0].parameters if p.name.endswith("word_embeddings.weight")
    )
    lines = [
        Line("parameters", model.numel / BILLION, float(facts["params"]) / BILLION, "B"),
        Line("parameters of a layer", block / 1e6, float(facts["layer params"]) / 1e6, "M"),
        Line(
            "parameters of the embedding",
            embedding / 1e6,
            float(facts["embedding params"]) / 1e6,
            "M",
        ),
        Line(
            "full checkpoint",
            states.checkpoint_bytes(176e9) / GIB,
            float(facts["full checkpoint (README value = 14*176e9)"]),
            "GiB",
        ),
        Line(
            "weights in bf16",
            2 * 176e9 / GIB,
            float(facts["bf16 weights (= 2*176e9; du shows 329G)"]),
            "GiB",
        ),
        Line("bytes a parameter", CONVENTIONS["18"].total, float(facts["rule of thumb"]), "B"),
    ]
    return Table(
        "BLOOM's facts",
        "formula",
        "BigScience, tr11-176B-ml",
        ("bloom_facts",),
        "Parameters from the architecture's table.",
        lines,
    )


def fsdp_memory() -> Table:
    dims = Transformer(96, 12_288, 96, 4 * 12_288, 50_000, 2048, fused_attention=False)
    numel, unit = 175e9, 175e9 / 96
    lines = []
    for r in read("fsdp_fig8_memory"):
        gpus, batch = int(r["gpus"]), int(r["batch_per_gpu"])
        kept = activations.total_bytes(dims, batch, recompute="full") + activations.logits_bytes(
            dims, batch
        )
        held = states.model_states(numel, CONVENTIONS["fp32"], 3, gpus) + 2 * 2 * unit + 2 * unit
        lines.append(
            Line(
                f"{r['model']}, batch {batch}, {gpus} GPUs",
                (held + kept) / GB,
                float(r["allocated_GB"]),
                "GB",
            )
        )
    says = (
        "Bytes allocated at peak: fp32 states over all ranks, two units gathered and one unit's"
        " gradients in 16 bits, a checkpoint a block, one block being recomputed, logits."
    )
    return Table(
        "FSDP Fig. 8: memory",
        "memory",
        "PyTorch FSDP, Fig. 8 (digitized)",
        ("fsdp_fig8_memory",),
        says,
        lines,
    )


def torchtitan_memory() -> Table:
    by_name: dict[str, dict[int, float]] = {}
    for r in [*read("torchtitan_llama31_h100")[:6], *read("torchtitan_paper_tables")]:
        name = f"{r.get('parallelism') or 'paper: ' + r['technique']}"
        gpus = int(r.get("gpus(H100-96GB)") or r["gpus"])
        by_name.setdefault(name, {})[gpus] = float(r["peak_memory_GiB"])
    numel = architecture("llama-3-8b").numel
    freed = states.freed_by_more_ranks(numel, CONVENTIONS["fp32"], 3, 8, 128) / GIB
    lines = [
        Line(f"{name}, 8 to 128 GPUs", freed, at[8] - at[128], "GiB")
        for name, at in by_name.items()
        if {8, 128} <= set(at)
    ]
    few, many = (float(r["peak_memory_GiB"]) for r in read("torchtitan_h200_fp8"))
    freed = states.freed_by_more_ranks(numel, CONVENTIONS["fp32"], 3, 32, 64) / GIB
    lines.append(Line("H200, 32 to 64 GPUs", freed, few - many, "GiB"))
    says = (
        "How much less a GPU holds at its peak on more ranks: the states' share alone. Each peak is"
        " printed to 0.1 GiB."
    )
    files = ("torchtitan_llama31_h100", "torchtitan_paper_tables", "torchtitan_h200_fp8")
    return Table(
        "torchtitan: memory freed by more ranks",
        "memory",
        "torchtitan benchmarks and paper",
        files,
        says,
        lines,
    )


MAKERS = (
    zero_states,
    zero_largest,
    offload_strategies,
    offload_largest,
    infinity_largest,
    infinity_memory,
    deepspeed,
    conventions,
    bloom,
    fsdp_memory,
    torchtitan_memory,
)
