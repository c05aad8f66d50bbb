"""Tables of formulas: what a paper prints, evaluated as it is printed, beside what the code answers
for the same symbols.

Traffic of the stages is answered by the plan itself (`onefold.plan.wire.wire`, which the engine's
ledger equals to the byte), the rest by `benchmarks.validation.formulas`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from benchmarks.validation.formulas import activations, compute, states, streaming, traffic
from benchmarks.validation.memory import Lines
from benchmarks.validation.tables import Rows, read, table
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.plan.states import MOMENTS_OF, units_of
from onefold.plan.wire import wire
from onefold.recipe import Recipe

Answer = Callable[[Any], float]
"""What the code says of symbols, which are attributes of its argument."""
ADAM, INFINITY = states.CONVENTIONS["16"], states.CONVENTIONS["20"]


@dataclass(frozen=True)
class Printed:
    """A formula: the row's first cell, the text of `column`, and the code's answer."""

    row: str
    text: str
    code: Answer
    note: str = ""
    column: str = "expression"


def evaluate(text: str, symbols: Mapping[str, float]) -> float:
    """A printed expression: "^" is a power, and neighbours are multiplied ("3mP", "2(P/G)")."""
    plain = text.replace("^", "**")
    plain = re.sub(r"(?<=[0-9)])(?=[A-Za-z(])", "*", plain)
    if all(len(name) == 1 for name in symbols):
        plain = re.sub(r"(?<=[A-Za-z])(?=[A-Za-z(])", "*", plain)
    return float(eval(plain, {"__builtins__": {}}, dict(symbols)))


def lines_of(
    file: str, formulas: Sequence[Printed], symbols: Mapping[str, float], unit: str = ""
) -> Iterator[tuple[Any, ...]]:
    """Each formula beside the code's answer. Raises ValueError for a text that is not printed."""
    rows = read(file)
    first = next(iter(rows[0]))
    for formula in formulas:
        cell = next((r[formula.column] for r in rows if r[first] == formula.row), "")
        if formula.text not in cell:
            raise ValueError(
                f"{file}.csv, {formula.row!r}: {formula.column} prints {cell!r}, which has no"
                f" {formula.text!r}."
            )
        note = f", {formula.note}" if formula.note else ""
        published = evaluate(formula.text, symbols)
        predicted = formula.code(SimpleNamespace(**symbols))
        yield f"{formula.row}: {formula.text}{note}", predicted, published, unit


# -- traffic ---------------------------------------------------------------------------------------


@cache
def _blocks() -> ModelShape:
    """Eight blocks whose sizes divide by any number of ranks: nothing is padded."""
    units = tuple(
        UnitShape(f"blocks.{i}", (Parameter(f"blocks.{i}.weight", (4096, 4096)),)) for i in range(8)
    )
    return ModelShape("blocks", (UnitShape("(root)", ()), *units))


def planned(stage: int, micro_batches: int = 1, **options: Any) -> Answer:
    """Payload that the plan says a rank sends, in units of Ψ(N−1)/N elements."""

    def volume(s: Any) -> float:
        shape, recipe = _blocks(), Recipe.zero(stage, precision="bf16", **options)
        sent = sum(wire(units_of(shape, recipe, s.N), recipe, micro_batches).values())
        return s.P * sent / (2 * shape.numel * (s.N - 1) / s.N)

    return volume


def _formula(scheme: str, micro_batches: int = 1) -> Answer:
    return lambda s: traffic.volume(scheme, micro_batches) * s.P


def _zeropp(link: str, **options: bool) -> Answer:
    return lambda s: traffic.zeropp_bytes(s.P, element_bytes=1, **options)[link]


