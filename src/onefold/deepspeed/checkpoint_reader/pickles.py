"""Read DeepSpeed's files, which are pickles, with torch's safe unpickler only.

The safe unpickler runs no code that a file names. It builds:

- tensors, numbers, text and containers;
- `Attributes` in place of objects of DeepSpeed's own classes: their attributes, without their code;
- numpy's arrays and `argparse.Namespace`, which users put into client states.

Any other class raises an error that names it. Tensors are memory-mapped: their bytes are read from
the disk when they are used.
"""

from __future__ import annotations

import argparse
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.reading import open_regular


class Attributes:
    """The `__dict__` of an object of one of DeepSpeed's classes."""


class StageNumber(int):
    """A member of DeepSpeed's enumeration of stages."""


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
STAND_INS: list[tuple[type, str]] = [
    (StageNumber, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (StageNumber, "deepspeed.runtime.zero.constants.ZeroStageEnum"),
    (Attributes, f"{_SCALERS}.LossScaler"),
    (Attributes, f"{_SCALERS}.DynamicLossScaler"),
    (Attributes, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Attributes, "deepspeed.runtime.bf16_optimizer.fragment_address"),
]
_lock = threading.Lock()  # torch has one list of safe classes for the whole process


def _plain_values() -> list[tuple[Callable[..., Any], str]]:
    """Return value classes of the standard library and numpy, under the names that pickles of any
    numpy version use.
    """
    makers: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
    named: list[tuple[Callable[..., Any], str]] = [
        (argparse.Namespace, "argparse.Namespace"),
        (np.ndarray, "numpy.ndarray"),
        (np.dtype, "numpy.dtype"),
    ]
    named += [
        (make, f"numpy.{core}.multiarray.{make.__name__}")
        for core in ("core", "_core")
        for make in makers
    ]
    dtypes = {
        type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
    }
    return named + [(kind, f"numpy.dtypes.{kind.__name__}") for kind in dtypes]


def read_pickle(path: Path) -> Any:
    """Return the contents of a file of torch.save, with its tensors memory-mapped on the host.

    Raises:
        CheckpointError: the file is missing or damaged, or has a class that cannot be read safely.
            The message names file and class.
    """
    with _lock, torch.serialization.safe_globals([*STAND_INS, *_plain_values()]):
        try:
            os.close(open_regular(path))  # torch would wait for a fifo
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: a part of this DeepSpeed checkpoint was not copied, or never"
                " written."
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
        except pickle.UnpicklingError as error:
            raise CheckpointError(_refusal(path, error)) from None
        except Exception as error:
            # torch raises errors of many kinds for a file that is truncated or not of torch.save
            first = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise CheckpointError(f"{path} is damaged, or no file of torch.save: {first}") from None


def _refusal(path: Path, error: Exception) -> str:
    """Which classes stand in the way, and what can be done. Called while ours are listed as
    safe.
    """
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        names = []
    if not names:
        return (
            f"{path} cannot be read safely: {str(error).strip().splitlines()[-1]}. It is read by"
            " torch's safe unpickler or not at all."
        )
    return (
        f"{path} holds objects of {', '.join(names)}, and reading them would run code that the file"
        " names: it is refused. Save again with plain values (numbers, text, lists, dicts,"
        " tensors) in client_state. If these are classes of your own that you trust, say"
        f" torch.serialization.add_safe_globals([{', '.join(n.rpartition('.')[2] for n in names)}])"
        " before you load."
    )
