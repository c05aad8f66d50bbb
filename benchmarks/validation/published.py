"""Published figures beside what the plan's formulas and its model of time say: bytes of states, the
largest model, peaks; seconds and rates of published systems, with one fitted constant a system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.validation.closed_form import Work, step_times
from benchmarks.validation.formulas import activations, compute, states, traffic
from benchmarks.validation.systems import SYSTEMS, System, blocks_of
from benchmarks.validation.tables import BILLION, GB, GIB, TERA, Row, Rows, ints, read, table
from onefold.plan.hardware import machine
from onefold.plan.modules import model_shape, module_of
from onefold.plan.shapes import Transformer

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


@table("FSDP Fig. 8: memory", "memory", "PyTorch FSDP, Fig. 8 (digitized)", "fsdp_fig8_memory")
def fsdp_memory(rows: Rows) -> Lines:
    """Bytes allocated at peak: fp32 states over all ranks, two units gathered and one unit's
    gradients in 16 bits, a checkpoint a block, one block being recomputed, logits.
    """
    dims = Transformer(96, 12_288, 96, 4 * 12_288, 50_000)
    numel, unit = 175e9, 175e9 / 96
    for r in rows:
        gpus, batch = ints(r, "gpus", "batch_per_gpu")
        kept = activations.total_bytes(dims, batch, 2048)
        kept += activations.logits_bytes(dims, batch, 2048)
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
    numel, convention = (
        model_shape(module_of("llama-3-8b"), name="llama-3-8b").numel,
        CONVENTIONS["fp32"],
    )
    freed = states.freed_by_more_ranks(numel, convention, 3, 8, 128) / GIB
    for name, at in by_name.items():
        if {8, 128} <= set(at):
            yield f"{name}, 8 to 128 GPUs", freed, at[8] - at[128], "GiB"
    few, many = (float(r["peak_memory_GiB"]) for r in fp8)
    freed = states.freed_by_more_ranks(numel, convention, 3, 32, 64) / GIB
    yield "H200, 32 to 64 GPUs", freed, few - many, "GiB"


# -- seconds ---------------------------------------------------------------------------------------

#: Layers and width of the sizes that the reports name only by size.
DIMS = {175: (96, 12_288), 530: (105, 20_480), 1000: (128, 25_600), 2000: (160, 32_768)}
Predict = Callable[[System], float]
RATE = "TFLOP/s"


def published(system: str, source: str, *files: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a table of a function that yields for the rows of `files`: what, the published figure, its
    unit, what predicts it of a system, and whether the system's constant was fitted to it.
    """
    known = SYSTEMS[system]
    value = getattr(known.software, known.fitted)

    def made(fields: Callable[..., Iterator[tuple[Any, ...]]]) -> Any:
        def lines(*rows: Rows) -> Iterator[tuple[Any, ...]]:
            for what, figure, unit, predict, *fitted in fields(*rows):
                yield what, predict(known), figure, unit, *fitted

        fit = f"Fitted: {known.fitted} = {value:g}, on {known.fitted_on}."
        lines.__doc__ = f"{fields.__doc__} {fit}"
        return table(known.name, "time", source, *files)(lines)

    return made


def _rate(
    numel: float, blocks: int, flops: float, gpus: int, link: str = "", scheme: str = "zero-3"
) -> Predict:
    """TFLOP/s a GPU."""
    return lambda system: (
        flops / system.run(numel, blocks, flops, system.machine(gpus, link), scheme).step / TERA
    )  # type: ignore[arg-type]