@table("Traffic formulas in print", "formula", "as named in the file", "comm_formulas_all")
def traffic_in_print(_: Rows) -> Lines:
    """Elements that a rank sends in a step, before the factor (N−1)/N, at N = W = 64, m = 4, G = Z
    = 8. Stages 0 to 3 and kept parameters are the plan's own bytes for eight blocks, the last of
    which stage 3 keeps from forward to backward; what Onefold does not do (yet) is the formula's.
    """
    symbols = {"P": 1.0, "N": 64, "m": 4, "G": 8, "W": 64, "Z": 8}
    halves = {"quantized_weights": False, "quantized_gradients": False}

    def ones(row: str, text: str, code: Answer, note: str = "") -> Printed:
        column = "volume_per_rank_per_optimizer_step(elements of P, x(N-1)/N)"
        return Printed(row, text, code, note, column)

    def many(row: str, text: str, code: Answer) -> Printed:
        return Printed(row, text, code, "4 micro-batches", "with_m_accumulation_microbatches")

    recompute, hpz = "ZeRO-3 + activation recompute", "hpZ (ZeRO++)"
    kept = "ZeRO-3, no reshard after forward (FSDP SHARD_GRAD_OP)"
    served = "the backward's gather serves recompute too, as in Onefold"
    groups, copy = traffic.between_groups, traffic.secondary_copy_bytes
    hybrid, offload = "HSDP/MiCS, shard group G of W", "ZeRO-Offload"
    formulas = [
        ones("DDP", "2P", planned(0)),
        many("DDP", "2P", planned(0, 4)),
        many("DDP", "2mP", _formula("ddp every micro-batch", 4)),
        ones("ZeRO-1", "2P", planned(1)),
        many("ZeRO-1", "2P", planned(1, 4)),
        many("ZeRO-1", "(m+1)P", _formula("zero-1 every micro-batch", 4)),
        ones("ZeRO-2", "2P", planned(2)),
        many("ZeRO-2", "(m+1)P", planned(2, 4)),
        ones("ZeRO-3", "3P", planned(3)),
        many("ZeRO-3", "3mP", planned(3, 4)),
        ones(recompute, "4P", _formula("zero-3 recompute"), "recompute gathers again"),
        ones(recompute, "3P", planned(3), served),
        ones(kept, "2P", planned(3, reshard_after_forward=False)),
        many(kept, "(m+1)P", _formula("zero-3 kept", 4)),
        ones(hpz, "2P", _zeropp("between", **halves), "between nodes"),
        ones(hpz, "P", _zeropp("inside", **halves), "inside"),
        Printed(hpz, "2P/Z", lambda s: copy(s.P, s.Z), "bytes of memory", "assumption"),
        ones("ZeRO++", "0.75P", _zeropp("between")),
        ones(hybrid, "2(P/G)(1-G/W)", lambda s: groups(s.P, s.G, s.W, 1)),
        ones(offload, "4P/N", lambda s: traffic.offload_bytes(s.P, s.N), "bytes on the host link"),
    ]
    yield from lines_of("comm_formulas_all", formulas, symbols, "Ψ")


# -- memory, FLOPs, time ---------------------------------------------------------------------------


def _zero() -> Lines:
    def model(stage: int) -> Answer:
        return lambda s: states.model_states(s.P, ADAM, stage, s.N)

    texts = ("(2+2+K)*P", "4*P + K*P/N", "2*P + (2+K)*P/N", "(4+K)*P/N")
    formulas = [Printed(f"Z-{i or 'base'}", text, model(i)) for i, text in enumerate(texts)]
    formulas += [
        Printed("Z-c-dp", "2*P", planned(0)),
        Printed("Z-c-12", "2*P", planned(1), "stage 1"),
        Printed("Z-c-12", "2*P", planned(2), "stage 2"),
        Printed("Z-c-3", "3*P", planned(3)),
    ]
    yield from lines_of("zero_formulas", formulas, {"P": 7.5e9, "K": 12, "N": 64})
    wide = {"hidden": 8192, "batch": 8, "seq": 1024, "layers": 75, "Nd": 64, "Nm": 16}
    every, kept = activations.zero_elements, activations.checkpoint_elements
    block = traffic.tensor_parallel_block_elements
    formulas = [
        Printed("Z-mp", "Nd*Nm", lambda s: states.reduction_factor(ADAM, 3, s.Nd * s.Nm)),
        Printed("Z-act", "12*hidden*batch*seq*layers", lambda s: every(s.layers, s.hidden, s.batch, s.seq)),
        Printed("Z-ckpt", "hidden*batch*seq*layers", lambda s: kept(s.layers, s.hidden, s.batch, s.seq)),
        Printed("Z-mpcomm", "12*seq*hidden", lambda s: block(1, s.seq, s.hidden)),
    ]  # fmt: skip
    yield from lines_of("zero_formulas", formulas, wide)


