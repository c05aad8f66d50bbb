"""Tables about FLOPs, parameters and traffic: both sides compute from the same dimensions."""

from __future__ import annotations

from benchmarks.validation import tables
from benchmarks.validation.formulas import compute as formulas
from benchmarks.validation.formulas import streaming, traffic
from benchmarks.validation.memory import Lines
from benchmarks.validation.tables import BILLION, Rows, ints, table

A100 = 312e12


@table(
    "Megatron-LM Table 1: sizes", "formula", "Megatron-LM, Table 1", "megatron_table1_weak_scaling"
)
def megatron_sizes(rows: Rows) -> Lines:
    """Parameters by the formula; shares and totals from the printed TFLOP/s a GPU, which are
    rounded to whole numbers.
    """
    for r in rows:
        layers, hidden, gpus = ints(r, "layers", "hidden", "gpus(A100-80GB)")
        name, rate = f"{r['params_B']}B", float(r["TFLOPS_per_gpu"])
        size = formulas.megatron_parameters(layers, hidden) / BILLION
        yield f"{name}, parameters", size, r["params_B"], "B"
        yield f"{name}, share of the peak", 100 * rate * 1e12 / A100, r["pct_peak"], "%"
        yield f"{name}, all GPUs", rate * gpus / 1000, r["aggregate_PFLOPS"], "PFLOP/s"


@table(
    "Sizes from dimensions",
    "formula",
    "as named in each line",
    "zero_table5_fig2_configs",
    "zero_table10_no_mp_configs",
    "offload_table3_configs",
    "korthikanti_table3_configs",
    "infinity_table1_configs",
)
def published_sizes(
    zero_5: Rows, zero_10: Rows, offload: Rows, korthikanti: Rows, infinity: Rows
) -> Lines:
    """Named sizes against their own dimensions. The papers name sizes roughly: ZeRO-Infinity's 5T
    and 20T come out within 1 %, ZeRO's 1.38B at 40 layers of 1536 does not (1.21B).
    """
    for rows, size, key in (
        (zero_5, "size_B", "ZeRO Table 5"),
        (zero_10, "params_B", "ZeRO Table 10"),
        (offload, "params_B", "ZeRO-Offload Table 3"),
        (korthikanti, "params_B", "Korthikanti Table 3"),
    ):
        seen = set()
        for r in rows:
            layers, hidden = ints(r, "layers", "hidden")
            if (layers, hidden) not in seen:
                seen.add((layers, hidden))
                got = formulas.megatron_parameters(layers, hidden, 50_257, 1024) / BILLION
                yield f"{key}: {layers} layers of {hidden}", got, r[size], "B"
    for r in infinity:
        layers, hidden = int(r["layers"]), int(r["hidden_K"]) * 1024
        published = float(r["params"][:-1]) * (1 if r["params"].endswith("B") else 1000)
        got = streaming.parameters(layers, hidden) / BILLION
        yield f"ZeRO-Infinity Table 1: {layers} layers of {hidden}", got, published, "B"


@table(
    "ZeRO-Infinity Fig. 3: efficiency",
    "formula",
    "ZeRO-Infinity, Fig. 3",
    "infinity_fig3_efficiency_points",
)
def infinity_efficiency(rows: Rows) -> Lines:
    """Share of the peak left when nothing overlaps. These points are themselves computed from the
    paper's equations.
    """
    for r in rows:
        streamed = {"params_grads": "params"}.get(r["component"], r["component"])
        batch, seq, hidden = (int(r[k] or 1) for k in ("bsz_per_gpu", "seq", "hidden"))
        ait = streaming.intensity(streamed, batch=batch, seq=seq, hidden=hidden)
        got = streaming.efficiency(ait, float(r["bw_GBps"]) * 1e9)
        at = f"hidden {r['hidden']}" if streamed == "act_ckpt" else f"batch {r['bsz_per_gpu']}"
        yield f"{r['component']}, {at}, {r['bw_GBps']} GB/s", got, r["efficiency_formula"], ""