@published("azure", "DeepSpeed on Azure, 2022 (digitized)", "azure_zero3_a100_throughput")
def azure(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """Micro-batch 1 on 128 and 1,024 GPUs is case E47, 16 is E46."""
    for r in rows:
        names = ("params_B", "seq", "micro_batch", "gpus(A100-80GB,200Gb/s/GPU)")
        size, seq, batch, gpus = ints(r, *names)
        layers, hidden = DIMS[size]
        case = batch in (1, 16) and gpus in (128, 1024)
        flops = compute.megatron_flops(batch, seq, layers, hidden)
        predict = _rate(size * BILLION, layers, flops, gpus)
        what, fitted = f"{size}B, {seq} tokens × {batch}, {gpus} GPUs", (size, seq) == (175, 1024)
        yield what, r["TFLOPS_per_gpu"], RATE, predict, fitted and not case


@published("megatron-zero3", "Megatron-LM, Table 2", "megatron_table2_zero3_vs_ptd")
def megatron(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """A sixth of the nominal link, the figure that the ratio E45 rests on."""
    for r in (r for r in rows if r["scheme"] == "ZeRO-3"):
        batch, gpus = ints(r, "micro_batch", "gpus")
        flops = compute.megatron_flops(batch, 2048, 96, 12_288)
        predict = _rate(float(r["params_B"]) * BILLION, 96, flops, gpus)
        what = f"174.6B, micro-batch {batch}, {gpus} GPUs"
        yield what, r["TFLOPS_per_gpu"], RATE, predict, gpus == 768


@published("zero++", "DeepSpeed, ZeRO++ post", "zeropp_throughput_384v100")
def zeropp(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """138B at 100 Gbit/s and 1,024 tokens is E50. Small models come out too slow: their messages
    cost the model more than they did.
    """
    for r in rows:
        size, tokens, gpus = ints(r, "params_B", "tokens_per_gpu", "gpus")
        link, numel = r["internode_bw_Gbps(per node)"], size * BILLION
        case = (size, tokens, link) == (138, 1024, "100")
        flops = compute.infinity_flops(numel, 1, tokens)
        for scheme, key in (("zero-3", "ZeRO3"), ("zero++", "ZeRO++")):
            predict = _rate(numel, blocks_of(numel), flops, gpus, f"{link}g", scheme)
            what = f"{scheme}, {size}B, {tokens} tokens, {link} Gbit/s"
            yield what, r[f"{key}_TFLOPS_per_gpu"], RATE, predict, not case


@published("zero-2", "ZeRO, Fig. 4 and Table 10", "zero_fig2_3_4_throughput")
def zero2(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """The published runs slow down towards the limit of memory (micro-batch 4 and 2), which nothing
    in the model says.
    """
    configs = {(r["params_B"], r["system"]): r for r in read("zero_table10_no_mp_configs")}
    for r in (r for r in rows if r["series"] == "Fig4 ZeRO no-MP"):
        config = configs[(r["params_B"], "ZeRO")]
        layers, hidden, batch = ints(config, "layers", "hidden", "batch_per_gpu")
        flops = compute.megatron_flops(batch, 1024, layers, hidden, 50_257)
        predict = _rate(float(r["params_B"]) * BILLION, layers, flops, 128, scheme="zero-2")
        what = f"{r['params_B']}B, batch {batch}"
        yield what, r["TFLOPS_per_gpu"], RATE, predict, r["params_B"] == "6"


def _offload(numel: float, flops: float, micro_batches: int = 1) -> Predict:
    """Seconds of a step on one GPU: gradients go down every micro-batch, the host updates once."""

    def seconds(system: System) -> float:
        there = machine(1, system.per_node, system.gpu)
        work = Work(
            flops,
            precision=system.precision,
            host_bytes=traffic.offload_bytes(numel, 1, micro_batches, every_micro_batch=True),
            host_optimizer_bytes=28 * numel,
        )
        return step_times(work, there, system.software).step

    return seconds


@published(
    "zero-offload",
    "ZeRO-Offload, Fig. 8; DeepSpeed's tutorial",
    "offload_fig8_fig11_throughput",
    "offload_tutorial_logs",
)
def offload(rows: Rows, logs: Rows) -> Iterator[tuple[Any, ...]]:
    """One V100; batch 512 by accumulation."""
    configs = {r["params_B"]: r for r in read("offload_table3_configs") if r["gpus"] == "1"}
    for r in (r for r in rows if r["series"] == "Fig8 1xV100"):
        layers, hidden, batch = ints(configs[r["params_B"]], "layers", "hidden", "batch_per_gpu")
        flops = compute.megatron_flops(512, 1024, layers, hidden, 50_257)
        seconds = _offload(float(r["params_B"]) * BILLION, flops, 512 // batch)

        def predict(system: System, flops: float = flops, seconds: Predict = seconds) -> float:
            return flops / seconds(system) / TERA

        what = f"{r['params_B']}B, batch 512 by {batch}"
        yield what, r["TFLOPS_per_gpu"], RATE, predict, r["params_B"] == "10"
    for r in (r for r in logs if r["case"] == "ZeRO-Offload"):
        flops = compute.megatron_flops(int(r["batch_per_gpu"]), 1024, 50, 4096, 50_257)
        seconds = _offload(float(r["params_B"]) * BILLION, flops)
        yield "tutorial: 10B, batch 10, seconds of a step", r["iter_s"], "s", seconds


def _infinity(numel: float, config: Row) -> Predict:
    """TFLOP/s a GPU with parameters and optimizer states where the row has them."""
    flops = compute.infinity_flops(numel, 1, 1024) * float(config["batch_per_gpu"])
    where, on_nvme = config["fp16_param_device"], config["fp16_param_device"] == "NVMe"
    streamed = traffic.host_streaming_bytes(numel, 16) if where != "GPU" else 0.0
    # Read and written once
    stepped = 2 * 16 * numel / 16 if config["optimizer_device"] == "NVMe" else 0.0

    def predict(system: System) -> float:
        there = machine(16, system.per_node, system.gpu)
        moves = system.run(numel, blocks_of(numel), flops, there).seconds
        work = Work(
            flops,
            precision=system.precision,
            host_bytes=streamed + stepped,
            nvme_bytes=stepped + (streamed if on_nvme else 0.0),
            host_optimizer_bytes=28 * numel / 16 if stepped else 0.0,
        )
        beside = moves["exposed communication"] + (0.0 if stepped else moves["optimizer"])
        return flops / (step_times(work, there, system.software).step + beside) / TERA

    return predict


@published("zero-infinity", "ZeRO-Infinity, Fig. 5c and Table 1", "infinity_fig5_throughput")
def infinity(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """16 V100; parameters and optimizer states on the host or NVMe."""
    configs = {r["params"]: r for r in read("infinity_table1_configs") if r["nodes"] == "1"}
    names = {"10": "10B", "50": "50B", "100": "100B", "500": "0.5T", "1000": "1T"}
    for r in (r for r in rows if r["series"] == "5c ZeRO-Infinity"):
        name = names[r["params_B"]]
        predict = _infinity(float(r["params_B"]) * BILLION, configs[name])
        what = f"{name}, batch {float(configs[name]['batch_per_gpu']):g}"
        yield what, r["TFLOPS_per_gpu"], RATE, predict, r["params_B"] == "10"


@published("fsdp", "PyTorch FSDP, Fig. 7 (digitized)", "fsdp_fig7_throughput")
def fsdp(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """GPT-175B with batch 2 on 128 GPUs retried allocations for want of memory, which the time
    model cannot know. T5 is no GPT.
    """
    for r in rows:
        batch, gpus = ints(r, "batch_per_gpu", "gpus(A100-80GB)")
        if r["model"] == "GPT-175B":
            numel, blocks = 175e9, 96
            flops = compute.megatron_flops(batch, 2048, 96, 12_288, 50_000)
        else:
            numel, blocks = 11.3e9, 48
            flops = compute.infinity_flops(numel, batch, 512)
        fitted = (r["model"], batch, gpus) == ("GPT-175B", 1, 128)
        what, predict = (
            f"{r['model']}, batch {batch}, {gpus} GPUs",
            _rate(numel, blocks, flops, gpus),
        )
        yield what, r["TFLOPS_per_gpu"], RATE, predict, fitted


@published(
    "torchtitan",
    "torchtitan, benchmarks and paper",
    "torchtitan_llama31_h100",
    "torchtitan_paper_tables",
)
def torchtitan(rows: Rows, paper: Rows) -> Iterator[tuple[Any, ...]]:
    """Llama 3.1 8B with FSDP and torch.compile."""
    model = model_shape(module_of("llama-3-8b"), name="llama-3-8b")
    dims = model.transformer
    assert dims is not None
    tokens, key = 2 * 8192, "tokens_per_s_per_gpu"
    flops = tokens * model.flops_per_token(8192)

    def on(gpus: int) -> Predict:
        return lambda system: (
            tokens / system.run(model.numel, dims.layers, flops, system.machine(gpus)).step
        )

    for r in (r for r in rows if r["parallelism"] == "FSDP+compile"):
        (gpus,) = ints(r, "gpus(H100-96GB)")
        yield f"8B, {gpus} GPUs", r[key], "tokens/s", on(gpus), gpus == 8
    for r in (r for r in paper if r["technique"] == "+compile"):
        (gpus,) = ints(r, "gpus")
        yield f"8B, {gpus} GPUs (paper)", r[key], "tokens/s", on(gpus)


@table("ZeRO-Offload Table 4: Adam", "time", "ZeRO-Offload, Table 4", "offload_table4_adam_latency")
def adam_latency(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """28 bytes an element over memory bandwidth; the host's 110 GB/s follow from 10B. PyTorch's
    Adam of 2020 was not fused.
    """
    there = machine(1, 16, "v100-32")
    for r in rows:
        nbytes, size = 28 * float(r["params_B"]) * BILLION, r["params_B"]
        host = step_times(Work(0.0, host_optimizer_bytes=nbytes), there).step
        device = step_times(Work(0.0, optimizer_bytes=nbytes), there).step
        yield f"{size}B on the host", host, r["cpu_adam_s"], "s", size == "10"
        yield f"{size}B on the GPU", device, r["pt_gpu_s"], "s"
