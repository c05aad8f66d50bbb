"""Room `runtime`: units bound to modules; gather, release, reduce. Knows no checkpoints and no
commands.
"""

from onefold.runtime.engine import Engine
from onefold.runtime.parameter import ShardedParameter, ShardedParameterError, ShardInfo

__all__ = ["Engine", "ShardInfo", "ShardedParameter", "ShardedParameterError"]
