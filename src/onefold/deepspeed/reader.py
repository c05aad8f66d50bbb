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
from collections.abc import Iterator, Mapping
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
#: What a folder may hold that cannot be read, by names of files.
_OTHER_KINDS = {
    r"^(layer_\d+_)?expert_\d+_": "experts divided over ranks (DeepSpeed's MoE)",
    r"^layer_\d+-model_": "a pipeline of stages",
    r"^zero$": "DeepSpeed's universal form",
    r"^offloaded_tensors$": "optimizer states on NVMe, copied as raw swap files",
}
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
        if not path.is_dir() or (path / "manifest.json").exists():
            return False
        return _is_tag(path) or bool(_tags(path))
    except OSError:
        return False


def named_in(latest: Path) -> str:
    """Return the tag that a file `latest` names. Raises: OSError."""
    return read_bytes(latest, 1 << 16).decode(errors="replace").strip()


def _is_tag(folder: Path) -> bool:
    return any(_FILE.match(file.name) for file in folder.iterdir())


def _tags(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and _is_tag(p))


def _chosen(path: Path, tag: str | None) -> Path:
    """Return the tag folder: `path` itself, or one in it."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder: give the one that was given to DeepSpeed's save_checkpoint."
        )
    if tag is None and _is_tag(path):
        return path
    who = f"the tag {tag!r} was given"
    if tag is None:
        tag = named_in(path / "latest") if (path / "latest").is_file() else ""
        who = f"its file 'latest' names {tag!r}"
    if tag not in (tags := _tags(path)):
        raise CheckpointError(
            f"{path}: {who}, but there is no such checkpoint in it. There are:"
            f" {', '.join(tags) or 'none'}."
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
        cells: of each cell the optimizer's states, flat tensors and scalars; masters under "".
        groups: the options of each parameter group, with the indices of its cells under "params";
            None if they were not saved.
        paddings: for each cell, the elements of padding after each parameter.
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
        listed = not isinstance(inner, Mapping)
        states: Any = dict(enumerate(inner)) if listed else inner["state"]
        groups: Any = None if listed else inner["param_groups"]
        self.cells: list[dict[str, Any]] = []
        for i, master in enumerate(masters):
            # DeepSpeed's fused Adam keeps the count of steps in the group
            steps = (g["step"] for g in groups or () if i in g["params"] and "step" in g)
            step = next(steps, saved.get("base_optimizer_state_step"))
            known = states.get(i, {})
            given = {} if step is None or not known else {"step": step}
            self.cells.append({"": master, **given, **known})
        # Without what only DeepSpeed's own Adam has. torch's always corrects the bias
        self.groups = groups and [
            {k: v for k, v in g.items() if k not in ("step", "bias_correction")} for g in groups
        ]
        self.paddings = saved.get("param_alignment_paddings")
        scaler = saved.get("loss_scaler")
        self.scaler = dict(vars(scaler)) if hasattr(scaler, "__dict__") else None

    def flat(self, cell: int, state: str) -> Tensor | None:
        """Return a state of a cell; None unless it has an element for each of its masters."""
        value, masters = self.cells[cell].get(state), self.cells[cell][""]
        there = isinstance(value, Tensor) and value.dim() > 0
        return value.detach().view(-1) if there and value.numel() >= masters.numel() else None  # type: ignore[union-attr]


# -- the source ------------------------------------------------------------------------------------


class DeepSpeedSource(Source):
    """A DeepSpeed checkpoint of ZeRO stage 1, 2 or 3, saved on any number of ranks.

    A trained parameter is read from its fp32 master weights. Frozen parameters and buffers are in
    the run's compute dtype. The files of other ranks than the first are opened when one of their
    elements is needed, and only the needed elements are read.

    Args:
        path: the folder that was given to DeepSpeed's `save_checkpoint`, or a tag folder in it.
        tag: the tag folder's name in `path`; None takes the one that the file `latest` names.

    Attributes:
        folder: the tag folder.
        stage: 1, 2 or 3. ranks: data-parallel ranks.
        steps, skipped, samples: optimizer steps, those skipped for an overflow among them, and
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

    def __init__(self, path: Path | str, tag: str | None = None) -> None:
        self.folder = _chosen(Path(path), tag)
        self.files = _files(self.folder)
        self._shards: dict[int, _Shard] = {}
        self._models: dict[int, Mapping[str, Any]] = {}
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
        model, first = self._model(0), _Shard(self.files["optim"][0])
        self.stage, self.ranks = first.stage, first.ranks
        if self.ranks != len(self.files["optim"]):
            raise CheckpointError(
                f"{self.folder} was saved on {self.ranks} ranks, but has {len(self.files['optim'])}"
                " files *_optim_states.pt: some were not copied, or others were left by an earlier"
                " run that used the same tag."
            )
        self.step = self.steps = int(model["global_steps"])
        self.skipped = int(model["skipped_steps"])
        self.samples = int(model.get("global_samples") or 0)
        # Copied, because a memory-mapped tensor changes or disappears with its file.
        self.scheduler: Mapping[str, Any] | None = copy.deepcopy(model.get("lr_scheduler"))
        self.scaler = first.scaler
        self.extra = copy.deepcopy({k: v for k, v in model.items() if k not in _OWN})
        self._names = [list(named) for named in model["param_shapes"]]
        self._first = self._shards[0] = first
        #: {name: (cell, first element in the group or in each rank's cell, shape)}
        self._places = dict(self._lay_out(model["param_shapes"]))
        self._frozen = self._frozen_shapes(model)
        # DeepSpeed also lists all empty tensors as tied to each other
        stored, shared = {*self._places, *self._frozen}, model.get("shared_params") or {}
        pairs = [(a, b) if b in stored else (b, a) for a, b in shared.items()]
        self._aliases = {a: b for a, b in pairs if b in stored and a not in stored}
        self._items = dict(self._list(model))

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
            for found in self._elements(item, start, stop):
                target[at : at + found.numel()].copy_(found)
                at += found.numel()
        if at != stop - start:
            raise CheckpointError(
                f"{self.describe} holds {at} of {stop - start} elements of {item}: the parameters"
                " were divided in a way that is not read, or the files are of different saves."
            )

    def scalars(self, name: str) -> Mapping[str, Any]:
        """Return a parameter's scalar states as torch keeps them: `step` is a tensor."""
        place = self._places.get(self._aliases.get(name, name))
        cell = {} if place is None else self._first.cells[place[0]]
        return {
            key: torch.tensor(float(value), device="cpu") if key == "step" else copy.deepcopy(value)
            for key, value in cell.items()
            if not isinstance(value, Tensor) or value.dim() == 0
        }

    def groups(self) -> list[list[dict[str, Any]]] | None:
        # An elastic checkpoint has the groups, but not their options
        groups = self._first.groups or [{"params": [i]} for i in range(len(self._names))]
        named = [[n for cell in sorted(g["params"]) for n in self._names[cell]] for g in groups]
        return [[{**g, "params": names} for g, names in zip(groups, named, strict=True)]]

    def close(self) -> None:
        """Release the files."""
        self._shards.clear()
        self._models.clear()

    # -- finding elements --------------------------------------------------------------------------

    def _lay_out(self, shapes: Any) -> Iterator[tuple[str, tuple[int, int, tuple[int, ...]]]]:
        paddings = None if self.stage == 3 else self._first.paddings
        for cell, named in enumerate(shapes):
            behind, at = paddings[cell] if paddings else [0] * len(named), 0
            for (name, shape), padding in zip(named.items(), behind, strict=True):
                yield name, (cell, at, tuple(shape))
                at += (-(-prod(shape) // self.ranks) if self.stage == 3 else prod(shape)) + padding

    def _elements(self, item: Item, start: int, stop: int) -> Iterator[Tensor]:
        """Yield views of the mapped files that make up elements `[start, stop)`, in order."""
        if item.kind != "buffer" and item.name in self._places:
            cell, begin, shape = self._places[item.name]
            if self.stage == 3:
                cuts = _cuts(begin, -(-prod(shape) // self.ranks), start, stop)
            else:
                each = self._first.cells[cell][""].numel()
                cuts = _cuts(0, each, begin + start, begin + stop)
            for rank, a, b in cuts:
                flat: Any = self._shard(rank).flat(cell, item.state)
                yield flat[a:b]
        elif item.kind == "buffer" or self.stage < 3:
            yield self._model(0)["module"][item.name].detach().reshape(-1)[start:stop]
        else:
            each = -(-prod(self._frozen[item.name]) // self.ranks)
            for rank, a, b in _cuts(0, each, start, stop):
                yield self._model(rank)["frozen_param_fragments"][item.name].detach().view(-1)[a:b]

    def _model(self, rank: int) -> Mapping[str, Any]:
        if rank not in self._models:
            self._models[rank] = read_pickle(self.files["model"][rank])
        return self._models[rank]

    def _shard(self, rank: int) -> _Shard:
        """Return the optimizer file of a rank, which fits the first rank's."""
        if rank not in self._shards:
            shard = _Shard(self.files["optim"][rank])
            mine, theirs = (
                (of.stage, of.ranks, [float(cell.get("step", 0)) for cell in of.cells])
                for of in (shard, self._first)
            )
            if mine != theirs:
                raise CheckpointError(
                    f"{shard.path} is of stage, ranks and steps {mine}, rank 0's file of {theirs}: it"
                    " belongs to another checkpoint."
                )
            self._shards[rank] = shard
        return self._shards[rank]

    # -- what there is -----------------------------------------------------------------------------

    def _frozen_shapes(self, model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of parameters outside the optimizer."""
        if self.stage == 3:
            shapes = model.get("frozen_param_shapes") or {}
            return {name: tuple(shape) for name, shape in shapes.items()}
        shared = model.get("shared_params") or {}
        return {
            name: tuple(t.shape)
            for name, t in model["module"].items()
            if isinstance(t, Tensor)
            and not name.endswith("_extra_state")
            and name not in {*self._places, *model["buffer_names"]}
            and not (name in shared and t.numel())
        }

    def _list(self, model: Mapping[str, Any]) -> Iterator[tuple[Item, Stored]]:
        for name, (cell, _, shape) in self._places.items():
            for state in self._first.cells[cell]:
                if (flat := self._first.flat(cell, state)) is not None:
                    kind = "state" if state else "parameter"
                    yield Item(kind, name, state), Stored(flat.dtype, shape)
        parts = model["module"] if self.stage < 3 else model.get("frozen_param_fragments") or {}
        for name, shape in self._frozen.items():
            yield Item("parameter", name), Stored(parts[name].dtype, shape)
        for name in model["buffer_names"]:
            if isinstance(buffer := model["module"].get(name), Tensor):
                yield Item("buffer", name), Stored(buffer.dtype, tuple(buffer.shape))


def _cuts(begin: int, each: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, a, b): elements `[start, stop)` of what is cut into parts of `each` are elements
    `[a, b)` of the ranks' cells, where the part begins at `begin`.
    """
    while start < stop:
        rank = start // each
        upto = min(stop, (rank + 1) * each)
        yield rank, begin + start - rank * each, begin + upto - rank * each
        start = upto


open_source = DeepSpeedSource
