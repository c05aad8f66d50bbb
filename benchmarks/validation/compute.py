"""Tables about FLOPs, parameters and traffic: both sides compute from the same dimensions, so that
they should agree closely.
"""

from __future__ import annotations

from benchmarks.validation.formulas import compute as formulas
from benchmarks.validation.formulas import streaming, traffic
from benchmarks.validation.tables import Line, Table, read

A100, BILLION = 312e12, 1e9


def megatron_sizes() -> Table:
    lines = []
    for r in read("megatron_table1_weak_scaling"):
        layers, hidden, gpus = int(r["layers"]), int(r["hidden"]), int(r["gpus(A100-80GB)"])
        size = formulas.megatron_parameters(layers, hidden) / BILLION
        lines.append(Line(f"{r['params_B']}B, parameters", size, float(r["params_B"]), "B"))
        share = 100 * float(r["TFLOPS_per_gpu"]) * 1e12 / A100
        lines.append(Line(f"{r['params_B']}B, share of the peak", share, float(r["pct_peak"]), "%"))
        total = float(r["TFLOPS_per_gpu"]) * gpus / 1000
        lines.append(
            Line(f"{r['params_B']}B, all GPUs", total, float(r["aggregate_PFLOPS"]), "PFLOP/s")
        )
    says = (
        "Parameters by the formula; shares and totals from the printed TFLOP/s a GPU, which are"
        " rounded to whole numbers."
    )
    return Table(
        "Megatron-LM Table 1: sizes",
        "formula",
        "Megatron-LM, Table 1",
        ("megatron_table1_weak_scaling",),
        says,
        lines,
    )


def published_sizes() -> Table:
    lines = []
    for file, size, key in (
        ("zero_table5_fig2_configs", "size_B", "ZeRO Table 5"),
        ("zero_table10_no_mp_configs", "params_B", "ZeRO Table 10"),
        ("offload_table3_configs", "params_B", "ZeRO-Offload Table 3"),
        ("korthikanti_table3_configs", "params_B", "Korthikanti Table 3"),
    ):
        seen = set()
        for r in read(file):
            layers, hidden, published = int(r["layers"]), int(r["hidden"]), float(r[size])
            if (layers, hidden) not in seen:
                seen.add((layers, hidden))
                got = formulas.megatron_parameters(layers, hidden, 50_257, 1024) / BILLION
                lines.append(Line(f"{key}: {layers} layers of {hidden}", got, published, "B"))
    for r in read("infinity_table1_configs"):
        layers, hidden = int(r["layers"]), int(r["hidden_K"]) * 1024
        published = float(r["params"][:-1]) * (1 if r["params"].endswith("B") else 1000)
        lines.append(
            Line(
                f"ZeRO-Infinity Table 1: {layers} layers of {hidden}",
                streaming.parameters(layers, hidden) / BILLION,
                published,
                "B",
            )
        )
    says = (
        "Named sizes against their own dimensions. The papers name sizes roughly: ZeRO-Infinity's"
        " 5T and 20T come out within 1 %, ZeRO's 1.38B at 40 layers of 1536 does not (1.21B)."
    )
    files = (
        "zero_table5_fig2_configs",
        "zero_table10_no_mp_configs",
        "offload_table3_configs",
        "korthikanti_table3_configs",
    )
    return Table(
        "Sizes from dimensions",
        "formula",
        "as named in each line",
        (*files, "infinity_table1_configs"),
        says,
        lines,
    )


def infinity_efficiency() -> Table:
    lines = []
    for r in read("infinity_fig3_efficiency_points"):
        streamed = {"params_grads": "params"}.get(r["component"], r["component"])
        batch, seq, hidden = (int(r[k] or 1) for k in ("bsz_per_gpu", "seq", "hidden"))
        ait = streaming.intensity(streamed, batch=batch, seq=seq, hidden=hidden)
        got = streaming.efficiency(ait, float(r["bw_GBps"]) * 1e9)
        what = (
            f"{r['component']},"
            f" {'hidden ' + r['hidden'] if streamed == 'act_ckpt' else 'batch ' + r['bsz_per_gpu']},"
            f" {r['bw_GBps']} GB/s"
        )
        lines.append(Line(what, got, float(r["efficiency_formula"]), ""))
    says = (
        "Share of the peak left when nothing overlaps. These points are themselves computed from"
        " the paper's equations."
    )
    return Table(
        "ZeRO-Infinity Fig. 3: efficiency",
        "formula",
        "ZeRO-Infinity, Fig. 3",
        ("infinity_fig3_efficiency_points",),
        says,
        lines,
    )


