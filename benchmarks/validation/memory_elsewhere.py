"""Tables about bytes that other libraries and runs print: DeepSpeed's estimators, bytes a parameter by
optimizer, BLOOM, FSDP, torchtitan.
"""

from __future__ import annotations

from benchmarks.validation.formulas import activations, estimators, states
from benchmarks.validation.tables import Line, Table, read
from onefold.plan.shapes import Transformer, architecture

GB, GIB, TIB, BILLION = 1e9, 2**30, 2**40, 1e9
CONVENTIONS = states.CONVENTIONS


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


MAKERS = (deepspeed, conventions, bloom, fsdp_memory, torchtitan_memory)
