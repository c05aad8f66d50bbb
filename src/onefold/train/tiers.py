"""Where state rests, and in what, from the words of a command line or a file to the arguments of
`Recipe.zero`.

| option                    | words                                                       | argument                     |
|---------------------------|-------------------------------------------------------------|------------------------------|
| --offload-optimizer       | cpu, nvme; 0.6 (a share), 6GB (a budget); nvme:0.6, nvme:6GB | "cpu", 0.6, ("nvme", 0.6)    |
| --offload-gradients       | cpu, nvme                                                   | the same                     |
| --offload-param           | cpu, nvme                                                   | the same                     |
| --offload-activations     | cpu, 8GB                                                    | the same                     |
| --nvme (may be repeated)  | folders                                                     | a list of them               |
| --tile                    | 256MB                                                       | the same                     |
| --step-in-backward        |                                                             | True                         |
| --moments                 | bf16, int8, fp8, int4                                       | the same                     |
| --stochastic-rounding     |                                                             | True                         |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.train.config import TrainConfig

_AS_THEY_ARE = ("offload_gradients", "offload_param", "offload_activations", "tile", "moments")


def tier_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `Recipe.zero` about tiers and moments that the configuration gives; {} where
    all is as usual, on the device.
    """
    given: dict[str, Any] = {}
    if config.offload_optimizer not in (None, "none"):
        given["offload_optimizer"] = _optimizer(config.offload_optimizer)
    given |= {
        name: value
        for name in _AS_THEY_ARE
        if (value := getattr(config, name)) not in (None, "none")
    }
    if config.nvme:
        given["nvme"] = list(config.nvme)
    for switch in ("step_in_backward", "stochastic_rounding"):
        if getattr(config, switch):
            given[switch] = True
    return given


def _optimizer(text: str) -> Any:
    tier, colon, amount = text.partition(":")
    return (tier.strip(), _amount(amount)) if colon else _amount(text)


def _amount(text: str) -> str | float | int:
    """0.6 as a share, 6000000000 as bytes; what is no number (cpu, 6GB) as it is."""
    try:
        number = float(text)
    except ValueError:
        return text.strip()
    return int(number) if number > 1 and number.is_integer() else number
