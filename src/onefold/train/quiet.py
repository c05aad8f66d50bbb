"""What others say when they are imported into a process of the command, and what no user of it can
act upon.
"""

from __future__ import annotations

import logging
import warnings

#: torchao, which transformers imports, tells of its kernels for GPUs that are not here, and of
#: enumerations that PyTorch knows by itself.
_LOGGERS = ("torchao", "torch.utils._pytree", "torch.distributed.elastic.multiprocessing.redirects")
_MODULES = r"(torchao|transformers|torch\.utils\._pytree|torch\.jit|pydantic|typer|rich)(\.|$)"


def quiet_third_parties() -> None:
    """Errors of theirs are still shown. Imports none of them; call it before they are imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, UserWarning):
        warnings.filterwarnings("ignore", category=kind, module=_MODULES)
