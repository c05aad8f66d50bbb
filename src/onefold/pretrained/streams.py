"""Safetensors files that several ranks write at once. Every tensor's position is planned before the
first byte is written.

    shapes ──► PlannedFiles.plan ──► model-00001-of-00002.safetensors   |head|a        |b    |
                              model-00002-of-00002.safetensors   |head|c  |d          |
    first rank   creates the files at their full length, with their headers
    every rank   writes its intervals of a, b, c, d at their positions, in the file's dtype, a few MiB at a time

A rank needs only a few MiB of memory, and ranks exchange no tensors.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.progress import moved
from onefold.checkpoint.tensorfile import (
    CHUNK,
    FLUSH,
    TensorSpan,
    bytes_of,
    header_of,
    numel_of,
)
from onefold.pretrained.hf_names import ElementRun, Layout, Shape, overlapping

#: (bytes done, bytes to do) of what this rank writes.
Progress = Callable[[int, int], object]
#: (a tensor's name, index of the first element, elements [n] in flattened order, on any device).
Pieces = Iterable[tuple[str, int, torch.Tensor]]


@dataclass(frozen=True)
class PlannedFiles:
    """The files of an export.

    Attributes:
        heads: {file: its header}. lengths: {file: its size in bytes}.
        places: {tensor: (file, position in the file)}.
    """

    name: str
    heads: Mapping[str, bytes]
    lengths: Mapping[str, int]
    places: Mapping[str, tuple[str, TensorSpan]]

    @classmethod
    def plan(
        cls, tensors: Sequence[tuple[str, torch.dtype, Shape]], name: str, limit: int
    ) -> PlannedFiles:
        """Divide tensors among files called `name`, each with at most `limit` bytes of tensors. A
        larger tensor has its own file.

        Within a file the widest dtypes come first, which aligns every element to its size.

        Raises:
            CheckpointError: the format has no name for a dtype, or a name occurs twice.
        """
        groups: list[list[tuple[str, torch.dtype, Shape]]] = [[]]
        filled = 0
        for tensor in tensors:
            nbytes = numel_of(tensor[2]) * tensor[1].itemsize
            if groups[-1] and filled + nbytes > limit:
                groups.append([])
                filled = 0
            groups[-1].append(tensor)
            filled += nbytes
        heads: dict[str, bytes] = {}
        lengths: dict[str, int] = {}
        places: dict[str, tuple[str, TensorSpan]] = {}
        for number, group in enumerate(groups, 1):
            part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            file = f"{name}{part}.safetensors"
            head, entries = header_of(sorted(group, key=lambda t: -t[1].itemsize), {"format": "pt"})
            if again := next((key for key in entries if key in places), None):
                raise CheckpointError(f"two tensors are called {again!r}.")
            heads[file], lengths[file] = head, max([len(head), *(e.end for e in entries.values())])
            places |= {key: (file, entry) for key, entry in entries.items()}
        return cls(name, heads, lengths, places)

    @property
    def nbytes(self) -> int:
        return sum(self.lengths.values())

    def create(self, folder: Path) -> None:
        """Create the files with their headers, and an index if there are several files.
        Raises: CheckpointError: the disk has no space for them. OSError: from the system.
        """
        free = shutil.disk_usage(folder).free
        if free < self.nbytes:
            raise CheckpointError(
                f"{folder.parent} has {free / 2**20:,.2f} MiB free, and {self.nbytes / 2**20:,.2f}"
                " MiB are to be written there; free space there, or choose another disk."
            )
        for file, head in self.heads.items():
            with open(folder / file, "xb") as out:
                out.write(head)
                out.truncate(self.lengths[file])
        if len(self.heads) > 1:
            count = sum(numel_of(entry.shape) for _, entry in self.places.values())
            size = sum(entry.end - entry.begin for _, entry in self.places.values())
            index = {
                "metadata": {"total_parameters": count, "total_size": size},
                "weight_map": {key: file for key, (file, _) in sorted(self.places.items())},
            }
            (folder / f"{self.name}.safetensors.index.json").write_text(
                json.dumps(index, indent=2) + "\n", encoding="utf-8"
            )


@dataclass(frozen=True)
class Sheet:
    """The plan of an export: where each of the model's tensors is written.

    Attributes:
        files: the files.
        goes: {name of a tensor in the model: for each copy of it, its runs in the files' tensors}.
    """

    files: PlannedFiles
    goes: Mapping[str, Sequence[Sequence[ElementRun]]]

    @classmethod
    def of(
        cls,
        layout: Layout,
        dtypes: Mapping[str, torch.dtype],
        copies: Mapping[str, Sequence[str]],
        name: str,
        limit: int,
    ) -> Sheet:
        """Make the plan.

        Args:
            layout: how the files' tensors are made of those under the names in `copies`.
            dtypes: {name in `copies`: its dtype in the files}.
            copies: {name of a tensor in the model: the names under which it is written}.
            name: how the files are called.
            limit: the most bytes of tensors in one file.
        """
        backward: dict[str, list[ElementRun]] = {}
        tensors = []
        for key, (shape, runs) in layout.made.items():
            first = runs[0].name if runs else key
            tensors.append((key, dtypes.get(first, torch.float32), shape))
            for run in runs:
                back = ElementRun(run.start, key, run.at, run.length)
                backward.setdefault(run.name, []).append(back)
        for runs_there in backward.values():
            runs_there.sort(key=lambda run: run.at)
        goes = {
            given: [backward[name] for name in names if name in backward]
            for given, names in copies.items()
        }
        return cls(PlannedFiles.plan(tensors, name, limit), goes)

    def write(self, folder: Path, pieces: Pieces, total: int, progress: Progress | None) -> None:
        """Write `pieces` at their positions and flush them to disk. Raises: OSError."""
        files: dict[str, int] = {}
        done = flushed = 0
        try:
            for name, start, data in pieces:
                for runs in self.goes.get(name, ()):
                    for run in overlapping(runs, start, start + data.numel()):
                        file, span = self.files.places[run.name]
                        if file not in files:
                            files[file] = os.open(folder / file, os.O_WRONLY)
                        part = data[run.at - start : run.at - start + run.length]
                        for nbytes in _put(files[file], span, run.start, part):
                            done += nbytes
                            moved()
                            if done - flushed >= FLUSH:
                                for descriptor in files.values():
                                    os.fsync(descriptor)
                                flushed = done
                            if progress is not None:
                                progress(done, total)
            for descriptor in files.values():
                os.fsync(descriptor)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def nbytes_of(self, intervals: Iterable[tuple[str, int, int]]) -> int:
        """Return the bytes that the intervals `(tensor, start, stop)` take in the files."""
        total = 0
        for name, start, stop in intervals:
            for runs in self.goes.get(name, ()):
                total += sum(
                    run.length * self.files.places[run.name][1].dtype.itemsize
                    for run in overlapping(runs, start, stop)
                )
        return total


def _put(file: int, span: TensorSpan, start: int, data: torch.Tensor) -> Iterator[int]:
    """Write `data`, elements [n] of the tensor at `span` from element `start` on. Yields the number
    of bytes after each write.
    """
    step = CHUNK // max(span.dtype.itemsize, data.dtype.itemsize)
    at = span.begin + start * span.dtype.itemsize
    for begin in range(0, data.numel(), step):
        part = bytes_of(data[begin : begin + step].to(span.dtype).cpu().contiguous())
        nbytes = len(part)
        while len(part):
            count = os.pwrite(file, part, at)
            part, at = part[count:], at + count
        yield nbytes