def korthikanti() -> Table:
    lines = []
    shape = {"22B": "22B", "175B": "175B (GPT-3)", "530B": "530B (MT-NLG)", "1T": "1T"}
    configs = {r["model"]: r for r in read("korthikanti_table3_configs")}
    for r in read("korthikanti_table5_end_to_end"):
        config = configs.get(shape.get(r["model"], ""))
        if config is None:
            continue
        layers, hidden, batch, gpus = (
            int(config[k]) for k in ("layers", "hidden", "global_batch", "gpus")
        )
        model = formulas.megatron_flops(batch, 2048, layers, hidden, recompute=False)
        seconds = float(r["present_work_iter_s"])
        mfu = 100 * formulas.utilization(model, seconds, gpus, A100)
        lines.append(Line(f"{r['model']}, MFU of the printed time", mfu, float(r["MFU_pct"]), "%"))
        hfu = mfu * formulas.selective_recompute_ratio(2048, hidden)
        lines.append(Line(f"{r['model']}, HFU", hfu, float(r["HFU_pct"]), "%"))
    layer = {
        r["experiment"]: float(r["combined_ms"]) for r in read("korthikanti_table4_layer_times_22B")
    }
    slower = layer["baseline with recompute"] / layer["baseline no recompute"]
    lines.append(
        Line("22B layer, full recompute against none", formulas.FULL_RECOMPUTE, slower, "x")
    )
    selective = layer["selective recompute"] / layer["baseline no recompute"]
    lines.append(
        Line(
            "22B layer, selective recompute against none",
            formulas.selective_recompute_ratio(2048, 6144),
            selective,
            "x",
        )
    )
    says = (
        "Model and hardware FLOPs over the published seconds; what recompute costs in FLOPs against"
        " what it cost in time."
    )
    files = (
        "korthikanti_table3_configs",
        "korthikanti_table4_layer_times_22B",
        "korthikanti_table5_end_to_end",
    )
    return Table(
        "Korthikanti et al.: utilization",
        "formula",
        "Korthikanti et al., Tables 3 to 5",
        files,
        says,
        lines,
    )


def megascale() -> Table:
    lines = []
    for r in read("megascale_scaling"):
        if r["iter_s"]:
            flops = formulas.megatron_flops(
                int(r["global_batch"]), 2048, 96, 12_288, 64_000, recompute=False
            )
            gpus = int(r["gpus(A100)"])
            mfu = 100 * formulas.utilization(flops, float(r["iter_s"]), gpus, A100)
            lines.append(Line(f"{r['system']}, {gpus} GPUs", mfu, float(r["MFU_pct"]), "%"))
    says = (
        "MFU of the printed seconds (TP 8, PP 8 runs, which the plan does not model): a check of"
        " the FLOPs convention."
    )
    return Table(
        "MegaScale Table 2: MFU",
        "formula",
        "MegaScale, Table 2",
        ("megascale_scaling",),
        says,
        lines,
    )


def facts() -> Table:
    bloom = {r["item"]: r["value"] for r in read("bloom_facts")}
    done = (
        formulas.megatron_flops(2048, 2048, 70, 14_336, 250_880)
        / (float(bloom["iteration time"]) * 384)
        / 1e12
    )
    lines = [
        Line(
            "BLOOM, TFLOP/s a GPU of the printed time", done, float(bloom["throughput"]), "TFLOP/s"
        )
    ]
    nlg = {r["item"]: r["value"] for r in read("mtnlg_llama_facts") if r["system"].startswith("MT")}
    times, rates = (nlg[k].split(" / ") for k in ("iteration time GBS1920", "throughput"))
    for gpus, seconds, rate in zip((2240, 2800, 3360), times, rates, strict=True):
        got = formulas.megatron_flops(1920, 2048, 105, 20_480) / (float(seconds) * gpus) / 1e12
        lines.append(
            Line(
                f"MT-NLG 530B on {gpus}, TFLOP/s a GPU of the printed time",
                got,
                float(rate),
                "TFLOP/s",
            )
        )
    llama = {
        r["item"]: r["value"] for r in read("mtnlg_llama_facts") if r["system"].startswith("LLaMA")
    }
    days = (
        float(llama["tokens"])
        / (float(llama["throughput"]) * int(llama["GPUs"]))
        / formulas.SECONDS_A_DAY
    )
    lines.append(Line("LLaMA-65B, days of the printed tokens/s", days, 21, "days"))
    case = {r["item"]: r["value"] for r in read("idefics80b_zero3_case")}
    once = traffic.volume("zero-3") * 80e9 * 2 / 42.5e9
    lines.append(
        Line(
            "IDEFICS-80B, seconds of communication",
            once,
            float(case["comm formula 3*2*80/42.5"]),
            "s",
        )
    )
    passes = formulas.infinity_flops(80e9, 3584, 1024) / (512 * 250e12)
    lines.append(
        Line(
            "IDEFICS-80B, seconds of compute",
            passes,
            float(case["compute formula 4*2*80*1024*3584/(512e3*250)"]),
            "s",
        )
    )
    says = "Single facts. Megatron's FLOPs are hardware FLOPs with full recompute."
    files = ("bloom_facts", "mtnlg_llama_facts", "idefics80b_zero3_case")
    return Table(
        "Throughput of single runs",
        "formula",
        "BigScience; MT-NLG; LLaMA; ml-engineering",
        files,
        says,
        lines,
    )


def zeropp_volume() -> Table:
    lines = []
    for r, options in zip(
        read("zeropp_comm_volume"),
        ({"quantized_weights": False, "secondary_copy": False, "quantized_gradients": False}, {}),
        strict=True,
    ):
        got = traffic.zeropp_bytes(1.0, element_bytes=1, **options)["between"]
        lines.append(Line(r["method"], got, float(r["total_M(cross-node,fp16-equivalent)"]), "Ψ"))
    return Table(
        "ZeRO++: volume between nodes",
        "formula",
        "DeepSpeed, ZeRO++ post",
        ("zeropp_comm_volume",),
        "Between nodes.",
        lines,
    )


MAKERS = (
    megatron_sizes,
    published_sizes,
    infinity_efficiency,
    korthikanti,
    megascale,
    facts,
    zeropp_volume,
)
