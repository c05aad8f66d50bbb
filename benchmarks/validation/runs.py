"""Tables about seconds: the time model beside published runs, one fitted constant a system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.validation.formulas import compute, traffic
from benchmarks.validation.systems import SYSTEMS, System, blocks_of
from benchmarks.validation.tables import Line, Table, read
from onefold.plan.hardware import machine
from onefold.plan.shapes import ARCHITECTURES, architecture
from onefold.plan.times import Work, step_times

#: Layers and width of the sizes that the reports name only by size.
DIMS = {175: (96, 12_288), 530: (105, 20_480), 1000: (128, 25_600), 2000: (160, 32_768)}
TERA, BILLION = 1e12, 1e9


@dataclass(frozen=True)
class Run:
    """A published run: its figure, what the model says of it for a system, and whether the system's
    constant was fitted to it.
    """

    what: str
    published: float
    unit: str
    predict: Callable[[System], float]
    fitted: bool = False


def _rate(
    numel: float, blocks: int, flops: float, gpus: int, link: str = "", scheme: str = "zero-3"
) -> Callable[[System], float]:
    """TFLOP/s a GPU."""
    return lambda system: (
        flops / system.run(numel, blocks, flops, system.machine(gpus, link), scheme).step / TERA
    )  # type: ignore[arg-type]


def azure() -> list[Run]:
    runs = []
    for r in read("azure_zero3_a100_throughput"):
        size, seq, batch, gpus = (
            int(r[k]) for k in ("params_B", "seq", "micro_batch", "gpus(A100-80GB,200Gb/s/GPU)")
        )
        layers, hidden = DIMS[size]
        case = batch in (1, 16) and gpus in (128, 1024)
        flops = compute.megatron_flops(batch, seq, layers, hidden)
        predict = _rate(size * BILLION, layers, flops, gpus)
        what = f"{size}B, {seq} tokens × {batch}, {gpus} GPUs"
        runs.append(
            Run(
                what,
                float(r["TFLOPS_per_gpu"]),
                "TFLOP/s",
                predict,
                fitted=(size, seq) == (175, 1024) and not case,
            )
        )
    return runs


def megatron() -> list[Run]:
    runs = []
    for r in read("megatron_table2_zero3_vs_ptd"):
        if r["scheme"] == "ZeRO-3":
            batch, gpus, numel = (
                int(r["micro_batch"]),
                int(r["gpus"]),
                float(r["params_B"]) * BILLION,
            )
            predict = _rate(numel, 96, compute.megatron_flops(batch, 2048, 96, 12_288), gpus)
            runs.append(
                Run(
                    f"174.6B, micro-batch {batch}, {gpus} GPUs",
                    float(r["TFLOPS_per_gpu"]),
                    "TFLOP/s",
                    predict,
                    gpus == 768,
                )
            )
    return runs


def zeropp() -> list[Run]:
    runs = []
    for r in read("zeropp_throughput_384v100"):
        size, tokens, link = (
            int(r["params_B"]),
            int(r["tokens_per_gpu"]),
            r["internode_bw_Gbps(per node)"],
        )
        numel = size * BILLION
        case = (size, tokens, link) == (138, 1024, "100")
        flops = compute.infinity_flops(numel, 1, tokens)
        for scheme, key in (
            ("zero-3", "ZeRO3_TFLOPS_per_gpu"),
            ("zero++", "ZeRO++_TFLOPS_per_gpu"),
        ):
            predict = _rate(numel, blocks_of(numel), flops, int(r["gpus"]), f"{link}g", scheme)
            runs.append(
                Run(
                    f"{scheme}, {size}B, {tokens} tokens, {link} Gbit/s",
                    float(r[key]),
                    "TFLOP/s",
                    predict,
                    not case,
                )
            )
    return runs


def by_bandwidth(tokens: int, link: int, numel: float = 176e9) -> float:
    """TFLOP/s a GPU of ZeRO-3 on 384 V100 in nodes joined by `link` Gbit/s, with the constants of
    ZeRO++'s table.
    """
    return _rate(
        numel, blocks_of(numel), compute.infinity_flops(numel, 1, tokens), 384, f"{link}g"
    )(SYSTEMS["zero++"])


def zero2() -> list[Run]:
    configs = {(r["params_B"], r["system"]): r for r in read("zero_table10_no_mp_configs")}
    runs = []
    for r in read("zero_fig2_3_4_throughput"):
        if r["series"] == "Fig4 ZeRO no-MP":
            config = configs[(r["params_B"], "ZeRO")]
            layers, hidden, batch = (int(config[k]) for k in ("layers", "hidden", "batch_per_gpu"))
            flops = compute.megatron_flops(batch, 1024, layers, hidden, 50_257)
            predict = _rate(float(r["params_B"]) * BILLION, layers, flops, 128, scheme="zero-2")
            runs.append(
                Run(
                    f"{r['params_B']}B, batch {batch}",
                    float(r["TFLOPS_per_gpu"]),
                    "TFLOP/s",
                    predict,
                    r["params_B"] == "6",
                )
            )
    return runs


def _offload(numel: float, flops: float, micro_batches: int = 1) -> Callable[[System], float]:
    """Seconds of a step on one GPU: gradients go down every micro-batch, the host updates once."""

    def seconds(system: System) -> float:
        there = machine(1, system.per_node, system.gpu)
        moved = traffic.offload_bytes(numel, 1, micro_batches, every_micro_batch=True)
        work = Work(
            flops,
            precision=system.precision,
            host_bytes=moved,
            host_optimizer_bytes=28 * numel,
            micro_batches=micro_batches,
        )
        return step_times(work, there, system.software).step

    return seconds


def offload() -> list[Run]:
    configs = {r["params_B"]: r for r in read("offload_table3_configs") if r["gpus"] == "1"}
    runs = []
    for r in read("offload_fig8_fig11_throughput"):
        if r["series"] == "Fig8 1xV100":
            config = configs[r["params_B"]]
            layers, hidden, batch = (int(config[k]) for k in ("layers", "hidden", "batch_per_gpu"))
            flops = compute.megatron_flops(512, 1024, layers, hidden, 50_257)
            seconds = _offload(float(r["params_B"]) * BILLION, flops, 512 // batch)

            def predict(
                system: System, flops: float = flops, seconds: Callable[[System], float] = seconds
            ) -> float:
                return flops / seconds(system) / TERA

            runs.append(
                Run(
                    f"{r['params_B']}B, batch 512 by {batch}",
                    float(r["TFLOPS_per_gpu"]),
                    "TFLOP/s",
                    predict,
                    r["params_B"] == "10",
                )
            )
    for r in read("offload_tutorial_logs"):
        if r["case"] == "ZeRO-Offload":
            flops = compute.megatron_flops(int(r["batch_per_gpu"]), 1024, 50, 4096, 50_257)
            seconds = _offload(float(r["params_B"]) * BILLION, flops)
            runs.append(
                Run("tutorial: 10B, batch 10, seconds of a step", float(r["iter_s"]), "s", seconds)
            )
    return runs


def infinity() -> list[Run]:
    configs = {r["params"]: r for r in read("infinity_table1_configs") if r["nodes"] == "1"}
    names = {"10": "10B", "50": "50B", "100": "100B", "500": "0.5T", "1000": "1T"}
    runs = []
    for r in read("infinity_fig5_throughput"):
        if r["series"] == "5c ZeRO-Infinity":
            config = configs[names[r["params_B"]]]
            numel, batch = float(r["params_B"]) * BILLION, float(config["batch_per_gpu"])
            flops = compute.infinity_flops(numel, 1, 1024) * batch
            streamed = (
                traffic.host_streaming_bytes(numel, 16)
                if config["fp16_param_device"] != "GPU"
                else 0.0
            )
            # Read and written once
            stepped = 2 * 16 * numel / 16 if config["optimizer_device"] == "NVMe" else 0.0

            def predict(
                system: System,
                numel: float = numel,
                flops: float = flops,
                streamed: float = streamed,
                stepped: float = stepped,
                on_nvme: bool = config["fp16_param_device"] == "NVMe",
            ) -> float:
                there = machine(16, system.per_node, system.gpu)
                moves = system.run(numel, blocks_of(numel), flops, there)
                work = Work(
                    flops,
                    precision=system.precision,
                    host_bytes=streamed + stepped,
                    nvme_bytes=stepped + (streamed if on_nvme else 0.0),
                    host_optimizer_bytes=28 * numel / 16 if stepped else 0.0,
                )
                beside = moves.seconds["exposed communication"] + (
                    0.0 if stepped else moves.seconds["optimizer"]
                )
                return flops / (step_times(work, there, system.software).step + beside) / TERA

            runs.append(
                Run(
                    f"{names[r['params_B']]}, batch {batch:g}",
                    float(r["TFLOPS_per_gpu"]),
                    "TFLOP/s",
                    predict,
                    r["params_B"] == "10",
                )
            )
    return runs


def fsdp() -> list[Run]:
    runs = []
    for r in read("fsdp_fig7_throughput"):
        batch, gpus = int(r["batch_per_gpu"]), int(r["gpus(A100-80GB)"])
        gpt = r["model"] == "GPT-175B"
        numel, blocks = (175e9, 96) if gpt else (11.3e9, 48)
        flops = (
            compute.megatron_flops(batch, 2048, 96, 12_288, 50_000)
            if gpt
            else compute.infinity_flops(numel, batch, 512)
        )
        predict = _rate(numel, blocks, flops, gpus)
        what = f"{r['model']}, batch {batch}, {gpus} GPUs"
        runs.append(
            Run(
                what,
                float(r["TFLOPS_per_gpu"]),
                "TFLOP/s",
                predict,
                (r["model"], batch, gpus) == ("GPT-175B", 1, 128),
            )
        )
    return runs


def torchtitan() -> list[Run]:
    model, dims = architecture("llama-3-8b"), ARCHITECTURES["llama-3-8b"].dims
    tokens = 2 * 8192
    flops = tokens * compute.transformer_flops_per_token(model.active_numel, dims)

    def predict_on(gpus: int) -> Callable[[System], float]:
        return lambda system: (
            tokens / system.run(model.numel, dims.layers, flops, system.machine(gpus)).step
        )

    runs = []
    for r in read("torchtitan_llama31_h100"):
        if r["parallelism"] == "FSDP+compile":
            gpus = int(r["gpus(H100-96GB)"])
            runs.append(
                Run(
                    f"8B, {gpus} GPUs",
                    float(r["tokens_per_s_per_gpu"]),
                    "tokens/s",
                    predict_on(gpus),
                    gpus == 8,
                )
            )
    for r in read("torchtitan_paper_tables"):
        if r["technique"] == "+compile":
            gpus = int(r["gpus"])
            runs.append(
                Run(
                    f"8B, {gpus} GPUs (paper)",
                    float(r["tokens_per_s_per_gpu"]),
                    "tokens/s",
                    predict_on(gpus),
                )
            )
    return runs


#: system -> its runs
RUNS: dict[str, Callable[[], list[Run]]] = {
    "azure": azure,
    "megatron-zero3": megatron,
    "zero++": zeropp,
    "zero-2": zero2,
    "zero-offload": offload,
    "zero-infinity": infinity,
    "fsdp": fsdp,
    "torchtitan": torchtitan,
}

_ABOUT = {
    "azure": (
        "azure_zero3_a100_throughput",
        "DeepSpeed on Azure, 2022 (digitized)",
        "Micro-batch 1 on 128 and 1,024 GPUs is case E47, 16 is E46.",
    ),
    "megatron-zero3": (
        "megatron_table2_zero3_vs_ptd",
        "Megatron-LM, Table 2",
        "A sixth of the nominal link, the figure that the ratio E45 rests on.",
    ),
    "zero++": (
        "zeropp_throughput_384v100",
        "DeepSpeed, ZeRO++ post",
        (
            "138B at 100 Gbit/s and 1,024 tokens is E50. Small models come out too slow: their"
            " messages cost the model more than they did."
        ),
    ),
    "zero-2": (
        "zero_fig2_3_4_throughput",
        "ZeRO, Fig. 4 and Table 10",
        (
            "The published runs slow down towards the limit of memory (micro-batch 4 and 2), which"
            " nothing in the model says."
        ),
    ),
    "zero-offload": (
        "offload_fig8_fig11_throughput offload_tutorial_logs",
        "ZeRO-Offload, Fig. 8; DeepSpeed's tutorial",
        "One V100; batch 512 by accumulation.",
    ),
    "zero-infinity": (
        "infinity_fig5_throughput",
        "ZeRO-Infinity, Fig. 5c and Table 1",
        "16 V100; parameters and optimizer states on the host or NVMe.",
    ),
    "fsdp": (
        "fsdp_fig7_throughput",
        "PyTorch FSDP, Fig. 7 (digitized)",
        (
            "GPT-175B with batch 2 on 128 GPUs retried allocations for want of memory, which the"
            " time model cannot know. T5 is no GPT."
        ),
    ),
    "torchtitan": (
        "torchtitan_llama31_h100 torchtitan_paper_tables",
        "torchtitan, benchmarks and paper",
        "Llama 3.1 8B with FSDP and torch.compile.",
    ),
}


def tables() -> list[Table]:
    made = []
    for name, runs in RUNS.items():
        system, (files, source, says) = SYSTEMS[name], _ABOUT[name]
        value = getattr(system.software, system.fitted)
        about = f"{says} Fitted: {system.fitted} = {value:g}, on {system.fitted_on}."
        lines = [
            Line(run.what, run.predict(system), run.published, run.unit, run.fitted)
            for run in runs()
        ]
        made.append(Table(system.name, "time", source, tuple(files.split()), about, lines))
    return [*made, adam_latency()]


def adam_latency() -> Table:
    there = machine(1, 16, "v100-32")
    lines = []
    for r in read("offload_table4_adam_latency"):
        numel = float(r["params_B"]) * BILLION
        host = step_times(Work(0.0, host_optimizer_bytes=28 * numel), there).step
        device = step_times(Work(0.0, optimizer_bytes=28 * numel), there).step
        lines.append(
            Line(
                f"{r['params_B']}B on the host",
                host,
                float(r["cpu_adam_s"]),
                "s",
                fitted=r["params_B"] == "10",
            )
        )
        lines.append(Line(f"{r['params_B']}B on the GPU", device, float(r["pt_gpu_s"]), "s"))
    says = (
        "28 bytes an element over memory bandwidth; the host's 110 GB/s follow from 10B. PyTorch's"
        " Adam of 2020 was not fused."
    )
    return Table(
        "ZeRO-Offload Table 4: Adam",
        "time",
        "ZeRO-Offload, Table 4",
        ("offload_table4_adam_latency",),
        says,
        lines,
    )
