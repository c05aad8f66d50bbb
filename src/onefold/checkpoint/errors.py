"""Errors about checkpoints that a user can fix."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, found, read or applied. The message says what to change."""


class DamagedCheckpoint(CheckpointError):
    """The bytes of a checkpoint differ from what was written. Another checkpoint must be loaded."""


class NotStreamed(CheckpointError):
    """The weights exist, but cannot be read in parts. They are pickled or quantized, or their
    layout differs from the model's by more than moved rows. transformers reads such weights whole.
    """
