"""A DeepSpeed checkpoint as a `Source`: names and shapes are read at once, elements on demand."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.source import Item, Source, Stored
from onefold.deepspeed.checkpoint_reader.folder import find
from onefold.deepspeed.checkpoint_reader.layout import (
    CutsOfEach,
    EqualCuts,
    Place,
    lay_out,
)
from onefold.deepspeed.checkpoint_reader.pickles import read_pickle
from onefold.deepspeed.checkpoint_reader.shard import Shard, read_shard

#: The keys that DeepSpeed itself puts into a model file; all others are client state.
OWN_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
        "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts", "ds_autoep_layers",
        "autoep_layers", "folding",
    }
)  # fmt: skip
NEEDED = (
    "module",
    "param_shapes",
    "buffer_names",
    "global_steps",
    "skipped_steps",
    "dp_world_size",
)


@dataclass(frozen=True)
class Counts:
    """How far the run was.

    Attributes:
        steps: optimizer steps, including those skipped for an overflow.
        skipped: the skipped steps.
        samples: samples of all ranks.
        ranks: data-parallel ranks.
    """

    steps: int
    skipped: int
    samples: int
    ranks: int


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
        stage: 1, 2 or 3.
        counts: how far the run was.
        step: the run's optimizer steps.
        scheduler: the state of the learning-rate schedule, or None.
        scaler: the attributes of the loss scaler (`cur_scale`, `cur_iter`, ...), or None. A dynamic
            scaler's attributes are included under torch's names as well.
        extra: the client state that the run gave to `save_checkpoint`.
        config: the run's DeepSpeed configuration, as it was given.
        version: the version of DeepSpeed.
        unread: descriptions of what is in the checkpoint but cannot be loaded.

    Raises:
        CheckpointError: parts are missing, damaged or contradictory, of a kind that cannot be read,
            or not safe to read.
    """

    form = "DeepSpeed"

    def __init__(self, path: Path | str, tag: str | None = None) -> None:
        self.files = find(path, tag)
        self.folder = self.files.tag
        try:
            self._open()
        except CheckpointError:
            raise
        except Exception as error:  # whatever values of other kinds than DeepSpeed's lead to
            raise CheckpointError(
                f"{self.folder} is no checkpoint of DeepSpeed's ZeRO as of version 0.19:"
                f" {type(error).__name__}: {error}."
            ) from None

    def _open(self) -> None:
        self._shards: dict[int, Shard] = {}
        self._models: dict[int, Mapping[str, Any]] = {}
        first, model = read_shard(self.files.shards[0]), self._model(0)
        self.stage, self.ranks = first.stage, first.ranks
        self._check_count()
        self.counts = Counts(
            int(model["global_steps"]),
            int(model["skipped_steps"]),
            int(model.get("global_samples") or 0),
            int(model["dp_world_size"]),
        )
        self.step = self.counts.steps
        # Copied, because a memory-mapped tensor changes or disappears with its file.
        self.scheduler: Mapping[str, Any] | None = copy.deepcopy(model.get("lr_scheduler"))
        self.scaler = as_torch_names_it(first.scaler)
        self.config, self.version = model.get("ds_config"), str(model.get("ds_version"))
        self.extra = copy.deepcopy(
            {key: value for key, value in model.items() if key not in OWN_KEYS}
        )
        self.unread: list[str] = []
        if any(group.get("bias_correction") is False for group in first.groups or ()):
            self.unread.append(
                "bias_correction=False, without which torch's Adam cannot do: its steps will be of"
                " other sizes"
            )

        self._names = [list(named) for named in model["param_shapes"]]
        self._places, self._used = lay_out(
            model["param_shapes"], self.ranks, self.stage == 3, first.paddings
        )
        self._cuts = (
            CutsOfEach(self.ranks)
            if self.stage == 3
            else EqualCuts([m.numel() for m in first.masters], self.ranks)
        )
        self._first = self._shards[0] = self._checked(first, 0)
        self._frozen = self._frozen_places(model)
        self._aliases = self._tied(model)
        self._items = dict(self._list(model))

    @property
    def describe(self) -> str:
        return (
            f"the DeepSpeed checkpoint {self.folder} (ZeRO-{self.stage}, {self.ranks} ranks, step"
            f" {self.counts.steps})"
        )

    @property
    def frozen_names(self) -> frozenset[str]:
        """The names of parameters that took no gradient."""
        return frozenset(self._frozen)

    # -- the protocol ------------------------------------------------------------------------------

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        """Read elements into `out`; see `Source.read`. No other bytes of the files are read."""
        stored = self._items.get(item)
        if stored is None:
            raise CheckpointError(f"{self.describe} holds no {item}.")
        if not 0 <= start <= stop <= prod(stored.shape) or out.numel() != stop - start:
            raise CheckpointError(
                f"{item} has {prod(stored.shape)} elements; [{start}, {stop}) into {out.numel()}"
                " was asked for."
            )
        at, target = 0, out.view(-1)
        for found in self._elements(item, start, stop):
            target[at : at + found.numel()].copy_(found)
            at += found.numel()

    def scalars(self, name: str) -> Mapping[str, Any]:
        """Return a parameter's scalar states as torch keeps them: `step` is a tensor."""
        place = self._places.get(self._aliases.get(name, name))
        if place is None:
            return {}
        return {
            key: (
                torch.tensor(float(value), device="cpu")
                if key == "step"
                else value.clone()
                if isinstance(value, torch.Tensor)
                else value
            )
            for key, value in self._first.states[place.cell].items()
            if not isinstance(value, torch.Tensor) or value.dim() == 0
        }

    def groups(self) -> list[list[dict[str, Any]]] | None:
        options = self._first.groups
        if options is None:  # an elastic checkpoint has the groups, but not their options
            return [[{"params": names} for names in self._names]]
        return [
            [
                {
                    **group,
                    "params": [
                        name for cell in sorted(group["params"]) for name in self._names[cell]
                    ],
                }
                for group in options
            ]
        ]

    def close(self) -> None:
        """Release the files."""
        self._shards.clear()
        self._models.clear()

    # -- finding elements --------------------------------------------------------------------------

    def _elements(self, item: Item, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield views of the mapped files that make up elements `[start, stop)`, in order."""
        if item.kind != "buffer" and item.name in self._places:
            place = self._places[item.name]
            for part in self._cuts.parts(place, start, stop):
                yield self._shard(part.rank).flat(place.cell, item.state)[part.begin : part.end]
        elif item.kind == "buffer" or (frozen := self._frozen[item.name]) is None:
            yield self._module_tensor(item.name).reshape(-1)[start:stop]
        else:
            for part in CutsOfEach(self.ranks).parts(frozen, start, stop):
                yield self._fragment(part.rank, item.name)[part.begin : part.end]

    def _module_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._model(0)["module"][name]
        return tensor.detach()

    def _fragment(self, rank: int, name: str) -> torch.Tensor:
        fragment = (self._model(rank).get("frozen_param_fragments") or {}).get(name)
        if not isinstance(fragment, torch.Tensor):
            raise CheckpointError(
                f"{self.files.models[rank]} has no part of the frozen parameter {name!r}, which"
                " rank 0's file lists."
            )
        return fragment.detach().view(-1)

    def _model(self, rank: int) -> Mapping[str, Any]:
        if rank not in self._models:
            if rank >= len(self.files.models):
                raise CheckpointError(
                    f"{self.folder} has no model file of rank {rank} (*_model_states.pt): copy it"
                    " whole."
                )
            path = self.files.models[rank]
            contents = read_pickle(path)
            missing = (
                [key for key in NEEDED if key not in contents]
                if isinstance(contents, Mapping)
                else list(NEEDED)
            )
            if missing or contents["param_shapes"] is None:
                what = (
                    f"has no {', '.join(missing)}"
                    if missing
                    else "was saved without a ZeRO optimizer"
                )
                raise CheckpointError(
                    f"{path} is no model file of a ZeRO run of DeepSpeed 0.19: it {what}."
                )
            self._models[rank] = contents
        return self._models[rank]

    def _shard(self, rank: int) -> Shard:
        if rank not in self._shards:
            self._shards[rank] = self._checked(read_shard(self.files.shards[rank]), rank)
        return self._shards[rank]

    # -- what must fit -----------------------------------------------------------------------------

    def _check_count(self) -> None:
        if self.ranks != len(self.files.shards):
            raise CheckpointError(
                f"{self.folder} was saved on {self.ranks} ranks, but has {len(self.files.shards)}"
                " files *_optim_states.pt: some were not copied, or others were left by an earlier"
                " run that used the same tag."
            )

    def _checked(self, shard: Shard, rank: int) -> Shard:
        """Return `shard` if it fits as that of `rank`, or raise CheckpointError."""
        if (shard.stage, shard.ranks, len(shard.masters)) != (
            self.stage,
            self.ranks,
            len(self._used),
        ):
            raise CheckpointError(
                f"{shard.path} is of stage {shard.stage} on {shard.ranks} ranks with"
                f" {len(shard.masters)} flat tensors; expected stage {self.stage}, {self.ranks}"
                f" ranks, {len(self._used)}: it belongs to another checkpoint."
            )
        for cell, used in enumerate(self._used):
            least, there = self._cuts.least(cell, rank, used), shard.masters[cell].numel()
            if there < least:
                raise CheckpointError(
                    f"{shard.path} holds {there} elements of the optimizer's flat tensor {cell},"
                    f" expected {least} or more: the parameters were divided in a way that is not"
                    " read (NVMe offload, MiCS), or the files are of different saves."
                )
            step = shard.states[cell].get("step")
            expected = self._first.states[cell].get("step") if rank else step
            if step is not None and expected is not None and float(step) != float(expected):
                raise CheckpointError(
                    f"{shard.path} is of step {float(step):g}, rank 0's file of step"
                    f" {float(expected):g}: two saves are mixed up."
                )
        return shard

    # -- what there is -----------------------------------------------------------------------------

    def _frozen_places(self, model: Mapping[str, Any]) -> dict[str, Place | None]:
        """Return the places of parameters outside the optimizer.

        None in place of a place means that the module has the whole tensor, as at stages 1 and 2.
        """
        if self.stage == 3:
            shapes: Mapping[str, Any] = model.get("frozen_param_shapes") or {}
            return {name: Place(-1, 0, prod(shape), tuple(shape)) for name, shape in shapes.items()}
        tensors = {
            name: t
            for name, t in model["module"].items()
            if isinstance(t, torch.Tensor) and not name.endswith("_extra_state")
        }
        tied = {
            name
            for name in model.get("shared_params") or {}
            if name in tensors and tensors[name].numel()
        }
        return {
            name: None
            for name in tensors
            if name not in {*self._places, *model["buffer_names"], *tied}
        }

    def _tied(self, model: Mapping[str, Any]) -> dict[str, str]:
        """Return {other name: stored name} of tied parameters.

        DeepSpeed also lists all empty tensors as tied to each other. These are left out.
        """
        stored = {*self._places, *self._frozen}
        pairs = [
            (a, b) if b in stored else (b, a) for a, b in (model.get("shared_params") or {}).items()
        ]
        return {a: b for a, b in pairs if b in stored and a not in stored}

    def _list(self, model: Mapping[str, Any]) -> Iterator[tuple[Item, Stored]]:
        for name, place in self._places.items():
            yield (
                Item("parameter", name),
                Stored(self._first.masters[place.cell].dtype, place.shape),
            )
            for state, value in self._first.states[place.cell].items():
                if self._first.is_flat(place.cell, state):
                    yield Item("state", name, state), Stored(value.dtype, place.shape)
                elif isinstance(value, torch.Tensor) and value.dim() and place.begin == 0:
                    self.unread.append(
                        f"the state {state!r} of the optimizer's flat tensor {place.cell}, which"
                        " does not run along its parameters"
                    )
        for name, frozen in self._frozen.items():
            tensor = self._module_tensor(name) if frozen is None else self._fragment(0, name)
            yield (
                Item("parameter", name),
                Stored(tensor.dtype, tuple(tensor.shape) if frozen is None else frozen.shape),
            )
        for name in model["buffer_names"]:
            if isinstance(buffer := model["module"].get(name), torch.Tensor):
                yield Item("buffer", name), Stored(buffer.dtype, tuple(buffer.shape))


def as_torch_names_it(scaler: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Add the entries of `torch.amp.GradScaler` to a dynamic scaler's state.

    Hysteresis gets no such entry, because torch's scaler has none.
    """
    if (
        scaler is None
        or not {"cur_iter", "scale_factor", "scale_window", "last_overflow_iter"} <= scaler.keys()
    ):
        return dict(scaler) if scaler is not None else None
    window, factor = int(scaler["scale_window"]), float(scaler["scale_factor"])
    since = int(scaler["cur_iter"]) - int(scaler["last_overflow_iter"]) - 1
    names = {
        "scale": scaler["cur_scale"],
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "growth_interval": window,
    }
    return {**scaler, **names, "_growth_tracker": max(0, since) % window}
