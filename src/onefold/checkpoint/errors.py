"""What a person can mend about a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, found, read or applied; says what to change."""


class DamagedCheckpoint(CheckpointError):
    """Bytes of a checkpoint are not what was written: another one must be loaded."""
