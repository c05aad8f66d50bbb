"""Convert Python values to JSON and back, without pickle: the state of schedulers, scalers and data
loaders, and the user's `extra`.

| value                                  | in JSON                                                    |
|----------------------------------------|------------------------------------------------------------|
| None, bool, int, finite float, str, list | itself                                                   |
| dict with plain string keys            | an object                                                  |
| a scalar of numpy                      | the plain number                                           |
| any other dict, tuple, Counter         | {"$dict": [[k, v], ...]}, {"$tuple": [...]}, ...           |
| nan, inf                               | {"$float": "nan"}                                          |
| bytes, torch.dtype                     | {"$bytes": base64}, {"$dtype": name}                       |
| tensor or array up to INLINE bytes     | {"$tensor": {dtype, shape, data: base64}}                  |
| a larger one                           | {"$tensor": {"stored": number}}: `keep` stores the tensor  |

Other values are refused, with a message that says where the value was found.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.tensorfile import CODES, DTYPES, bytes_of, numel_of
from onefold.reading import short

#: Tensors up to this size in bytes are stored in the JSON file itself.
INLINE = 16 << 10

#: Looked up here and not in torch, whose functions a name in a file could otherwise reach.
_NAMED = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}
#: For each tag, the function that makes the value from the decoded JSON.
_READ: dict[str, Callable[[Any], Any]] = {
    "$float": float, "$tuple": tuple, "$dict": dict, "$counter": lambda v: Counter(dict(v)),
    "$bytes": base64.b64decode, "$dtype": _NAMED.__getitem__,
}  # fmt: skip

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
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, (float, int)):
        number = value if isinstance(value, int) else float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _encode_array(value, where, keep)
    if isinstance(value, dict):
        counter = type(value) is Counter
        if not counter and all(type(k) is str and not k.startswith("$") for k in value):
            return {k: encode(v, f"{where}[{k!r}]", keep) for k, v in value.items()}
        pairs = [
            [encode(k, f"a key of {where}", keep), encode(v, f"{where}[{k!r}]", keep)]
            for k, v in value.items()
        ]
        return {"$counter" if counter else "$dict": pairs}
    if isinstance(value, (list, tuple)):
        inner = [encode(v, f"{where}[{i}]", keep) for i, v in enumerate(value)]
        return inner if isinstance(value, list) else {"$tuple": inner}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which only pickle could"
        " store, and a checkpoint holds no pickle. Give plain values instead (a dict, a list, text,"
        " tensors), for instance its state_dict()."
    )


def _encode_array(value: Any, where: str, keep: Keep | None) -> Any:
    array = not isinstance(value, torch.Tensor)
    try:
        if array:
            tensor = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
        else:
            tensor = value.detach().resolve_conj().cpu().contiguous()
        code = CODES[tensor.dtype]
    except (TypeError, ValueError, RuntimeError, NotImplementedError, KeyError):
        raise CheckpointError(
            f"{where} is an array or tensor of {value.dtype}, which cannot be stored; give a plain one"
            f" of {', '.join(DTYPES)}."
        ) from None
    name = "$array" if array else "$tensor"
    if tensor.numel() * tensor.element_size() > INLINE and keep is not None:
        return {name: {"stored": keep(tensor)}}
    data = base64.b64encode(bytes_of(tensor)).decode()
    return {name: {"dtype": code, "shape": list(tensor.shape), "data": data}}


def decode(value: Any, fetch: Fetch | None = None) -> Any:
    """Return the value that `encode` was given. `fetch`: returns a stored tensor by its number.
    Raises: CheckpointError: `encode` has not written this.
    """
    if isinstance(value, list):
        return [decode(v, fetch) for v in value]
    if not isinstance(value, dict):
        return value
    tagged: tuple[str, Any] = next(iter(value.items()), ("", None))
    name, inner = tagged
    if len(value) != 1 or not name.startswith("$"):
        return {k: decode(v, fetch) for k, v in value.items()}
    try:
        if name in ("$tensor", "$array"):
            found: Any = (
                fetch(inner["stored"])
                if fetch is not None and "stored" in inner
                else _tensor(inner)
            )
            # `fetch` may have a stand-in
            return found.numpy() if name == "$array" and torch.is_tensor(found) else found
        if name in _READ:
            return _READ[name](decode(inner, fetch))
    except CheckpointError:
        raise
    except Exception as error:  # whatever the constructors of the types raise
        raise DamagedCheckpoint(
            f"{short(value)} is no value that Onefold writes ({type(error).__name__}: {error})."
        ) from None
    raise CheckpointError(
        f"the checkpoint holds a value of the kind {name!r}, which this version of Onefold does not know."
    )


def _tensor(inner: dict[str, Any]) -> torch.Tensor:
    data, dtype = base64.b64decode(inner["data"]), DTYPES[inner["dtype"]]
    if numel_of(inner["shape"]) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes of data for {inner['shape']}")
    tensor = torch.empty(inner["shape"], dtype=dtype, device="cpu")
    if tensor.numel():
        bytes_of(tensor)[:] = data
    return tensor


#: Values of one of these kinds may take each other's place.
_KINDS: tuple[Any, ...] = (bool, (int, float, np.number, torch.Tensor), (list, tuple))


def fits(ours: Any, value: Any) -> bool:
    """Return whether a loaded `value` may take the place of `ours`: both are numbers or tensors, both
    lists, or of one type; a dict, by what it has under the keys of ours. Anything may take the place of
    None, and None that of anything.
    """
    if ours is None or value is None:
        return True
    if isinstance(ours, dict):
        return isinstance(value, dict) and all(fits(ours.get(k), v) for k, v in value.items())
    for kind in _KINDS:
        if isinstance(ours, kind) or isinstance(value, kind):
            return isinstance(ours, kind) and isinstance(value, kind)
    return isinstance(value, type(ours))  # of a method, an optimizer: nothing that was loaded


def refuse_another_state(source: str, name: str, thing: Any, state: Any) -> None:
    """Check a state of `thing` (a scheduler, a scaler) before its `load_state_dict` takes it: most
    write every key to an attribute, so that a key may also stand for a method.
    Raises: CheckpointError: a value is of another kind than what has its name now.
    """
    ours = thing.state_dict() if callable(getattr(thing, "state_dict", None)) else None
    # A scaler that is disabled takes nothing
    if not ours or not isinstance(ours, dict) or not isinstance(state, dict):
        return
    for key, value in state.items():
        now: Any = ours[key] if key in ours else getattr(thing, str(key), None)
        if not fits(now, value):
            raise CheckpointError(
                f"{source}: its {name} has {short(value)} as {key!r}, where the given"
                f" {type(thing).__name__} has {short(now)}: it was saved with another kind of {name}."
                f" Leave {name} out of load()."
            )
    # Those inside torch's ChainedScheduler and SequentialLR
    inner = zip(getattr(thing, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    for its, inside in inner:
        refuse_another_state(source, name, its, inside)
