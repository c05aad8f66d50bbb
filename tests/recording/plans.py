"""The questions about plans whose answers are recorded: what `onefold plan` is asked, and what
`onefold.plan(...)` is.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from typing import Any

import onefold
from recording import seen
from zoo import TinyMLP, features_of

_70B = "llama-3-70b --gpus 64 --seq 4096"
#: What stands behind `onefold plan`, but for --json.
COMMANDS = (
    "gpt2 --gpus 1 --gpu rtx4090 --seq 1024",
    "gpt2 --gpus 8 --seq 1024 --precision fp32",
    "gpt2-xl --gpus 4 --gpu a100-40 --seq 1024",
    "llama-3-8b --gpus 8",
    "llama-3-8b --gpus 64 --micro-batch auto",
    "llama-3-8b --gpus 16 --global-batch 256 --micro-batch 2",
    "llama-3-8b --gpus 16 --global-batch 256 --stage 3 --reduce-at boundary",
    "llama-3-8b --gpus 8 --gpu a100-40 --activation-checkpointing full",
    "llama-3-8b --gpus 8 --gpu a100-40 --activation-checkpointing selective",
    "llama-3-8b --gpus 1 --gpu rtx4090 --host-memory 256GB",
    "llama-3-8b --gpus 1 --gpu rtx4090 --host-memory 64GB --disk-space 2TB",
    "llama-3-8b --gpus 2 --gpu h100-80 --lora 16",
    "llama-3-8b --gpus 2 --gpu rtx4090 --lora 16 --frozen nf4",
    "llama-3-8b --gpus 16 --optimizer sgd",
    "llama-3-8b --gpus 8 --precision fp16 --accumulate-dtype fp16",
    "llama-3-8b --gpus 16 --per-node 4 --link ethernet",
    "llama-3-8b --gpus 16 --link 1x25g",
    f"{_70B}",
    f"{_70B} --gpu h200 --link ib-ndr",
    f"{_70B} --gpu a100-80 --activation-checkpointing full --offload none",
    f"{_70B} --stage 3 --offload-optimizer cpu",
    f"{_70B} --stage 3 --offload-optimizer nvme --offload-param cpu --nvme /disk",
    f"{_70B} --stage 3 --offload nvme --nvme /disk",
    f"{_70B} --stage 3 --offload-optimizer 0.6 --step-in-backward",
    f"{_70B} --stage 3 --offload-activations cpu",
    f"{_70B} --stage 3 --tile 512MB",
    f"{_70B} --stage 3 --moments int8",
    f"{_70B} --stage 3 --moments bf16 --offload-optimizer cpu",
    f"{_70B} --stage 3 --group flat",
    f"{_70B} --stage 3 --shard-group node",
    f"{_70B} --stage 3 --shard-group node --optimizer-over all",
    f"{_70B} --stage 3 --second-copy --gather-codec int8 --reduce-codec int4",
    f"{_70B} --stage 3 --gather-codec fp8",
    f"{_70B} --stage 2 --reduce-codec int8 --error-feedback",
    f"{_70B} --reduce native",
    f"{_70B} --lora 64 --frozen int8",
    "mixtral-8x7b --gpus 32",
    "bloom-176b --gpus 384 --gpu a100-80 --micro-batch 2",
    "gpt3-175b --gpus 1024 --global-batch 2048 --micro-batch 1",
    "llama-2-7b --gpus 4 --gpu v100-32 --precision fp16",
    "--params 7.5e9 --gpus 64",
    "--params 1T --gpus 1024 --offload nvme --nvme /disk",
    "recording.subjects:LanguageModel --gpus 4 --seq 64 --micro-batch 2",
    "recording.subjects:LanguageModel --gpus 4 --seq 64 --stage 2 --global-batch 16 --simulate",
    "recording.subjects:LanguageModel --gpus 16 --seq 64 --stage 3 --global-batch 32 --simulate",
    "recording.subjects:LanguageModel --gpus 16 --seq 64 --stage 3 --second-copy --gather-codec int8 --reduce-codec int4",
    "recording.subjects:LanguageModel --gpus 16 --seq 64 --stage 3 --shard-group node --precision fp32 --simulate --rank 3",
    "recording.subjects:LanguageModel --gpus 4 --seq 64 --stage 1 --reduce native --simulate",
    "llama-3-8b --gpus 0",
    "no-such-model",
)  # fmt: skip


def _mean_square(out: Any) -> Any:
    return out.square().mean()


def _mlp(**job: Any) -> Callable[[], Any]:
    def asked() -> Any:
        def batch(samples: int) -> Any:
            return features_of(0, samples, 16)

        return onefold.plan(
            TinyMLP(16, 512, 6, 16), batch=batch, loss=_mean_square, gpus=4, gpu="h100-80", **job
        ).to_json()

    return asked


#: {name: what is asked} by `onefold.plan(...)`.
CALLS: dict[str, Callable[[], Any]] = {
    "of a module": _mlp(micro_batch=4),
    "of a module, fp32, stage 3": _mlp(micro_batch=4, precision="fp32", stage=3),
    "of a module, states on the host": _mlp(micro_batch=4, stage=2, offload_optimizer="cpu"),
    "of a module, in groups": _mlp(micro_batch=2, stage=3, shard_group=2, per_node=2),
    "of a module, in tiles": _mlp(micro_batch=2, stage=3, tile=200_000, largest=False),
    "of a module, three micro-batches": _mlp(micro_batch=2, global_batch=24, stage=3),
}


def names() -> list[str]:
    return [f"plan {command}" for command in COMMANDS] + [f"plan {name}" for name in CALLS]


def record_plans(wanted: list[str]) -> list[dict[str, Any]]:
    """The answer to each question, in this process."""
    seen.quiet()
    found = []
    for name in wanted:
        question = name.removeprefix("plan ")
        try:
            printed = (
                json.dumps(CALLS[question]())
                if question in CALLS
                else seen.command(["plan", *question.split(), "--json"])
            )
            found.append({"plan": _without_words(seen.answer(printed))})
        except Exception as error:
            found.append(
                {
                    "raised": f"{type(error).__name__}: {error}",
                    "trace": traceback.format_exc(limit=-6),
                }
            )
    return found


def _without_words(value: Any) -> Any:
    """Of a sentence the numbers in it: how it is put is not what is recorded."""
    if isinstance(value, str) and value.count(" ") > 3:
        return ["in words", *re.findall(r"\d[\d,.]*", value)]
    if isinstance(value, dict):
        return {k: _without_words(v) for k, v in value.items()}
    return [_without_words(v) for v in value] if isinstance(value, list) else value
