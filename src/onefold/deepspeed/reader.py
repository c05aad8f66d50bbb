"""A checkpoint of DeepSpeed's `engine.save_checkpoint` as a `Source`: names and shapes are read at
once, elements on demand. None of its code runs.

    runs/a/latest                                         the name of the newest tag folder
    runs/a/global_step300/                                a tag folder
      mp_rank_00_model_states.pt                          stages 1, 2: one file, the module in the compute dtype
      zero_pp_rank_0_mp_rank_00_model_states.pt           stage 3: one for each rank
      [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt    all stages: one for each rank

"mp_rank" is the tensor-parallel rank; only 00 can be read. A rank's optimizer file has flat tensors,
here called cells: its part of one parameter group (stages 1, 2) or of one sub-group (stage 3).

Stages 1 and 2: the parameters of a group are concatenated, and the result is cut into N equal
parts. With `parameter_alignment` there is padding after each parameter as well as at the end.

    group     | a a a a a | b b b | c c c c c c | pad |
    cut            rank 0      |      rank 1          |

Stage 3: each parameter is cut into N equal parts, of which the last is padded. Each rank
concatenates its parts.

    rank 0    | a a a | b b | c c c |
    rank 1    | a a . | b . | c c c |          . is padding
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.source import Item, Source, Stored
from onefold.reading import open_regular, read_bytes

_FILE = re.compile(
    r"^(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<other>\d+)_?"
    r"(?P<kind>model|optim)_states\.pt$"
)
LATEST = "latest"
#: What a folder may hold that cannot be read, by names of files.
_OTHER_KINDS = {
    r"^(layer_\d+_)?expert_\d+_": "experts divided over ranks (DeepSpeed's MoE)",
    r"^layer_\d+-model_": "a pipeline of stages",
    r"^zero$": "DeepSpeed's universal form",
    r"^offloaded_tensors$": "optimizer states on NVMe, copied as raw swap files",
}
#: An item, its dtype and shape, and where it is.
_Found = tuple[Item, torch.dtype, Iterable[int], "_Parts"]
#: The keys that DeepSpeed itself puts into a model file; all others are client state.
_OWN = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts", "ds_autoep_layers",
    "autoep_layers", "folding",
))  # fmt: skip


# -- files -----------------------------------------------------------------------------------------


def recognizes(path: Path | str) -> bool:
    """Whether `path` is a tag folder, or a folder with tag folders. Only file names are read."""
    path = Path(path)
    try:
        return _is_tag(path) or bool(_tags(path))
    except OSError:
        return False


def named_in(folder: Path) -> str | None:
    """Return the tag that the file `latest` in a folder names; None if there is no such file.
    Raises: CheckpointError: it cannot be read.
    """
    path = folder / LATEST
    try:
        return (
            read_bytes(path, 1 << 16).decode(errors="replace").strip() if path.is_file() else None
        )
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}): give a tag to choose a checkpoint."
        ) from None


def _is_tag(folder: Path) -> bool:
    return any(_FILE.match(file.name) for file in folder.iterdir())


def _tags(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and _is_tag(p))


def _chosen(path: Path) -> Path:
    """Return the tag folder: `path` itself, or one in it."""
    if _is_tag(path):
        return path
    tag = named_in(path) or ""
    if tag not in (tags := _tags(path)):
        raise CheckpointError(
            f"{path}: its file 'latest' names {tag!r}, but there is no such checkpoint in it. There"
            f" are: {', '.join(tags) or 'none'}."
        )
    return path / tag


def _files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of a tag folder in the order of ranks: {"model": [...], "optim": [...]}."""
    found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for path in sorted(folder.iterdir()):
        match = _FILE.match(path.name)
        kinds = (what for pattern, what in _OTHER_KINDS.items() if re.match(pattern, path.name))
        other = "a tensor- or pipeline-parallel run" if match and int(match["other"]) else None
        if what := next(kinds, other):
            raise CheckpointError(
                f"{folder} holds {what}, which cannot be read: only data-parallel checkpoints of ZeRO"
                " 1, 2 and 3 can be."
            )
        if (
            match
            and (there := found[match["kind"]].setdefault(int(match["rank"] or 0), path)) != path
        ):
            raise CheckpointError(
                f"{folder} holds two checkpoints in one: {there.name} and {path.name}. Remove the one"
                " that is not meant."
            )
    if not found["optim"]:
        raise CheckpointError(
            f"{folder} has no *_optim_states.pt: it was saved at stage 0, or its optimizer files"
            " were left out. Only checkpoints of the ZeRO stages 1, 2 and 3 are read; for weights"
            " alone, export them with DeepSpeed and load the safetensors."
        )
    for kind, files in found.items():
        if missing := set(range(max(files, default=0) + 1)) - set(files):
            raise CheckpointError(
                f"{folder} has no *_{kind}_states.pt of rank {min(missing)}: copy it whole."
            )
    return {kind: [files[rank] for rank in sorted(files)] for kind, files in found.items()}


