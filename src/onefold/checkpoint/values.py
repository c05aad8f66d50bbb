"""Convert Python values to JSON and back, without pickle: the state of schedulers, scalers and data
loaders, and the user's `extra`.

| value                                  | in JSON                                                    |
|----------------------------------------|------------------------------------------------------------|
| None, bool, int, finite float, str, list | itself                                                   |
| dict with plain string keys            | an object                                                  |
| any other dict, tuple, set, Counter    | {"$dict": [[k, v], ...]}, {"$tuple": [...]}, ...           |
| nan, inf                               | {"$float": "nan"}                                          |
| bytes, complex, torch.dtype, device, Path | {"$bytes": base64}, ...                                 |
| tensor or array up to INLINE bytes     | {"$tensor": {dtype, shape, data: base64}}                  |
| a larger one                           | {"$tensor": {"stored": number}}: `keep` stores the tensor  |

Other values are refused, with a message that says where the value was found.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.tensorfile import CODES, DTYPES, bytes_of

#: Tensors up to this size in bytes are stored in the JSON file itself.
INLINE = 16 << 10

_Convert = Callable[[Any], Any]
#: Types stored as one tagged JSON value: (types, tag, to JSON, from JSON).
_SIMPLE: list[tuple[type | tuple[type, ...], str, _Convert, _Convert]] = [
    ((bytes, bytearray), "$bytes", lambda v: base64.b64encode(bytes(v)).decode(), base64.b64decode),
    (complex, "$complex", lambda v: [v.real, v.imag], lambda v: complex(*v)),
    (torch.dtype, "$dtype", lambda v: str(v).removeprefix("torch."), lambda v: getattr(torch, v)),
    (torch.device, "$device", str, torch.device),
    (PurePath, "$path", str, PurePath),
]
#: For each tag, the function that makes the value from the decoded JSON.
_READ: dict[str, Any] = {
    "$float": float, "$tuple": tuple, "$set": set, "$dict": dict, "$counter": lambda v: Counter(dict(v)),
} | {tag: read for _, tag, _, read in _SIMPLE}  # fmt: skip

Keep = Callable[[torch.Tensor], int]
Fetch = Callable[[int], torch.Tensor]


def encode(value: Any, where: str, keep: Keep | None = None) -> Any:
    """Return `value` as JSON.

    Args:
        where: what messages call the value.
        keep: stores a large tensor and returns its number.

    Raises:
        CheckpointError: only pickle could store the value.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, (float, int)) and not isinstance(value, np.generic):
        number = value if isinstance(value, int) else float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _encode_array(value, where, keep)
    if isinstance(value, dict):
        return _encode_dict(value, where, keep)
    if isinstance(value, list):
        return [encode(v, f"{where}[{i}]", keep) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, f"{where}[{i}]", keep) for i, v in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        return {"$set": [encode(v, f"{where}{{}}", keep) for v in sorted(value, key=repr)]}
    for kind, name, write, _ in _SIMPLE:
        if isinstance(value, kind):
            return {name: write(value)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which only pickle could"
        " store, and a checkpoint holds no pickle. Give its numbers instead (a dict, a list,"
        " tensors), for instance its state_dict()."
    )


def _encode_dict(value: dict[Any, Any], where: str, keep: Keep | None) -> Any:
    if type(value) is not Counter and all(type(k) is str and not k.startswith("$") for k in value):
        return {k: encode(v, f"{where}[{k!r}]", keep) for k, v in value.items()}
    pairs = [
        [encode(k, f"a key of {where}", keep), encode(v, f"{where}[{k!r}]", keep)]
        for k, v in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def _encode_array(value: Any, where: str, keep: Keep | None) -> Any:
    array = not isinstance(value, torch.Tensor)
    try:
        if array:
            tensor = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
        else:
            tensor = value.detach().resolve_conj().cpu().contiguous()
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        what = "array" if array else f"tensor ({value.layout}, {value.device})"
        raise CheckpointError(
            f"{where} is an {what} of {value.dtype}, which cannot be stored; give a plain one of"
            " numbers."
        ) from None
    if tensor.dtype not in CODES:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.dtype}, which cannot be stored; known are"
            f" {', '.join(DTYPES)}."
        )
    name = ("$scalar" if isinstance(value, np.generic) else "$array") if array else "$tensor"
    if tensor.numel() * tensor.element_size() > INLINE and keep is not None:
        return {name: {"stored": keep(tensor)}}
    data = base64.b64encode(bytes_of(tensor)).decode()
    return {name: {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data": data}}


def decode(value: Any, fetch: Fetch | None = None) -> Any:
    """Return the value that `encode` was given. `fetch`: returns a stored tensor by its number."""
    if isinstance(value, list):
        return [decode(v, fetch) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (name := next(iter(value))).startswith("$"):
        return {k: decode(v, fetch) for k, v in value.items()}
    return _decode_tagged(name, value[name], fetch)


def _decode_tagged(name: str, inner: Any, fetch: Fetch | None) -> Any:
    if name in ("$tensor", "$array", "$scalar"):
        tensor = _decode_tensor(inner, fetch)
        if name == "$tensor":
            return tensor
        return tensor.numpy() if name == "$array" else tensor.numpy()[()]
    if name not in _READ:
        raise CheckpointError(
            f"the checkpoint holds a value of the kind {name!r}, which this version of Onefold does"
            " not know."
        )
    return _READ[name](decode(inner, fetch))


def _decode_tensor(inner: dict[str, Any], fetch: Fetch | None) -> torch.Tensor:
    if "stored" in inner:
        if fetch is None:
            raise CheckpointError(
                f"tensor number {inner['stored']} of the checkpoint was asked for without its"
                " files."
            )
        return fetch(inner["stored"])
    tensor = torch.empty(inner["shape"], dtype=DTYPES[inner["dtype"]], device="cpu")
    data = base64.b64decode(inner["data"])
    if tensor.numel():
        bytes_of(tensor)[:] = data
    return tensor