def _fsdp() -> Lines:
    def hybrid(s: Any) -> float:
        return traffic.between_groups(s.M, s.G, s.W, 1)

    def whole(stage: int) -> Answer:
        return lambda s: planned(stage)(SimpleNamespace(P=s.M, N=s.W)) * (s.W - 1) / s.W

    formulas = [
        Printed("F-c-rep", "2M(W-1)/W", whole(0)),
        Printed("F-c-full", "3M(W-1)/W", whole(3)),
        Printed("F-c-hyb", "2M(W-G)/(G*W)", hybrid, "exact"),
        Printed("F-c-hyb", "2M(W-1)/(G*W)", hybrid, "as printed"),
    ]
    yield from lines_of("fsdp_formulas", formulas, {"M": 1e9, "W": 512, "G": 8})


def _infinity() -> Lines:
    def intensity(streamed: str) -> Answer:
        return lambda s: streaming.intensity(
            streamed, batch=s.bsz, seq=s.seq, hidden=s.hd, interval=s.ci
        )

    symbols = {
        "nl": 128,
        "hd": 25_600,
        "bsz": 4,
        "seq": 1024,
        "ci": 2,
        "attn_heads": 256,
        "params": 1.0e12,
        "ait": 1024.0,
        "bw": 70e9,
        "peak_tp": streaming.V100_ACHIEVABLE,
    }
    kept, working = activations.checkpoint_elements, streaming.activation_working_bytes
    formulas = [
        Printed("I-params", "12*nl*hd^2", lambda s: streaming.parameters(s.nl, s.hd)),
        Printed("I-states", "240*nl*hd^2", lambda s: streaming.model_states(s.nl, s.hd, INFINITY.total)),
        Printed("I-ckpt", "2*bsz*seq*hd*nl/ci", lambda s: 2 * kept(s.nl, s.hd, s.bsz, s.seq, s.ci)),
        Printed("I-mswm", "16*hd^2", lambda s: streaming.parameter_working_bytes(s.hd)),
        Printed("I-awm", "bsz*seq*ci*(16*hd + 2*attn_heads*seq)", lambda s: working(s.bsz, s.seq, s.hd, s.attn_heads, s.ci)),
        Printed("I-comp", "8*bsz*seq*params", lambda s: compute.infinity_flops(s.params, s.bsz, s.seq)),
        Printed("I-ait-pg", "seq*bsz", intensity("params")),
        Printed("I-ait-os", "seq*bsz/4", intensity("optimizer")),
        Printed("I-ait-act", "24*hd*ci", intensity("act_ckpt")),
        Printed("I-eff", "ait*bw/(ait*bw+peak_tp)", lambda s: streaming.efficiency(s.ait, s.bw, s.peak_tp)),
    ]  # fmt: skip
    yield from lines_of("infinity_formulas", formulas, symbols)


def _korthikanti() -> Lines:
    def layer(row: str, text: str, tensor: bool = False, **options: Any) -> Printed:
        def code(s: Any) -> float:
            return activations.korthikanti_layer(
                s.s, s.b, s.h, s.a, s.t if tensor else 1, **options
            )

        return Printed(row, text, code, column="bytes_per_layer")

    def outside(s: Any) -> float:
        embedded = activations.embedding_and_head(s.s, s.b, s.h, s.v, tensor=s.t)
        return embedded - s.s * s.b * s.h / s.t

    some, every = {"recompute": "selective"}, {"sequence_parallel": True}
    formulas = [
        layer("no parallelism", "s*b*h*(34+5*a*s/h)"),
        layer("tensor parallel", "s*b*h*(10+24/t+5*a*s/(h*t))", True),
        layer("tensor + sequence parallel", "s*b*h*(34/t+5*a*s/(h*t))", True, **every),
        layer("tensor parallel + selective recompute", "s*b*h*(10+24/t)", True, **some),
        layer("tensor + sequence parallel + selective", "s*b*h*34/t", True, **some, **every),
        layer("full recompute", "2*s*b*h", recompute="full"),
        Printed("extra: embeddings/head", "4*s*b*h*(1+v/h)/t", outside, column="bytes_per_layer"),
    ]
    symbols = {"s": 2048, "b": 1, "h": 12_288, "a": 96, "t": 8, "v": 51_200}
    yield from lines_of("korthikanti_table2_activation_formulas", formulas, symbols)


