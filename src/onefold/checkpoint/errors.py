"""What a person can mend about a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, found, read or applied; says what to change."""


class DamagedCheckpoint(CheckpointError):
    """Bytes of a checkpoint are not what was written: another one must be loaded."""


class NotStreamed(CheckpointError):
    """The weights are there, in a form that cannot be read in parts: pickles, quantized, or of
    another layout than the model's by more than moved rows. transformers reads them whole.
    """
