"""What scripts ask about DeepSpeed's compiled operators: whether one can be used here.

Onefold compiles none. It answers for what the operator is asked for: the optimizers of its name are
served by torch's, and state on NVMe by Onefold's own reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

#: {DeepSpeed's name of an operator: whether what it is for is served}.
COMPATIBLE: Mapping[str, bool] = {
    "async_io": True,
    "cpu_adagrad": True,
    "cpu_adam": True,
    "cpu_lion": True,
    "fused_adam": True,
    "fused_lion": True,
    **dict.fromkeys(
        (
            "evoformer_attn", "fp_quantizer", "fused_lamb", "gds", "inference_core_ops", "inference_cutlass_ops",
            "quantizer", "ragged_device_ops", "ragged_ops", "random_ltd", "sparse_attn", "spatial_inference",
            "stochastic_transformer", "transformer", "transformer_inference",
        ),
        False,
    ),
}  # fmt: skip


class _Builder:
    """Answers whether what an operator is for can be used. There is nothing to build."""

    NAME: ClassVar[str] = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return COMPATIBLE[self.NAME]

    def load(self, verbose: bool = False) -> Any:
        """Raise NotImplementedError: there is no compiled operator."""
        raise NotImplementedError(
            f"{type(self).__name__}.load(): Onefold has no compiled operators. The optimizers of"
            " deepspeed.ops are torch's own, and state on NVMe needs none: leave the call out."
        )


def _builder(name: str, operator: str) -> type[_Builder]:
    return type(name, (_Builder,), {"NAME": operator, "__doc__": _Builder.__doc__})


AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam")
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion")
GDSBuilder = _builder("GDSBuilder", "gds")
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", "evoformer_attn")
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer")
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference")
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer")
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd")
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference")
StochasticTransformerBuilder = _builder("StochasticTransformerBuilder", "stochastic_transformer")
TransformerBuilder = _builder("TransformerBuilder", "transformer")

#: The builders, by class name, in the order of this file.
BUILDERS = tuple(n for n, v in dict(globals()).items() if n.endswith("Builder") and n[0] != "_")
