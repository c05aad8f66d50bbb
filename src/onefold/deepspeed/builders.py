"""What scripts ask about DeepSpeed's compiled operators: whether one can be used here.

Onefold compiles none. It answers for what the operator is asked for: the optimizers of its name are
served by torch's, and state on NVMe by Onefold's own reads and writes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_OPERATORS = {
    "AsyncIOBuilder": "async_io",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLionBuilder": "fused_lion",
}
#: {DeepSpeed's name of an operator: whether what it is for is served}; false for any other name.
__compatible_ops__: Any = defaultdict(bool, dict.fromkeys(_OPERATORS.values(), True))
__all__ = [
    *("__compatible_ops__", "EvoformerAttnBuilder", "FPQuantizerBuilder", "FusedLambBuilder"),
    *("GDSBuilder", "InferenceBuilder", "QuantizerBuilder", "RandomLTDBuilder"),
    *("SpatialInferenceBuilder", "StochasticTransformerBuilder", "TransformerBuilder"),
    *_OPERATORS,
]


class _Builder:
    """Answers whether what an operator is for can be used. There is nothing to build."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return bool(__compatible_ops__[self.NAME])

    def load(self, verbose: bool = False) -> Any:
        """Raise NotImplementedError: there is no compiled operator."""
        raise NotImplementedError(
            f"{type(self).__name__}.load(): Onefold has no compiled operators. The optimizers of"
            " deepspeed.ops are torch's own, and state on NVMe needs none: leave the call out."
        )


def __getattr__(name: str) -> type[_Builder]:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (_Builder,), {"NAME": _OPERATORS.get(name, name)})