# -- pickles ---------------------------------------------------------------------------------------


class Attributes:
    """The `__dict__` of an object of one of DeepSpeed's classes."""


class StageNumber(int):
    """A member of DeepSpeed's enumeration of stages."""


_lock = threading.Lock()  # torch has one list of safe classes for the whole process


def _safe() -> list[Any]:
    """Return what the safe unpickler may build beside tensors, numbers, text and containers:
    stand-ins for objects of DeepSpeed's classes, and what users put into client states, under the
    names that pickles of any numpy version use.
    """
    stand_ins = {
        "runtime.zero.config.ZeroStageEnum": StageNumber,
        "runtime.zero.constants.ZeroStageEnum": StageNumber,
        "runtime.fp16.loss_scaler.LossScaler": Attributes,
        "runtime.fp16.loss_scaler.DynamicLossScaler": Attributes,
        "utils.tensor_fragment.fragment_address": Attributes,
        "runtime.bf16_optimizer.fragment_address": Attributes,
    }
    makers: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
    numbers = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
    return [
        *((kind, f"deepspeed.{name}") for name, kind in stand_ins.items()),
        *(
            (m, f"numpy.{core}.multiarray.{m.__name__}")
            for core in ("core", "_core")
            for m in makers
        ),
        *{type(np.dtype(code)) for code in numbers},
        *(argparse.Namespace, np.ndarray, np.dtype),
    ]


def read_pickle(path: Path) -> Any:
    """Return the contents of a file of torch.save, read by torch's safe unpickler, which runs no code
    that a file names. Its tensors are memory-mapped on the host.

    Raises:
        CheckpointError: the file is missing or damaged, or has a class that cannot be read safely.
            The message names file and class.
    """
    with _lock, torch.serialization.safe_globals(_safe()):
        try:
            os.close(open_regular(path))  # torch would wait for a fifo
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
        except Exception as error:
            # torch raises errors of many kinds for a file that is truncated or not of torch.save
            try:
                names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            except Exception:
                names = []
            if not names:
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise CheckpointError(
                    f"{path} is damaged, or no file of torch.save: {first}"
                ) from None
            raise CheckpointError(
                f"{path} holds objects of {', '.join(names)}, and reading them would run code that"
                " the file names: it is refused. Save again with plain values (numbers, text, lists,"
                " dicts, tensors) in client_state. If these are classes of your own that you trust,"
                " call torch.serialization.add_safe_globals with them before you load."
            ) from None


# -- one rank's part of the optimizer --------------------------------------------------------------


class _Shard:
    """The optimizer file of one rank, in one form for all stages.

    | what              | stages 1, 2                                       | stage 3                        |
    |-------------------|---------------------------------------------------|--------------------------------|
    | masters           | single_partition_of_fp32_groups, without padding  | fp32_flat_groups               |
    | states, groups    | base_optimizer_state, padded                      | a nested optimizer_state_dict  |
    | elastic           | base_optimizer_state is a list, without groups    | does not exist                 |
    | no "zero_stage"   | stage 1, bf16 with fp32 sums                      |                                |

    Attributes:
        of: its stage, its number of ranks, and the step of each cell, the same in all files.
        cells: of each cell the optimizer's states, flat tensors and scalars; masters under "".
        groups: the options of each parameter group, with the indices of its cells under "params";
            empty if they were not saved.
        paddings: for each cell, the elements of padding after each parameter; None at stage 3, and
            if there is none.
        scaler: the attributes of DeepSpeed's loss scaler, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        saved = read_pickle(path)["optimizer_state_dict"]
        self.stage = int(saved.get("zero_stage", 1))
        counts = saved["partition_count"]
        # One number: experts, divided over other groups of ranks, are refused by their files
        (self.ranks,) = {
            int(n) for n in (counts if isinstance(counts, (list, tuple)) else [counts])
        }
        third = self.stage == 3
        masters = saved["fp32_flat_groups" if third else "single_partition_of_fp32_groups"]
        inner = saved["optimizer_state_dict" if third else "base_optimizer_state"]
        if not isinstance(inner, Mapping):
            inner = {"state": dict(enumerate(inner)), "param_groups": []}
        states, groups = inner["state"], inner["param_groups"]
        self.cells: list[dict[str, Any]] = []
        for i, master in enumerate(masters):
            # DeepSpeed's fused Adam keeps the count of steps in the group
            steps = (g["step"] for g in groups if i in g["params"] and "step" in g)
            step = next(steps, saved.get("base_optimizer_state_step"))
            known = states.get(i, {})
            given = {} if step is None or not known else {"step": step}
            self.cells.append({"": master, **given, **known})
        self.of = self.stage, self.ranks, [float(cell.get("step", 0)) for cell in self.cells]
        # Without what only DeepSpeed's own Adam has. torch's always corrects the bias
        self.groups = [
            {k: v for k, v in g.items() if k not in ("step", "bias_correction")} for g in groups
        ]
        self.paddings = None if third else saved.get("param_alignment_paddings")
        scaler = saved.get("loss_scaler")
        self.scaler = dict(vars(scaler)) if hasattr(scaler, "__dict__") else None

    def flat(self, cell: int, state: str) -> Tensor | None:
        """Return a state of a cell; None unless it has an element for each of its masters."""
        value, masters = self.cells[cell].get(state), self.cells[cell][""]
        there = isinstance(value, Tensor) and value.dim() > 0
        return value.detach().view(-1) if there and value.numel() >= masters.numel() else None  # type: ignore[union-attr]


# -- the source ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    """Where the elements of a tensor are: `each` of them in a part, one part on each rank.

    Attributes:
        of: returns a rank's tensor.
        each: the elements of a part.
        begin: where a part begins in each rank's tensor.
        before: the elements of the parts that precede the tensor's own.
    """

    of: Callable[[int], Any]
    each: int
    begin: int = 0
    before: int = 0

    def cut(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield views of the mapped files that make up elements `[start, stop)`, in order."""
        at, end = self.before + start, self.before + stop
        while at < end:
            rank, into = divmod(at, self.each)
            count = min(end - at, self.each - into)
            a = self.begin + into
            yield self.of(rank).detach().reshape(-1)[a : a + count]
            at += count


