"""The logger, and messages of some ranks."""

from __future__ import annotations

import logging
from typing import Any

from onefold.integrations.deepspeed.names.communication import get_rank

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None or -1 is all of them."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, message)