@table(
    "Korthikanti et al.: utilization",
    "formula",
    "Korthikanti et al., Tables 3 to 5",
    "korthikanti_table3_configs",
    "korthikanti_table4_layer_times_22B",
    "korthikanti_table5_end_to_end",
)
def korthikanti(sizes: Rows, layers_of_22b: Rows, end_to_end: Rows) -> Lines:
    """Model and hardware FLOPs over the published seconds; what recompute costs in FLOPs against
    what it cost in time.
    """
    shape = {"22B": "22B", "175B": "175B (GPT-3)", "530B": "530B (MT-NLG)", "1T": "1T"}
    configs = {r["model"]: r for r in sizes}
    for r in end_to_end:
        config = configs.get(shape.get(r["model"], ""))
        if config is None:
            continue
        layers, hidden, batch, gpus = ints(config, "layers", "hidden", "global_batch", "gpus")
        model = formulas.megatron_flops(batch, 2048, layers, hidden, recompute=False)
        mfu = 100 * formulas.utilization(model, float(r["present_work_iter_s"]), gpus, A100)
        yield f"{r['model']}, MFU of the printed time", mfu, r["MFU_pct"], "%"
        hfu = mfu * formulas.selective_recompute_ratio(2048, hidden)
        yield f"{r['model']}, HFU", hfu, r["HFU_pct"], "%"
    layer = {r["experiment"]: float(r["combined_ms"]) for r in layers_of_22b}
    none = layer["baseline no recompute"]
    slower, some = layer["baseline with recompute"] / none, layer["selective recompute"] / none
    yield "22B layer, full recompute against none", formulas.FULL_RECOMPUTE, slower, "x"
    ratio = formulas.selective_recompute_ratio(2048, 6144)
    yield "22B layer, selective recompute against none", ratio, some, "x"


@table("MegaScale Table 2: MFU", "formula", "MegaScale, Table 2", "megascale_scaling")
def megascale(rows: Rows) -> Lines:
    """MFU of the printed seconds (TP 8, PP 8 runs, which the plan does not model): a check of the
    FLOPs convention.
    """
    for r in rows:
        if r["iter_s"]:
            batch, gpus = ints(r, "global_batch", "gpus(A100)")
            flops = formulas.megatron_flops(batch, 2048, 96, 12_288, 64_000, recompute=False)
            mfu = 100 * formulas.utilization(flops, float(r["iter_s"]), gpus, A100)
            yield f"{r['system']}, {gpus} GPUs", mfu, r["MFU_pct"], "%"


@table(
    "Throughput of single runs",
    "formula",
    "BigScience; MT-NLG; LLaMA; ml-engineering",
    "bloom_facts",
    "mtnlg_llama_facts",
    "idefics80b_zero3_case",
)
def facts(bigscience: Rows, both: Rows, idefics: Rows) -> Lines:
    """Single facts. Megatron's FLOPs are hardware FLOPs with full recompute."""
    bloom, nlg, llama, case = (
        tables.facts(rows, system)
        for rows, system in ((bigscience, ""), (both, "MT"), (both, "LLaMA"), (idefics, ""))
    )
    flops = formulas.megatron_flops(2048, 2048, 70, 14_336, 250_880)
    done = flops / (float(bloom["iteration time"]) * 384) / 1e12
    yield "BLOOM, TFLOP/s a GPU of the printed time", done, bloom["throughput"], "TFLOP/s"
    times, rates = (nlg[k].split(" / ") for k in ("iteration time GBS1920", "throughput"))
    flops = formulas.megatron_flops(1920, 2048, 105, 20_480)
    for gpus, seconds, rate in zip((2240, 2800, 3360), times, rates, strict=True):
        got = flops / (float(seconds) * gpus) / 1e12
        yield f"MT-NLG 530B on {gpus}, TFLOP/s a GPU of the printed time", got, rate, "TFLOP/s"
    seconds = float(llama["tokens"]) / (float(llama["throughput"]) * int(llama["GPUs"]))
    days = seconds / formulas.SECONDS_A_DAY
    yield "LLaMA-65B, days of the printed tokens/s", days, 21, "days"
    once = traffic.volume("zero-3") * 80e9 * 2 / 42.5e9
    said = case["comm formula 3*2*80/42.5"]
    yield "IDEFICS-80B, seconds of communication", once, said, "s"
    passes = formulas.infinity_flops(80e9, 3584, 1024) / (512 * 250e12)
    said = case["compute formula 4*2*80*1024*3584/(512e3*250)"]
    yield "IDEFICS-80B, seconds of compute", passes, said, "s"


@table("ZeRO++: volume between nodes", "formula", "DeepSpeed, ZeRO++ post", "zeropp_comm_volume")
def zeropp_volume(rows: Rows) -> Lines:
    """Between nodes."""
    none = {"quantized_weights": False, "secondary_copy": False, "quantized_gradients": False}
    for r, options in zip(rows, (none, {}), strict=True):
        got = traffic.zeropp_bytes(1.0, element_bytes=1, **options)["between"]
        yield r["method"], got, r["total_M(cross-node,fp16-equivalent)"], "Ψ"
