"""Errors of calls that an engine refuses.

DeepSpeed asserts in some of these places and raises RuntimeError or ValueError in others, by
version. Scripts that catch either are served. Some compare the words: a message has those of
DeepSpeed where it says the same.
"""

from __future__ import annotations


class EngineMisuse(RuntimeError, AssertionError):
    """A call of an engine that cannot be followed in its present state."""


class NoScalarLoss(ValueError, AssertionError):
    """What was given as a loss is no scalar with a graph."""
