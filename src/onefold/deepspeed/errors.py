"""The exceptions of DeepSpeed that scripts catch.

DeepSpeed reports a wrong configuration as an `AssertionError`, a `ValueError` or a
`DeepSpeedConfigError`, by what is wrong. Here one class is all three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class DeepSpeedConfigError(ValueError, AssertionError):
    """The configuration, or the arguments beside it, cannot be used."""


class ZeRORuntimeException(RuntimeError):
    """DeepSpeed's error of its ZeRO optimizers. Onefold raises none."""


@contextlib.contextmanager
def as_config_errors() -> Iterator[None]:
    """Raise every `ValueError` inside as a `DeepSpeedConfigError`, with the same message."""
    try:
        yield
    except DeepSpeedConfigError:
        raise
    except ValueError as error:
        raise DeepSpeedConfigError(*error.args) from error