def _megatron() -> Lines:
    symbols = {
        "l": 96,
        "h": 12_288,
        "V": 51_200,
        "s": 2048,
        "B": 1536,
        "T": 300e9,
        "P": 174.6e9,
        "n": 1024,
        "X": 140e12,
        "p": 8,
        "m": 64,
        "v": 2,
        "b": 1,
        "t": 8,
    }
    size, flops, bubble = (
        compute.megatron_parameters,
        compute.megatron_flops,
        compute.pipeline_bubble,
    )
    moved, passed = traffic.tensor_parallel_elements, traffic.pipeline_elements
    formulas = [
        Printed("M-P", "12*l*h^2*(1+13/(12h)+(V+s)/(12*l*h))", lambda s: size(s.l, s.h, s.V, s.s)),
        Printed("M-F", "96*B*s*l*h^2*(1+s/(6h)+V/(16*l*h))", lambda s: flops(s.B, s.s, s.l, s.h, s.V)),
        Printed("M-T", "8*T*P/(n*X)", lambda s: compute.SECONDS_A_DAY * compute.training_days(s.T, s.P, s.n, s.X)),
        Printed("M-bub", "(p-1)/m", lambda s: bubble(s.p, s.m)),
        Printed("M-bub", "(1/v)*(p-1)/m", lambda s: bubble(s.p, s.m, s.v)),
        Printed("M-tp", "8*b*s*h*(t-1)/t", lambda s: moved(s.b, s.s, s.h, s.t)),
        Printed("M-pp", "b*s*h", lambda s: passed(s.b, s.s, s.h)),
        Printed("M-sg", "b*s*h/t", lambda s: passed(s.b, s.s, s.h, s.t)),
    ]  # fmt: skip
    yield from lines_of("megatron_formulas", formulas, symbols)
    for row, numel, gpus, rate, tokens in (
        ("M-ex1", 175e9, 1024, 140e12, 300e9),
        ("M-ex2", 1.0e12, 3072, 163e12, 450e9),
    ):
        published = next(r for r in read("megatron_formulas") if r["id"] == row)
        got, said = compute.training_days(tokens, numel, gpus, rate), published["expression"]
        yield f"{row}: {published['quantity']}", got, said.split()[0], "days"


def _conventions() -> Lines:
    by = {r["convention"]: r["example"] for r in read("flops_mfu_conventions")}
    kaplan = compute.model_flops_per_token(175e9) * 300e9
    yield "GPT-3, 6ND", kaplan, by["Kaplan/Chinchilla"].rsplit(" ", 1)[-1], "FLOP"
    science = compute.training_days(300e9, 13e9, 256, 45e12)
    yield "BLOOM 13B, 8·P·tokens/(n·X)", science, by["bigscience"].split()[-2], "days"
    names = {"AdamW fp32 m,v": "adamw", "SGD momentum": "sgd-momentum", "LION": "lion"}
    for r in read("optimizer_and_peft_bytes"):
        if r["method"] in names:
            name, published = names[r["method"]], r["state_bytes_per_param"]
            held = states.OPTIMIZER_STATE_BYTES[name]
            yield f"{r['method']}, bytes of state a parameter", held, published, "B"
            if name in MOMENTS_OF:
                yield f"{r['method']}, as the plan counts it", 4 * MOMENTS_OF[name], published, "B"


@table(
    "Formulas in print",
    "formula",
    "as named in the files",
    "zero_formulas",
    "fsdp_formulas",
    "infinity_formulas",
    "korthikanti_table2_activation_formulas",
    "megatron_formulas",
    "flops_mfu_conventions",
    "optimizer_and_peft_bytes",
)
def formulas_in_print(*_: Rows) -> Lines:
    """Each formula as its source prints it, at one set of sizes, beside the code's. FSDP's hybrid
    traffic is printed as an approximation that counts the own group too; its exact form is beside
    it.
    """
    for lines in (_zero, _fsdp, _infinity, _korthikanti, _megatron, _conventions):
        yield from lines()
