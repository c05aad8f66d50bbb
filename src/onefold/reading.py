"""Read files that a stranger may have written. Nothing here waits, and no size is taken on trust.

| in the file's place                          | raised                                              |
|----------------------------------------------|-----------------------------------------------------|
| a fifo, a socket, a device, a folder         | OSError: "it is a fifo, expected a file"            |
| more bytes than the limit                    | OSError: "it has 2 GiB, expected at most 256 MiB"   |
| bytes that are no UTF-8 or no JSON           | JSONDecodeError                                     |
| a number of 4,301 digits, 1,000s of brackets | JSONDecodeError, where Python has others            |
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onefold.wording import readable

if TYPE_CHECKING:
    from pydantic import BaseModel

FormT = TypeVar("FormT", bound="BaseModel")

StrPath = str | os.PathLike[str]
#: Bytes of the largest JSON file that is read. A manifest takes some 200 for each of its tensors.
LARGEST = 256 << 20

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket"}


def open_regular(path: StrPath, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; also an `opener` for `open`. Links are followed.
    Raises: OSError: also if something else has the file's name. Opening a fifo would wait.
    """
    _refuse(os.stat(path).st_mode, path)  # opening a device may have effects already
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse(os.fstat(file).st_mode, path)
    except OSError:
        os.close(file)
        raise
    return file


def _refuse(mode: int, path: StrPath) -> None:
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "a device")
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"it is {what}, expected a file", os.fspath(path))


def read_bytes(path: StrPath, limit: int = LARGEST) -> bytes:
    """Return the contents of a regular file. Raises: OSError: also for more than `limit` bytes."""
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            said = f"it has {readable(size)}, expected at most {readable(limit)}"
            raise OSError(errno.EFBIG, said, os.fspath(path))
        return file.read(size)


def read_json(path: StrPath, limit: int = LARGEST) -> Any:
    """Return the value in a JSON file. Raises: OSError; JSONDecodeError, which is a ValueError."""
    return parse_json(read_bytes(Path(path), limit))


def parse_json(text: str | bytes, object_pairs_hook: Any = None) -> Any:
    """Return the value of a JSON text, as `json.loads` does.
    Raises: JSONDecodeError: for whatever makes the text unreadable.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("Nested too deeply", "", 0) from None
    except ValueError as error:  # no UTF-8, or a number of more digits than Python reads
        raise json.JSONDecodeError(str(error), "", 0) from None


def short(value: Any) -> str:
    """Return the beginning of a value's text."""
    text = repr(value)
    return text if len(text) <= 100 else text[:96] + " ..."


def formed(form: type[FormT], value: Any) -> FormT:
    """Return the value of a file in a form. Raises: ValueError: it has another; where, and which."""
    from pydantic import ValidationError

    try:
        return form.model_validate(value)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ValueError(f"{where} is {short(wrong['input'])}: {wrong['msg']}") from None
