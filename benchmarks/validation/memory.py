"""Tables about bytes in the papers of ZeRO, ZeRO-Offload and ZeRO-Infinity: model states, the largest
model, activations.
"""

from __future__ import annotations

from benchmarks.validation.formulas import activations, states, streaming
from benchmarks.validation.tables import Line, Table, read

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


MAKERS = (
    zero_states,
    zero_largest,
    offload_strategies,
    offload_largest,
    infinity_largest,
    infinity_memory,
)
