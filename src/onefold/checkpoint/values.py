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
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ValidationError

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.tensorfile import CODES, DTYPES, bytes_of, numel_of

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

FormT = TypeVar("FormT", bound=BaseModel)
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
    if isinstance(value, list):
        return [encode(v, f"{where}[{i}]", keep) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, f"{where}[{i}]", keep) for i, v in enumerate(value)]}
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
    name = "$array" if array else "$tensor"
    if tensor.numel() * tensor.element_size() > INLINE and keep is not None:
        return {name: {"stored": keep(tensor)}}
    data = base64.b64encode(bytes_of(tensor)).decode()
    return {name: {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data": data}}


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


def short(value: Any) -> str:
    """Return the beginning of a value's text."""
    text = repr(value)
    return text if len(text) <= 100 else text[:96] + " ..."


def formed(form: type[FormT], value: Any) -> FormT:
    """Return the value of a file in a form. Raises: ValueError: it has another; where, and which."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ValueError(f"{where} is {short(wrong['input'])}: {wrong['msg']}") from None


def fits(ours: Any, value: Any, strict: bool = False) -> bool:
    """Return whether a loaded `value` may take the place of `ours`: it is of the same kind.

    | ours                       | value                                                                  |
    |----------------------------|------------------------------------------------------------------------|
    | a number, or a tensor      | a number, or a tensor of as many; `strict`: finite where ours is       |
    | a tuple; a list            | of the same length; of any: each element fits ours                     |
    | a dict                     | each value fits ours of that key                                       |
    | None, or nothing there yet | anything that `decode` returns                                         |
    | text, True, ...            | of the same type                                                       |
    | any of these               | None; `strict`: not for a number or for several values                 |
    | what `encode` refuses      | nothing: a method, an optimizer                                        |
    """
    try:
        # As both would come back from a file: a tuple of another class as a tuple
        return _fits(decode(encode(ours, "")), decode(encode(value, "")), strict)
    except CheckpointError:
        return False


def _fits(ours: Any, value: Any, strict: bool) -> bool:
    several = isinstance(ours, (list, tuple, dict))
    if ours is None or (value is None and not (strict and (several or is_number(ours)))):
        return True
    if isinstance(ours, dict):
        return isinstance(value, dict) and all(
            _fits(ours.get(key), v, strict) for key, v in value.items()
        )
    if several:
        last = len(ours) - 1
        return (
            isinstance(value, (list, tuple))
            and (isinstance(ours, list) or len(value) == len(ours))
            and (last < 0 or all(_fits(ours[min(i, last)], v, strict) for i, v in enumerate(value)))
        )
    if not is_number(ours):
        return isinstance(value, type(ours))
    same = is_number(value) and numel_of(np.shape(value)) == numel_of(np.shape(ours))
    return same and (not (strict and _finite(ours)) or _finite(value))


def is_number(value: Any) -> bool:
    """Return whether a value is a number or a tensor, and not True or False."""
    numbers = (int, float, np.number, torch.Tensor)
    return isinstance(value, numbers) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    return abs(value) < 1 << 63 if isinstance(value, int) else math.isfinite(value)


def refuse_another_state(source: str, name: str, thing: Any, state: Any) -> None:
    """Check a state of `thing` (a scheduler, a scaler) before its `load_state_dict` takes it: most
    write every key to an attribute, so that a key may also stand for a method.
    Raises: CheckpointError: a value is of another kind than what has its name now.
    """
    ours = thing.state_dict() if callable(getattr(thing, "state_dict", None)) else None
    if not isinstance(ours, dict) or not ours:  # a scaler that is disabled takes nothing
        return
    given = f"the given {type(thing).__name__}"
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{source}: its {name} is {short(state)}, and {given} loads a dict: it was saved with"
            f" another kind of {name}. Leave {name} out of load()."
        )
    for key, value in state.items():
        now: Any = ours[key] if key in ours else getattr(thing, str(key), None)
        if key == "_schedulers" and key in ours:  # of torch's ChainedScheduler and SequentialLR
            now = tuple(now)
        if not fits(now, value, strict=name == "scaler"):  # a schedule's best loss begins as inf
            raise CheckpointError(
                f"{source}: its {name} has {short(value)} as {key!r}, where {given} has {short(now)}:"
                f" it was saved with another kind of {name}. Leave {name} out of load()."
            )
        for inner, its in zip(thing._schedulers, value, strict=True) if type(now) is tuple else ():
            refuse_another_state(source, name, inner, its)
