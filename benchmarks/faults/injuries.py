"""Checkpoints injured at random: `verify` must name each injury, and none may load wrong."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onefold
from benchmarks.faults.ranks import Ranks
from benchmarks.faults.run import Log, Run, lines
from onefold.checkpoint.manifest import CHECKSUM, MANIFEST, key_of, read_manifest
from onefold.checkpoint.tensorfile import TensorFile
from onefold.inspection.verify import examine

WORLD = 2
#: (stage, precision) of the run that saves, whose checkpoints are injured.
SAVED = ((3, "fp32"), (0, "fp32"), (2, "bf16"))
#: The steps that each saves.
STEPS = (2, 3)


@dataclass
class Injury:
    """One injury and what came of it.

    Attributes:
        kind: see KINDS. files: what was changed. tensor: the one that was hit, "" where it is not
            one alone.
        found: what `verify` said. loaded: on one rank, and on two: "refused" or "right".
        wrong: what was not as it must be.
    """

    kind: str
    checkpoint: str
    files: tuple[str, ...]
    what: str
    tensor: str = ""
    found: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def injure(kind: str, folder: Path, other: Path, draw: random.Random) -> Injury:
    """Change something in `folder`; `other` is a whole checkpoint of another step."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    name = draw.choice(names)
    path = folder / name
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    if kind == "flip":
        tensor = _tensor_at(folder, name, at)
        data[at] ^= draw.randrange(1, 256)
        path.write_bytes(data)
        return Injury(kind, folder.name, (name,), f"byte {at} of {len(data)}", tensor)
    if kind == "truncate":
        path.write_bytes(data[:at])
        return Injury(kind, folder.name, (name,), f"{at} of {len(data)} bytes left")
    if kind == "delete":
        path.unlink()
        return Injury(kind, folder.name, (name,), "removed")
    if kind == "append":
        more = draw.randbytes(draw.randint(1, 64))
        path.write_bytes(data + more)
        return Injury(kind, folder.name, (name,), f"{len(more)} bytes added")
    if kind == "lost block":  # as after a crash of the machine
        hit = slice(at // 512 * 512, at // 512 * 512 + 512)
        data[hit] = bytes(x ^ 0xFF if not any(data[hit]) else 0 for x in data[hit])
        path.write_bytes(data)
        return Injury(
            kind, folder.name, (name,), f"bytes {hit.start} to {min(hit.stop, len(data))}"
        )
    if kind == "swap":
        second = draw.choice([n for n in names if n != name and (folder / n).read_bytes() != data])
        path.write_bytes((folder / second).read_bytes())
        (folder / second).write_bytes(data)
        return Injury(kind, folder.name, (name, second), "exchanged")
    assert kind == "stale"  # a file of the other checkpoint in place of this one's
    name = draw.choice(
        [
            n
            for n in names
            if (other / n).exists() and (other / n).read_bytes() != (folder / n).read_bytes()
        ]
    )
    shutil.copyfile(other / name, folder / name)
    return Injury(kind, folder.name, (name,), f"taken from {other.name}")


KINDS = ("flip", "flip", "flip", "truncate", "delete", "append", "lost block", "swap", "stale")


def _tensor_at(folder: Path, name: str, at: int) -> str:
    """The tensor that byte `at` of a file belongs to, as `verify` calls it; "" for none."""
    if not name.endswith(".safetensors"):
        return ""
    keys = {
        (p.file, key_of(r.item, p.start)): str(r.item)
        for r in read_manifest(folder).records
        for p in r.pieces
    }
    with TensorFile(folder / name) as file:
        return next(
            (
                keys[name, key]
                for key, entry in file.header.items()
                if entry.begin <= at < entry.end
            ),
            "",
        )


def judge(injury: Injury, folder: Path) -> None:
    """Whether `verify` has found and named it."""
    problems = examine(folder).problems
    injury.found = [str(p) for p in problems]
    if not any(p.file in injury.files for p in problems):
        injury.wrong.append(f"verify does not name {' or '.join(injury.files)}")
    # What is checked by a damaged manifest may look damaged; everything else that is named must be.
    elsewhere = [
        p
        for p in problems
        if p.file not in injury.files and not {MANIFEST, CHECKSUM} & set(injury.files)
    ]
    if elsewhere:
        injury.wrong.append(f"verify names what is sound: {elsewhere[0]}")
    if injury.tensor and not any(p.tensor == injury.tensor for p in problems):
        injury.wrong.append(f"verify does not name {injury.tensor}")


def _save(rank: int, say: Log, root: str) -> None:
    for stage, precision in SAVED:
        run = Run(stage, rank, precision=precision)
        for step in range(1, max(STEPS) + 1):
            run.step()
            if step in STEPS:
                onefold.save(
                    f"{root}/{stage}-{precision}-{step}", model=run.model, step=step, **run.parts()
                )


def _load(rank: int, say: Log, root: str, sound: str, names: list[str]) -> None:
    """Load every folder, whatever is wrong with it, over a state that is none of a checkpoint's."""
    runs: dict[str, Run] = {}
    states: dict[str, int] = {}
    for name in names:
        which = name.split(" ")[0]
        precision = which.split("-")[1]
        if precision not in runs:
            runs[precision] = Run(3, rank, precision=precision)
            runs[precision].step()
        run = runs[precision]
        if which not in states:
            onefold.load(f"{sound}/{which}", model=run.model, **run.parts())
            states[which] = run.state()
        run.spoil()
        try:
            onefold.load(f"{root}/{name}", model=run.model, **run.parts())
            outcome = "right" if run.state() == states[which] else "WRONG"
        except onefold.CheckpointError:
            outcome = "refused"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        say({"at": name, "outcome": outcome})


def drill(
    fork: Any, count: int, seed: int = 0, tell: Callable[[str], None] = lambda text: None
) -> list[Injury]:
    """`count` injuries, each verified, and loaded on one rank and on two."""
    draw, done = random.Random(seed), {}
    with tempfile.TemporaryDirectory(prefix="faults-injuries-") as folder:
        sound, injured = Path(folder, "sound"), Path(folder, "injured")
        _together(fork, WORLD, 120.0, _save, str(sound))
        whole = sorted(p.name for p in sound.iterdir())
        for name in whole:
            if found := examine(sound / name).problems:
                raise RuntimeError(
                    f"{name}, which nobody has injured, is said to be damaged: {found[0]}"
                )
        for number in range(count):
            kind, name = KINDS[number % len(KINDS)], draw.choice(whole)
            copy = injured / f"{name} {number}"
            shutil.copytree(sound / name, copy)
            other = next(
                n for n in whole if n != name and n.rsplit("-", 1)[0] == name.rsplit("-", 1)[0]
            )
            injury = done[copy.name] = injure(kind, copy, sound / other, draw)
            judge(injury, copy)
        tell(
            f"{count} injuries made and verified, {sum(bool(i.wrong) for i in done.values())} wrong"
        )
        for world in (1, WORLD):
            said = _together(
                fork, world, 60.0 + 2 * count, _load, str(injured), str(sound), list(done)
            )
            for lists in zip(*said, strict=True):
                injury, outcomes = done[lists[0]["at"]], [line["outcome"] for line in lists]
                injury.loaded.append(outcomes[0])
                if set(outcomes) not in ({"refused"}, {"right"}):
                    injury.wrong.append(
                        f"loaded on {world} rank{'s' if world > 1 else ''}: {', '.join(outcomes)}"
                    )
            tell(f"loaded on {world}, {sum(bool(i.wrong) for i in done.values())} wrong")
    return list(done.values())


def _together(
    fork: Any, world: int, timeout: float, function: Callable[..., None], *args: Any
) -> list[list[dict[str, Any]]]:
    with Ranks(fork, world, function, *args) as ranks:
        if not ranks.ended(timeout):
            raise RuntimeError(
                f"{function.__name__} on {world} ranks hung:"
                f" {[lines(ranks.lines(r))[-1:] for r in range(world)]}"
            )
        if failure := ranks.failed():
            raise RuntimeError(f"{function.__name__} on {world} ranks: {failure}")
        return [lines(ranks.lines(rank)) for rank in range(world)]
