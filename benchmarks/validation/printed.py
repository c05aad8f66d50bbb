"""Tables of formulas: what a paper prints, evaluated as it is printed, beside what the code answers
for the same symbols.

Traffic of the stages is answered by the plan itself (`onefold.plan.wire.wire`, which the engine's
ledger equals to the byte), the rest by `benchmarks.validation.formulas`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.validation.formulas import activations, compute, states, streaming, traffic
from benchmarks.validation.tables import Line, Table, read
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.plan.states import MOMENTS_OF, units_of
from onefold.plan.wire import wire
from onefold.recipe import Recipe

Symbols = Mapping[str, float]
ADAM, INFINITY = states.CONVENTIONS["16"], states.CONVENTIONS["20"]


@dataclass(frozen=True)
class Printed:
    """A formula of a row: the row's first cell, the text of `column` that is evaluated, and the
    code's answer.
    """

    row: str
    column: str
    text: str
    code: Callable[[Any], float]
    note: str = ""


def evaluate(text: str, symbols: Symbols) -> float:
    """A printed expression: "^" is a power, and neighbours are multiplied where all symbols are
    single letters ("3mP", "2(P/G)").
    """
    plain = text.replace("^", "**")
    plain = re.sub(r"(?<=[0-9)])(?=[A-Za-z(])", "*", plain)
    if all(len(name) == 1 for name in symbols):
        plain = re.sub(r"(?<=[A-Za-z])(?=[A-Za-z(])", "*", plain)
    return float(eval(plain, {"__builtins__": {}}, dict(symbols)))


def lines_of(
    file: str, formulas: Sequence[Printed], symbols: Symbols, unit: str = ""
) -> list[Line]:
    """Each formula evaluated beside the code's answer. Raises ValueError for a text that the row
    does not print.
    """
    rows = read(file)
    first = next(iter(rows[0]))
    lines = []
    for formula in formulas:
        cell = next((r[formula.column] for r in rows if r[first] == formula.row), "")
        if formula.text not in cell:
            raise ValueError(
                f"{file}.csv, {formula.row!r}: {formula.column} prints {cell!r}, which has no"
                f" {formula.text!r}."
            )
        note = f", {formula.note}" if formula.note else ""
        lines.append(
            Line(
                f"{formula.row}: {formula.text}{note}",
                formula.code(symbols),
                evaluate(formula.text, symbols),
                unit,
            )
        )
    return lines


# -- traffic ---------------------------------------------------------------------------------------


@cache
def _blocks() -> ModelShape:
    """Eight blocks whose sizes divide by any number of ranks that is asked for, so that nothing is
    padded.
    """
    units = tuple(
        UnitShape(f"blocks.{i}", (Parameter(f"blocks.{i}.weight", (4096, 4096)),)) for i in range(8)
    )
    return ModelShape("blocks", (UnitShape("(root)", ()), *units))


def planned(stage: int, micro_batches: int, **options: Any) -> Callable[[Symbols], float]:
    """Payload that the plan says a rank sends, in units of Ψ(N−1)/N elements."""

    def volume(symbols: Symbols) -> float:
        ranks, shape = int(symbols["N"]), _blocks()
        recipe = Recipe.zero(stage, precision="bf16", **options)
        sent = sum(wire(units_of(shape, recipe, ranks), recipe, micro_batches).values())
        return symbols["P"] * sent / (2 * shape.numel * (ranks - 1) / ranks)

    return volume


def _formula(scheme: str, micro_batches: int = 1) -> Callable[[Symbols], float]:
    return lambda s: traffic.volume(scheme, micro_batches) * s["P"]


def traffic_in_print() -> Table:
    ones, many = (
        "volume_per_rank_per_optimizer_step(elements of P, x(N-1)/N)",
        "with_m_accumulation_microbatches",
    )
    symbols = {"P": 1.0, "N": 64.0, "m": 4.0, "G": 8.0, "W": 64.0, "Z": 8.0}
    halves = {"quantized_weights": False, "quantized_gradients": False, "element_bytes": 1}
    m = int(symbols["m"])
    recompute, kept = (
        "ZeRO-3 + activation recompute",
        "ZeRO-3, no reshard after forward (FSDP SHARD_GRAD_OP)",
    )
    hpz, hybrid = "hpZ (ZeRO++)", "HSDP/MiCS, shard group G of W"
    formulas = [
        Printed("DDP", ones, "2P", planned(0, 1)),
        Printed("DDP", many, "2P", planned(0, m)),
        Printed("DDP", many, "2mP", _formula("ddp every micro-batch", m)),
        Printed("ZeRO-1", ones, "2P", planned(1, 1)),
        Printed("ZeRO-1", many, "2P", planned(1, m)),
        Printed("ZeRO-1", many, "(m+1)P", _formula("zero-1 every micro-batch", m)),
        Printed("ZeRO-2", ones, "2P", planned(2, 1)),
        Printed("ZeRO-2", many, "(m+1)P", planned(2, m)),
        Printed("ZeRO-3", ones, "3P", planned(3, 1)),
        Printed("ZeRO-3", many, "3mP", planned(3, m)),
        Printed(recompute, ones, "4P", _formula("zero-3 recompute"), "recompute gathers again"),
        Printed(
            recompute,
            ones,
            "3P",
            planned(3, 1),
            "the backward's gather serves recompute too, as in Onefold",
        ),
        Printed(kept, ones, "2P", planned(3, 1, reshard_after_forward=False)),
        Printed(kept, many, "(m+1)P", _formula("zero-3 kept", m)),
        Printed(
            hpz,
            ones,
            "2P",
            lambda s: traffic.zeropp_bytes(s["P"], **halves)["between"],
            "between nodes",
        ),
        Printed(
            hpz, ones, "P", lambda s: traffic.zeropp_bytes(s["P"], **halves)["inside"], "inside"
        ),
        Printed(
            hpz,
            "assumption",
            "2P/Z",
            lambda s: traffic.secondary_copy_bytes(s["P"], int(s["Z"])),
            "bytes of memory",
        ),
        Printed(
            "ZeRO++",
            ones,
            "0.75P",
            lambda s: traffic.zeropp_bytes(s["P"], element_bytes=1)["between"],
        ),
        Printed(
            hybrid,
            ones,
            "2(P/G)(1-G/W)",
            lambda s: traffic.between_groups(s["P"], int(s["G"]), int(s["W"]), 1),
        ),
        Printed(
            "ZeRO-Offload",
            ones,
            "4P/N",
            lambda s: traffic.offload_bytes(s["P"], int(s["N"])),
            "bytes on the host link",
        ),
    ]
    formulas = [replace(f, note=f"{m} micro-batches") if f.column == many else f for f in formulas]
    lines = lines_of("comm_formulas_all", formulas, symbols, "Ψ")
    says = (
        "Elements that a rank sends in a step, before the factor (N−1)/N, at N = W = 64, m = 4, G ="
        " Z = 8. Stages 0 to 3 and kept parameters are the plan's own bytes for eight blocks, the"
        " last of which stage 3 keeps from forward to backward; what Onefold does not do (yet) is"
        " the formula's."
    )
    return Table(
        "Traffic formulas in print",
        "formula",
        "as named in the file",
        ("comm_formulas_all",),
        says,
        lines,
    )


# -- memory, FLOPs, time ---------------------------------------------------------------------------


def _zero() -> list[Line]:
    def model(stage: int) -> Callable[[Symbols], float]:
        return lambda s: states.model_states(s["P"], ADAM, stage, int(s["N"]))

    symbols = {"P": 7.5e9, "K": 12, "N": 64}
    formulas = [Printed(f"Z-{i or 'base'}", "expression", text, model(i)) for i, text in enumerate(
        ("(2+2+K)*P", "4*P + K*P/N", "2*P + (2+K)*P/N", "(4+K)*P/N"))]  # fmt: skip
    formulas += [
        Printed("Z-c-dp", "expression", "2*P", planned(0, 1)),
        Printed("Z-c-12", "expression", "2*P", planned(1, 1), "stage 1"),
        Printed("Z-c-12", "expression", "2*P", planned(2, 1), "stage 2"),
        Printed("Z-c-3", "expression", "3*P", planned(3, 1)),
    ]
    lines = lines_of("zero_formulas", formulas, symbols)
    wide = {"hidden": 8192, "batch": 8, "seq": 1024, "layers": 75, "Nd": 64, "Nm": 16}
    sizes = ("layers", "hidden", "batch", "seq")
    return lines + lines_of(
        "zero_formulas",
        [
            Printed(
                "Z-mp",
                "expression",
                "Nd*Nm",
                lambda s: states.reduction_factor(ADAM, 3, s["Nd"] * s["Nm"]),
            ),
            Printed(
                "Z-act",
                "expression",
                "12*hidden*batch*seq*layers",
                lambda s: activations.zero_elements(*(s[k] for k in sizes)),
            ),
            Printed(
                "Z-ckpt",
                "expression",
                "hidden*batch*seq*layers",
                lambda s: activations.checkpoint_elements(*(s[k] for k in sizes)),
            ),
            Printed(
                "Z-mpcomm",
                "expression",
                "12*seq*hidden",
                lambda s: traffic.tensor_parallel_block_elements(1, s["seq"], s["hidden"]),
            ),
        ],
        wide,
    )


def _fsdp() -> list[Line]:
    def hybrid(s: Symbols) -> float:
        return traffic.between_groups(s["M"], int(s["G"]), int(s["W"]), 1)

    def whole(stage: int) -> Callable[[Symbols], float]:
        return lambda s: planned(stage, 1)({"P": s["M"], "N": s["W"]}) * (s["W"] - 1) / s["W"]

    formulas = [
        Printed("F-c-rep", "expression", "2M(W-1)/W", whole(0)),
        Printed("F-c-full", "expression", "3M(W-1)/W", whole(3)),
        Printed("F-c-hyb", "expression", "2M(W-G)/(G*W)", hybrid, "exact"),
        Printed("F-c-hyb", "expression", "2M(W-1)/(G*W)", hybrid, "as printed"),
    ]
    return lines_of("fsdp_formulas", formulas, {"M": 1e9, "W": 512, "G": 8})


def _infinity() -> list[Line]:
    def intensity(streamed: str) -> Callable[[Symbols], float]:
        return lambda s: streaming.intensity(
            streamed, batch=s["bsz"], seq=s["seq"], hidden=s["hd"], interval=s["ci"]
        )

    symbols = {"nl": 128, "hd": 25_600, "bsz": 4, "seq": 1024, "ci": 2, "attn_heads": 256, "params": 1.0e12,
               "ait": 1024.0, "bw": 70e9, "peak_tp": streaming.V100_ACHIEVABLE}  # fmt: skip
    formulas = [
        Printed("I-params", "expression", "12*nl*hd^2", lambda s: streaming.parameters(s["nl"], s["hd"])),
        Printed("I-states", "expression", "240*nl*hd^2", lambda s: streaming.model_states(s["nl"], s["hd"], INFINITY.total)),
        Printed(
            "I-ckpt", "expression", "2*bsz*seq*hd*nl/ci",
            lambda s: 2 * activations.checkpoint_elements(s["nl"], s["hd"], s["bsz"], s["seq"], s["ci"]),
        ),
        Printed("I-mswm", "expression", "16*hd^2", lambda s: streaming.parameter_working_bytes(s["hd"])),
        Printed(
            "I-awm", "expression", "bsz*seq*ci*(16*hd + 2*attn_heads*seq)",
            lambda s: streaming.activation_working_bytes(s["bsz"], s["seq"], s["hd"], s["attn_heads"], s["ci"]),
        ),
        Printed("I-comp", "expression", "8*bsz*seq*params", lambda s: compute.infinity_flops(s["params"], s["bsz"], s["seq"])),
        Printed("I-ait-pg", "expression", "seq*bsz", intensity("params")),
        Printed("I-ait-os", "expression", "seq*bsz/4", intensity("optimizer")),
        Printed("I-ait-act", "expression", "24*hd*ci", intensity("act_ckpt")),
        Printed("I-eff", "expression", "ait*bw/(ait*bw+peak_tp)", lambda s: streaming.efficiency(s["ait"], s["bw"], s["peak_tp"])),
    ]  # fmt: skip
    return lines_of("infinity_formulas", formulas, symbols)


def _korthikanti() -> list[Line]:
    def layer(tensor: bool = False, **options: Any) -> Callable[[Any], float]:
        return lambda s: activations.korthikanti_layer(
            s["s"], s["b"], s["h"], s["a"], s["t"] if tensor else 1, **options
        )

    formulas = [
        Printed("no parallelism", "bytes_per_layer", "s*b*h*(34+5*a*s/h)", layer()),
        Printed("tensor parallel", "bytes_per_layer", "s*b*h*(10+24/t+5*a*s/(h*t))", layer(True)),
        Printed("tensor + sequence parallel", "bytes_per_layer", "s*b*h*(34/t+5*a*s/(h*t))", layer(True, sequence_parallel=True)),
        Printed("tensor parallel + selective recompute", "bytes_per_layer", "s*b*h*(10+24/t)", layer(True, recompute="selective")),
        Printed(
            "tensor + sequence parallel + selective", "bytes_per_layer", "s*b*h*34/t",
            layer(True, recompute="selective", sequence_parallel=True),
        ),
        Printed("full recompute", "bytes_per_layer", "2*s*b*h", layer(recompute="full")),
        Printed(
            "extra: embeddings/head", "bytes_per_layer", "4*s*b*h*(1+v/h)/t",
            lambda s: activations.embedding_and_head(s["s"], s["b"], s["h"], s["v"], tensor=s["t"]) - s["s"] * s["b"] * s["h"] / s["t"],
        ),
    ]  # fmt: skip
    return lines_of(
        "korthikanti_table2_activation_formulas",
        formulas,
        {"s": 2048, "b": 1, "h": 12_288, "a": 96, "t": 8, "v": 51_200},
    )


def _megatron() -> list[Line]:
    symbols = {"l": 96, "h": 12_288, "V": 51_200, "s": 2048, "B": 1536, "T": 300e9, "P": 174.6e9, "n": 1024, "X": 140e12,
               "p": 8, "m": 64, "v": 2, "b": 1, "t": 8}  # fmt: skip
    days = compute.SECONDS_A_DAY
    formulas = [
        Printed(
            "M-P", "expression", "12*l*h^2*(1+13/(12h)+(V+s)/(12*l*h))",
            lambda s: compute.megatron_parameters(s["l"], s["h"], s["V"], s["s"]),
        ),
        Printed(
            "M-F", "expression", "96*B*s*l*h^2*(1+s/(6h)+V/(16*l*h))",
            lambda s: compute.megatron_flops(s["B"], s["s"], s["l"], s["h"], s["V"]),
        ),
        Printed("M-T", "expression", "8*T*P/(n*X)", lambda s: days * compute.training_days(s["T"], s["P"], s["n"], s["X"])),
        Printed("M-bub", "expression", "(p-1)/m", lambda s: compute.pipeline_bubble(s["p"], s["m"])),
        Printed("M-bub", "expression", "(1/v)*(p-1)/m", lambda s: compute.pipeline_bubble(s["p"], s["m"], s["v"])),
        Printed("M-tp", "expression", "8*b*s*h*(t-1)/t", lambda s: traffic.tensor_parallel_elements(s["b"], s["s"], s["h"], s["t"])),
        Printed("M-pp", "expression", "b*s*h", lambda s: traffic.pipeline_elements(s["b"], s["s"], s["h"])),
        Printed("M-sg", "expression", "b*s*h/t", lambda s: traffic.pipeline_elements(s["b"], s["s"], s["h"], s["t"])),
    ]  # fmt: skip
    lines = lines_of("megatron_formulas", formulas, symbols)
    for row, numel, gpus, rate, tokens in (
        ("M-ex1", 175e9, 1024, 140e12, 300e9),
        ("M-ex2", 1.0e12, 3072, 163e12, 450e9),
    ):
        published = next(r for r in read("megatron_formulas") if r["id"] == row)
        got = compute.training_days(tokens, numel, gpus, rate)
        lines.append(
            Line(
                f"{row}: {published['quantity']}",
                got,
                float(published["expression"].split()[0]),
                "days",
            )
        )
    return lines


def _conventions() -> list[Line]:
    by = {r["convention"]: r for r in read("flops_mfu_conventions")}
    kaplan = compute.model_flops_per_token(175e9) * 300e9
    science = compute.training_days(300e9, 13e9, 256, 45e12)
    lines = [
        Line(
            "GPT-3, 6ND",
            kaplan,
            float(by["Kaplan/Chinchilla"]["example"].rsplit(" ", 1)[-1]),
            "FLOP",
        ),
        Line(
            "BLOOM 13B, 8·P·tokens/(n·X)",
            science,
            float(by["bigscience"]["example"].split()[-2]),
            "days",
        ),
    ]
    names = {"AdamW fp32 m,v": "adamw", "SGD momentum": "sgd-momentum", "LION": "lion"}
    for r in read("optimizer_and_peft_bytes"):
        if r["method"] in names:
            name, published = names[r["method"]], float(r["state_bytes_per_param"])
            lines.append(
                Line(
                    f"{r['method']}, bytes of state a parameter",
                    states.OPTIMIZER_STATE_BYTES[name],
                    published,
                    "B",
                )
            )
            if name in MOMENTS_OF:
                lines.append(
                    Line(
                        f"{r['method']}, as the plan counts it",
                        4 * MOMENTS_OF[name],
                        published,
                        "B",
                    )
                )
    return lines


def formulas_in_print() -> Table:
    made = (_zero, _fsdp, _infinity, _korthikanti, _megatron, _conventions)
    files = ("zero_formulas", "fsdp_formulas", "infinity_formulas", "korthikanti_table2_activation_formulas", "megatron_formulas",
             "flops_mfu_conventions", "optimizer_and_peft_bytes")  # fmt: skip
    says = (
        "Each formula as its source prints it, at one set of sizes, beside the code's. FSDP's"
        " hybrid traffic is printed as an approximation that counts the own group too; its exact"
        " form is beside it."
    )
    return Table(
        "Formulas in print",
        "formula",
        "as named in the files",
        files,
        says,
        [line for make in made for line in make()],
    )


MAKERS = (traffic_in_print, formulas_in_print)
