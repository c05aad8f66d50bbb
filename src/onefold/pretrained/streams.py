"""Safetensors files that many write at once: every place in them is known before a byte is.

    shapes ──► PlannedFiles.plan ──► model-00001-of-00002.safetensors   |head|a        |b    |
                              model-00002-of-00002.safetensors   |head|c  |d          |
    first rank   makes the files, at their full length, with their heads
    every rank   writes its intervals of a, b, c, d at their places, in the file's dtype, a few MiB at a time

No rank holds more than it did before, and nothing crosses the wire.
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
from onefold.checkpoint.tensorfile import CHUNK, TensorSpan, bytes_of, header_of, numel_of
from onefold.pretrained.hf_names import ElementRun, Layout, Shape, overlapping

#: (bytes done, bytes to do) of what this rank writes.
Progress = Callable[[int, int], object]
#: (a tensor's name, the first element, elements [n] of it flattened, on any device).
Pieces = Iterable[tuple[str, int, torch.Tensor]]


@dataclass(frozen=True)
class PlannedFiles:
    """Attributes:
    heads: {file: its first bytes}. lengths: {file: its bytes}. places: {tensor: (file, where in
    it)}."""

    name: str
    heads: Mapping[str, bytes]
    lengths: Mapping[str, int]
    places: Mapping[str, tuple[str, TensorSpan]]

    @classmethod
    def plan(
        cls, tensors: Sequence[tuple[str, torch.dtype, Shape]], name: str, limit: int
    ) -> PlannedFiles:
        """Files called after `name`, of at most `limit` bytes of tensors each (a larger tensor has
        a file of its own).

        Within a file the widest dtypes come first, so that every element lies at a multiple of its
        size.

        Raises:
            CheckpointError: a dtype that the format has no name for, or a name twice.
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
        """Make the files with their heads, and the index if there are several.
        Raises: CheckpointError: there is no room for them. OSError: as the system says it.
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
    """What goes where: `files`, and for each tensor that is given the runs of the files' tensors
    that it becomes (one list a copy).
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
        """Args:
        layout: the files' tensors, made of tensors by the names in `copies`.
        dtypes: {such a name: its dtype in the files}.
        copies: {tensor that is given: the names that it is written under}.
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
        """Write `pieces` at their places, and have the disk know them. Raises: OSError."""
        files: dict[str, int] = {}
        done = 0
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
                            if progress is not None:
                                progress(done, total)
            for descriptor in files.values():
                os.fsync(descriptor)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def nbytes_of(self, intervals: Iterable[tuple[str, int, int]]) -> int:
        """Bytes in the files of `(tensor, start, stop)`."""
        total = 0
        for name, start, stop in intervals:
            for runs in self.goes.get(name, ()):
                total += sum(
                    run.length * self.files.places[run.name][1].dtype.itemsize
                    for run in overlapping(runs, start, stop)
                )
        return total


def _put(file: int, span: TensorSpan, start: int, data: torch.Tensor) -> Iterator[int]:
    """Write elements [n] from element `start` of `span` on. Yields the bytes written."""
    step = CHUNK // max(span.dtype.itemsize, data.dtype.itemsize)
    at = span.begin + start * span.dtype.itemsize
    for begin in range(0, data.numel(), step):
        part = bytes_of(data[begin : begin + step].to(span.dtype).cpu().contiguous())
        nbytes = len(part)
        while len(part):
            count = os.pwrite(file, part, at)
            part, at = part[count:], at + count
        yield nbytes
