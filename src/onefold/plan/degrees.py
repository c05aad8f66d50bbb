"""How many ranks each axis of a mesh has, and what refuses such a mesh for a model on a machine.

    world   = dp × cp × tp × pp       ep of the dp ranks have different experts
    numbers   pp is the slowest axis, then dp (without ep), ep, cp, tp

              stage 0 of the pipeline            stage 1
              dp 0          dp 1                 dp 0          dp 1
              tp 0   tp 1   tp 0   tp 1          tp 0   tp 1   tp 0   tp 1
    rank      0      1      2      3             4      5      6      7

`pp` is no axis of the mesh that the ranks of a stage share: each stage is sharded by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from onefold.layout.holders import Mesh
from onefold.plan.hardware import Machine
from onefold.plan.shapes import ModelShape, Transformer
from onefold.wording import few

#: The axes of the mesh of one stage. Along those of `DATA` ranks compute with different tokens.
AXES, DATA = ("dp", "ep", "cp", "tp"), ("dp", "ep", "cp")


@dataclass(frozen=True)
class Degrees:
    """The degrees of parallelism.

    Attributes:
        dp: ranks with different samples, `ep` of which have different experts.
        tp: ranks that divide each layer. They are of one node.
        pp: stages of the pipeline.
        cp: ranks that divide each sample.
        ep: ranks that divide the experts.
        chunks: parts of the model that each stage has (1: plain 1F1B; more: interleaved 1F1B).
        sequence_parallel: between its layers, a tensor-parallel rank has a part of the tokens only
            (Korthikanti et al. 2022, section 4.2).

    Raises:
        ValueError: a degree that is no positive number, an `ep` that does not divide `dp`, an
            chunks without a pipeline.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "chunks", "dp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"--{name} {value!r}: expected a whole number, 1 or more.")
        if self.dp % self.ep:
            raise ValueError(
                f"--ep {self.ep} does not divide the {self.dp} data-parallel ranks: choose"
                f" {few(map(str, divisors(self.dp)), 8)}."
            )
        if self.chunks > 1 and self.pp == 1:
            raise ValueError(
                f"--chunks {self.chunks} interleaves the stages of a pipeline: give --pp 2 or more, or"
                " leave --chunks out."
            )

    @classmethod
    def on(cls, ranks: int, *, ep: int = 1, **others: Any) -> Degrees:
        """Return degrees that fill `ranks`; what the others leave is data parallel. Raises
        ValueError: they do not divide the ranks.
        """
        found = cls(**others)
        each = found.of_stage_without_dp * found.pp
        if ranks % each:
            said = " × ".join(
                f"--{n} {getattr(found, n)}" for n in ("tp", "pp", "cp") if getattr(found, n) > 1
            )
            below = ranks // each * each
            near = f"{below} or {below + each}" if below else f"{each}"
            raise ValueError(
                f"{said} makes {each} ranks, which do not divide {ranks} GPUs: use {near} GPUs, or"
                " degrees whose product divides them."
            )
        return replace(found, dp=ranks // each, ep=ep)

    @property
    def ranks(self) -> int:
        return self.dp * self.of_stage_without_dp * self.pp

    @property
    def of_stage_without_dp(self) -> int:
        """Ranks of a stage that have the same samples."""
        return self.cp * self.tp

    @property
    def data_only(self) -> bool:
        """No other axis divides the ranks."""
        return self.ranks == self.dp and self.ep == 1

    @property
    def sequence_divided(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of `AXES`."""
        return {"dp": self.dp // self.ep, "ep": self.ep, "cp": self.cp, "tp": self.tp}

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh that the ranks of a stage share."""
        return Mesh(AXES, tuple(self.sizes.values()), DATA)

    def __str__(self) -> str:
        said = [f"dp {self.dp}"]
        said += [
            f"{n} {getattr(self, n)}" for n in ("tp", "pp", "cp", "ep") if getattr(self, n) > 1
        ]
        said += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        return " × ".join(said)


#: One rank, or data ranks alone where their number does not matter.
ALONE = Degrees()


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def dims_of(model: ModelShape) -> Transformer:
    """Return the dimensions that a plan of a mesh needs. Raises ValueError: they are not known."""
    if model.transformer is None:
        raise ValueError(
            f"{model.name} has no dimensions (heads, layers, hidden), which --tp, --pp, --cp and --ep"
            " divide: give a name such as llama-3-70b, a folder or a config.json."
        )
    return model.transformer


def most_tp(dims: Transformer, machine: Machine) -> list[int]:
    """Return the tensor-parallel degrees that this model and machine allow."""
    counts = machine.local, dims.heads, dims.kv_heads or dims.heads, dims.ffn
    return [n for n in divisors(machine.local) if not any(count % n for count in counts)]


def check(degrees: Degrees, model: ModelShape, machine: Machine, seq: int) -> None:
    """Raises ValueError: these degrees (but dp) are not possible for this model on this machine, with
    samples of `seq` tokens. The sentence says what to choose.
    """
    dims = dims_of(model)
    tp, pp, ep = degrees.tp, degrees.pp, degrees.ep
    if tp not in (possible := most_tp(dims, machine)):
        raise ValueError(
            f"--tp {tp} has to divide the {machine.local} GPUs of a node, {dims.heads} heads,"
            f" {dims.kv_heads or dims.heads} heads of keys and values, and {dims.ffn:,} columns of the"
            f" feed-forward: choose {few(map(str, possible), 8)}."
        )
    if pp * degrees.chunks > dims.layers:
        parts = f"--pp {pp}" + (f" × --chunks {degrees.chunks}" if degrees.chunks > 1 else "")
        raise ValueError(
            f"{parts} makes {pp * degrees.chunks} parts of {dims.layers} blocks: choose at most"
            f" {dims.layers // degrees.chunks} stages."
        )
    if ep > 1 and dims.experts <= 1:
        raise ValueError(f"--ep {ep}: {model.name} has no experts; leave --ep out.")
    if dims.experts % ep:
        raise ValueError(
            f"--ep {ep} does not divide {dims.experts} experts: choose"
            f" {few(map(str, divisors(dims.experts)), 8)}."
        )
    cp = degrees.cp
    # Causal attention is balanced by two pieces a rank (Llama team 2024, section 3.3.2)
    pieces = 2 * cp if cp > 1 else 1
    if seq % pieces:
        near = max(1, round(seq / pieces)) * pieces
        raise ValueError(
            f"--cp {cp} divides a sample into {pieces} pieces, and --seq is {seq:,}: choose --seq"
            f" {near}, or another --cp."
        )
    if degrees.sequence_divided and seq // cp % degrees.tp:
        near = max(1, round(seq / (cp * degrees.tp))) * cp * degrees.tp
        raise ValueError(
            f"sequence parallelism divides the {seq // cp:,} tokens of a rank among --tp"
            f" {degrees.tp}: choose --seq {near}, or --no-sequence-parallel."
        )
