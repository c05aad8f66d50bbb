"""What moves between nodes and how it is written there, from the words of a command line or a file
to the arguments of `Recipe.zero`.

| option                        | words                  | argument                                                   |
|-------------------------------|------------------------|------------------------------------------------------------|
| --group, --shard-group        | node; 4                | "node", 4                                                  |
| --group                       | flat                   | "flat"                                                     |
| --optimizer-over              | all                    | the same                                                   |
| --second-copy                 |                        | True                                                       |
| --gather-codec                | int8, fp8, int4        | the same                                                   |
| --reduce-codec                | int8, fp8, int4        | the same                                                   |
| --error-feedback              |                        | True                                                       |
| --wire-rounding               | nearest, stochastic    | the same                                                   |
| --reduce                      | ordered, native        | the same                                                   |
| --frozen                      | int8, nf4, int4, fp8   | the same                                                   |

`none` stands for what is usual, so that a command line can take back what a file says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.train.config import TrainConfig

_NAMED = ("group", "shard_group", "optimizer_over", "gather_codec", "reduce_codec", "frozen")
#: Every option of this module.
OPTIONS = (*_NAMED, "second_copy", "error_feedback", "wire_rounding", "reduce")


def wire_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `Recipe.zero` about groups and codecs that the configuration gives; {} where
    all is as usual.
    """
    given = {
        name: value for name in _NAMED if (value := getattr(config, name)) not in (None, "none")
    }
    given |= {name: True for name in ("second_copy", "error_feedback") if getattr(config, name)}
    if config.wire_rounding != "nearest":
        given["wire_rounding"] = config.wire_rounding
    if config.reduce != "ordered":
        given["reduce"] = config.reduce
    return given