class DeepSpeedSource(Source):
    """A DeepSpeed checkpoint of ZeRO stage 1, 2 or 3, saved on any number of ranks.

    A trained parameter is read from its fp32 master weights. Frozen parameters and buffers are in
    the run's compute dtype. The files of other ranks than the first are opened when one of their
    elements is needed, and only the needed elements are read.

    Args:
        path: the folder that was given to DeepSpeed's `save_checkpoint`, or a tag folder in it.

    Attributes:
        folder: the tag folder.
        stage: 1, 2 or 3. ranks: data-parallel ranks.
        step, skipped, samples: optimizer steps, those skipped for an overflow among them, and
            samples of all ranks.
        scheduler: the state of the learning-rate schedule, or None.
        scaler: the attributes of the loss scaler (`cur_scale`, `cur_iter`, ...), or None.
        extra: the client state that the run gave to `save_checkpoint`.

    Raises:
        CheckpointError: parts are missing, damaged or contradictory, of a kind that cannot be read,
            or not safe to read.
    """

    form = "DeepSpeed"
    folder: Path

    def __init__(self, path: Path | str) -> None:
        self.folder = _chosen(Path(path))
        self.files = _files(self.folder)
        files = self.files
        self._model = cache(lambda rank: read_pickle(files["model"][rank]))
        self._optim = cache(lambda rank: _Shard(files["optim"][rank]))
        with self._worded():
            self._open()

    @contextlib.contextmanager
    def _worded(self) -> Iterator[None]:
        """Raise what other values than DeepSpeed's lead to as CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.folder} is no checkpoint of DeepSpeed's ZeRO as of version 0.19, or was not"
                f" copied whole: {type(error).__name__}: {error}."
            ) from None

    def _open(self) -> None:
        model, first = self._model(0), self._optim(0)
        self.stage, self.ranks = first.stage, first.ranks
        if self.ranks != len(self.files["optim"]):
            raise CheckpointError(
                f"{self.folder} was saved on {self.ranks} ranks, but has {len(self.files['optim'])}"
                " files *_optim_states.pt: some were not copied, or others were left by an earlier"
                " run that used the same tag."
            )
        self.step = int(model["global_steps"])
        self.skipped = int(model["skipped_steps"])
        self.samples = int(model.get("global_samples") or 0)
        # Copied, because a memory-mapped tensor changes or disappears with its file.
        self.scheduler: Mapping[str, Any] | None = copy.deepcopy(model.get("lr_scheduler"))
        self.scaler = first.scaler
        self.extra = copy.deepcopy({k: v for k, v in model.items() if k not in _OWN})
        self._first = first
        self._names = [list(named) for named in model["param_shapes"]]
        self._cell_of = {name: cell for cell, names in enumerate(self._names) for name in names}
        self._items: dict[Item, Stored] = {}
        self._parts: dict[Item, _Parts] = {}
        shared = model.get("shared_params") or {}
        for item, dtype, shape, parts in (*self._trained(model), *self._others(model, shared)):
            self._items[item], self._parts[item] = Stored(dtype, tuple(shape)), parts
        # DeepSpeed also lists all empty tensors as tied to each other
        stored = {item.name for item in self._items if item.kind == "parameter"}
        pairs = [(a, b) if b in stored else (b, a) for a, b in shared.items()]
        self._aliases = {a: b for a, b in pairs if b in stored and a not in stored}

    @property
    def describe(self) -> str:
        return (
            f"the DeepSpeed checkpoint {self.folder} (ZeRO-{self.stage}, {self.ranks} ranks, step"
            f" {self.step})"
        )

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read(self, item: Item, start: int, stop: int, out: Tensor) -> None:
        """Read elements into `out`; see `Source.read`. No other bytes of the files are read."""
        at, target = 0, out.view(-1)
        with self._worded():
            for found in self._parts[item].cut(start, stop):
                target[at : at + found.numel()].copy_(found)
                at += found.numel()
        if at != stop - start:
            raise CheckpointError(
                f"{self.describe} holds {at} of {stop - start} elements of {item}: the parameters"
                " were divided in a way that is not read, or the files are of different saves."
            )

    def scalars(self, name: str) -> Mapping[str, Any]:
        """Return a parameter's scalar states as torch keeps them: `step` is a tensor."""
        cell = self._cell_of.get(self.stored_name(name))
        states = {} if cell is None else self._first.cells[cell]
        return {
            key: torch.tensor(float(value), device="cpu") if key == "step" else copy.deepcopy(value)
            for key, value in states.items()
            if not isinstance(value, Tensor) or value.dim() == 0
        }

    def groups(self) -> list[list[dict[str, Any]]] | None:
        # An elastic checkpoint has the groups, but not their options
        groups = self._first.groups or [{"params": [i]} for i in range(len(self._names))]
        named = [[n for cell in sorted(g["params"]) for n in self._names[cell]] for g in groups]
        return [[{**g, "params": names} for g, names in zip(groups, named, strict=True)]]

    def close(self) -> None:
        """Release the files."""
        # Parts lead back to this object
        self._parts.clear()
        vars(self).pop("_first", None)
        self._optim.cache_clear()
        self._model.cache_clear()

    # -- what there is, and where ------------------------------------------------------------------

    def _trained(self, model: Mapping[str, Any]) -> Iterator[_Found]:
        """Yield master weights and states."""
        for cell, named in enumerate(model["param_shapes"]):
            third, at, states = self.stage == 3, 0, self._first.cells[cell]
            paddings = self._first.paddings[cell] if self._first.paddings else [0] * len(named)
            for (name, shape), padding in zip(named.items(), paddings, strict=True):
                each = self._share(shape)
                place = (each, at) if third else (states[""].numel(), 0, at)
                for state in states:
                    if (flat := self._first.flat(cell, state)) is not None:
                        item = Item("state" if state else "parameter", name, state)
                        of = partial(self._flat, cell, state)
                        yield item, flat.dtype, shape, _Parts(of, *place)
                at += (each if third else prod(shape)) + padding

    def _others(self, model: Mapping[str, Any], shared: Mapping[str, str]) -> Iterator[_Found]:
        """Yield buffers, and parameters outside the optimizer."""
        for name, value in model["module"].items():
            kind = "buffer" if name in model["buffer_names"] else "parameter"
            elsewhere = self.stage == 3 or name in self._cell_of or name.endswith("_extra_state")
            if not isinstance(value, Tensor) or (kind == "parameter" and elsewhere):
                continue
            if kind == "buffer" or name not in shared or not value.numel():
                of = partial(self._saved, "module", name)
                yield Item(kind, name), value.dtype, value.shape, _Parts(of, value.numel())
        frozen = model.get("frozen_param_shapes") if self.stage == 3 else None
        for name, shape in (frozen or {}).items():
            of = partial(self._saved, "frozen_param_fragments", name)
            yield Item("parameter", name), of(0).dtype, shape, _Parts(of, self._share(shape))

    def _share(self, shape: Iterable[int]) -> int:
        """Return each rank's elements of a tensor at stage 3, with padding."""
        return -(-prod(shape) // self.ranks)

    def _flat(self, cell: int, state: str, rank: int) -> Tensor | None:
        """Return a state of a cell, of a rank's file that fits the first rank's."""
        shard = self._optim(rank)
        if shard.of != self._first.of:
            raise CheckpointError(
                f"{shard.path} is of stage, ranks and steps {shard.of}, rank 0's file of"
                f" {self._first.of}: it belongs to another checkpoint."
            )
        return shard.flat(cell, state)

    def _saved(self, key: str, name: str, rank: int) -> Any:
        return self._model(rank)[key][name]


open_source = DeepSpeedSource
