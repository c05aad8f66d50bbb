"""Tables about seconds: the time model beside published runs, one fitted constant a system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.validation.formulas import compute, traffic
from benchmarks.validation.systems import SYSTEMS, System, blocks_of
from benchmarks.validation.tables import BILLION, TERA, Line, Row, Rows, Table, ints, read, table
from onefold.plan.hardware import machine
from onefold.plan.shapes import ARCHITECTURES, architecture
from onefold.plan.times import Work, step_times

#: Layers and width of the sizes that the reports name only by size.
DIMS = {175: (96, 12_288), 530: (105, 20_480), 1000: (128, 25_600), 2000: (160, 32_768)}
Predict = Callable[[System], float]
RATE = "TFLOP/s"


@dataclass(frozen=True)
class Run:
    """A published figure, what the model says, and whether a constant was fitted to it."""

    what: str
    published: float
    unit: str
    predict: Predict
    fitted: bool = False


#: system -> its runs; and (source, files, what the page says of them)
RUNS: dict[str, Callable[[], list[Run]]] = {}
ABOUT: dict[str, tuple[str, tuple[str, ...], str]] = {}


def published(system: str, source: str, *files: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a system's runs of a function that yields their fields for the rows of `files`."""

    def made(fields: Callable[..., Iterator[tuple[Any, ...]]]) -> Callable[[], list[Run]]:
        def make() -> list[Run]:
            rows = map(read, files)
            return [Run(what, float(value), *more) for what, value, *more in fields(*rows)]

        ABOUT[system] = source, files, " ".join((fields.__doc__ or "").split())
        RUNS[system] = make
        return make

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


def by_bandwidth(tokens: int, link: int, numel: float = 176e9) -> float:
    """TFLOP/s a GPU of ZeRO-3 on 384 V100 at `link` Gbit/s, with ZeRO++'s constants."""
    flops = compute.infinity_flops(numel, 1, tokens)
    return _rate(numel, blocks_of(numel), flops, 384, f"{link}g")(SYSTEMS["zero++"])


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
            micro_batches=micro_batches,
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
    model, dims = architecture("llama-3-8b"), ARCHITECTURES["llama-3-8b"].dims
    tokens, key = 2 * 8192, "tokens_per_s_per_gpu"
    flops = tokens * compute.transformer_flops_per_token(model.active_numel, dims)

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


def tables() -> list[Table]:
    made = []
    for name, runs in RUNS.items():
        system, (source, files, says) = SYSTEMS[name], ABOUT[name]
        value = getattr(system.software, system.fitted)
        about = f"{says} Fitted: {system.fitted} = {value:g}, on {system.fitted_on}."
        lines = [
            Line(run.what, run.predict(system), run.published, run.unit, run.fitted)
            for run in runs()
        ]
        made.append(Table(system.name, "time", source, files, about, lines))
    return [*made, adam_latency()]


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
