"""Read a column of Parquet and Arrow files, and of the hub's datasets, as documents: `datasets` reads
them. This module chooses the column and checks its values. It does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onefold.wording import TrainError, did_you_mean

#: (kind, a document or a piece of one, whether the document ends with it).
Row = tuple[str, Any, bool]
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/([\w.+-]+))?(?::(\S+))?")


@dataclass(frozen=True)
class HubData:
    """A dataset of the hub: the arguments of `datasets.load_dataset(path, config, split=split)`.

    org/name        org/name/CONFIG        org/name:SPLIT        org/name/CONFIG:SPLIT
    """

    path: str
    config: str | None
    split: str

    @classmethod
    def of(cls, name: str) -> HubData | None:
        """Parse a name. Returns None if it cannot be the name of a dataset."""
        found = _HUB.fullmatch(name)
        return cls(found[1], found[2], found[3] or "train") if found else None

    @property
    def is_whole(self) -> bool:
        """Whether the split is a plain name. Slices and sums of splits cannot be streamed."""
        return not set("[+") & set(self.split)


def column_of(where: str, what: str, there: list[str], field: str | None) -> str:
    """Return the key or column to read. Raises TrainError if it does not exist."""
    if field is not None:
        if field not in there:
            raise TrainError(
                f"{where} has no {what} {field!r}, which --text-field names."
                f" {did_you_mean(field, there) if there else 'It has none.'}"
            )
        return field
    found = next((name for name in ("messages", "text") if name in there), "")
    if not found:
        more = " Name one with --text-field." if there else ""
        raise TrainError(
            f"{where} expected a {what} `text` or `messages`, found {', '.join(there) or 'none'}.{more}"
        )
    return found


def kind_of_value(where: str, key: str, value: Any) -> str:
    """Return the kind of a value, "text" or "messages". Raises TrainError if it is neither."""
    if isinstance(value, str) and key != "messages":
        return "text"
    if key != "text" and _are_messages(value):
        return "messages"
    kinds = {"text": "a string", "messages": 'a list of {"role": ..., "content": ...}'}
    raise TrainError(f"{where} `{key}` must be {kinds.get(key, ' or '.join(kinds.values()))}.")


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )


NEEDED = "--data {} needs: pip install datasets."


def table_rows(path: Path, field: str | None) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file, which is decoded in batches."""
    how = {"data_files": str(path), "split": "train", "streaming": True}
    return _rows(str(path), "", field, path.suffix.lower().removeprefix("."), **how)


def dataset_rows(name: str, hub: HubData, field: str | None) -> Iterator[Row]:
    """Yield the rows of a dataset of the hub. `name`: how `--data` calls it."""
    # Offline: read the cache. Online: stream, which stores nothing on disk.
    how = {"split": hub.split, "streaming": hub.is_whole and not is_offline()}
    return _rows(name, "no such file or folder, and ", field, hub.path, hub.config, **how)


def _rows(name: str, missing: str, field: str | None, *what: Any, **how: Any) -> Iterator[Row]:
    """Yield the rows of what `datasets.load_dataset(*what, **how)` opens, as documents."""
    if importlib.util.find_spec("datasets") is None:
        raise TrainError(NEEDED.format(name))
    datasets: Any = importlib.import_module("datasets")
    where = f"--data {name}:"
    try:
        found = datasets.load_dataset(*what, **how)
        column = column_of(where, "column", list(found.column_names or next(iter(found))), field)
        for number, row in enumerate(found.select_columns([column])):
            if (value := row[column]) is not None:
                yield kind_of_value(f"{where} row {number}:", column, value), value, True
    except TrainError:
        raise
    except Exception as error:  # any error of a file, the network, the hub or a loading script
        # ValueError: a configuration or split is missing or unknown; the error lists the known ones
        hint = " Name one as org/name/CONFIG:SPLIT." if isinstance(error, ValueError) else ""
        raise TrainError(
            f"{where} {missing}`datasets` cannot open it"
            f" ({' '.join(str(error).split())[:300]}).{hint if missing else ''}"
        ) from error


def check_hub_data(name: str, hub: HubData) -> None:
    """Raise TrainError if the dataset is not cached and must not be downloaded."""
    if importlib.util.find_spec("datasets") is None:
        raise TrainError(NEEDED.format(name))
    if not is_offline():
        return
    from huggingface_hub import constants

    home = Path(os.environ.get("HF_HOME", constants.HF_HOME))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    folder = hub.path.replace("/", "___")
    places = (
        prepared / folder.lower() / (hub.config or ""),
        prepared / folder / (hub.config or ""),
        Path(constants.HF_HUB_CACHE) / f"datasets--{hub.path.replace('/', '--')}",
    )
    if not any(place.is_dir() for place in places):
        raise TrainError(
            f"--data {name}: no such file or folder, and no such dataset in the cache of `datasets`"
            f" ({prepared}); HF_HUB_OFFLINE is set, so it is not downloaded. Unset it, or name a"
            " file."
        )


def is_offline() -> bool:
    """Return whether the user has forbidden the hub's library to use the network."""
    said = {os.environ.get(n, "").upper() for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    return bool(said & {"1", "ON", "YES", "TRUE"})
