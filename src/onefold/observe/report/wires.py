"""What went between nodes, and what was encoded: of no run with one node and no codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onefold.comm import Sent
from onefold.observe.report.words import in_bytes
from onefold.observe.runfile import RankObserved


@dataclass(frozen=True)
class WireLine:
    """One line of the table, ready to be read; `plain` and `ratio` are "" where no move of the run
    was encoded.
    """

    name: str
    sent: str
    plain: str
    ratio: str
    is_sum: bool


def borders_of(ranks: Sequence[RankObserved]) -> str:
    """What the run's bytes went between: "nodes", or "groups" of the recipe's."""
    return next((_word(r) for r in ranks if r.step is not None and r.step.borders), "nodes")


def table(rank: RankObserved) -> list[WireLine]:
    """Each move, and of it what went between nodes; then their sums. [] where there is one node and
    nothing was encoded.
    """
    total = sum(rank.wire.values(), Sent())
    across, coded = _several(rank), any(sent.encoded for sent in rank.wire.values())
    if not across and not coded:
        return []
    lines = []
    for name, sent in [*rank.wire.items(), ("all", total)]:
        lines.append(_line(name, sent.nbytes, sent.plain if coded else None, name == "all"))
        if across:
            lines.append(
                _line(
                    f"{name}, between {_word(rank)}",
                    sent.between,
                    sent.plain_between if coded else None,
                    name == "all",
                )
            )
    return lines


def sentence(rank: RankObserved) -> str:
    """The same in words, for where `table` has lines."""
    total, said = sum(rank.wire.values(), Sent()), []
    if _several(rank) and rank.step is not None:
        said.append(
            f"Of {in_bytes(total.nbytes)}, {in_bytes(total.between)} go to another of the"
            f" {rank.step.borders}."
        )
    if total.encoded:
        said.append(
            f"Without codecs the same moves would be {in_bytes(total.plain)},"
            f" {_times(total.plain, total.nbytes)} times as much."
        )
    return " ".join(said)


def in_brief(rank: RankObserved) -> str:
    """The same behind a figure; "" where `table` has no lines."""
    total = sum(rank.wire.values(), Sent())
    said = f"; {in_bytes(total.between)} between {_word(rank)}" if _several(rank) else ""
    return said + (f"; {in_bytes(total.plain)} without codecs" if total.encoded else "")


def _several(rank: RankObserved) -> bool:
    return rank.step is not None and bool(rank.step.borders) and bool(rank.wire)


def _word(rank: RankObserved) -> str:
    return (
        rank.step.borders.partition(" ")[2]
        if rank.step is not None and rank.step.borders
        else "nodes"
    )


def _line(name: str, sent: int, plain: int | None, is_sum: bool) -> WireLine:
    if plain is None:
        return WireLine(name, in_bytes(sent), "", "", is_sum)
    return WireLine(name, in_bytes(sent), in_bytes(plain), _times(plain, sent), is_sum)


def _times(plain: int, sent: int) -> str:
    return f"{plain / sent:.2f}" if sent else "–"
