"""What to do about "auto" in a DeepSpeed configuration.

The Hugging Face Trainer replaces "auto" by values from its own arguments; Onefold cannot. Where
"auto" decides what is trained, the user must write a value. Where it only tunes DeepSpeed's own
mechanisms, it may stay.
"""

from __future__ import annotations

from collections.abc import Collection

#: What to write in place of "auto": {path: description}.
GIVE = {
    "train_batch_size": "samples of an optimizer step over all ranks, such as 64",
    "train_micro_batch_size_per_gpu": "samples a rank computes at once, such as 4",
    "gradient_accumulation_steps": "micro-batches of an optimizer step, such as 1",
    "gradient_clipping": (
        "the largest gradient norm, such as 1.0 (the Trainer's default), or 0 for none"
    ),
    "fp16.enabled": "true or false",
    "bf16.enabled": "true or false",
    "zero_optimization.stage": "0, 1, 2 or 3",
    "zero_optimization.offload_optimizer.device": '"none", "cpu" or "nvme"',
    "zero_optimization.offload_param.device": '"none", "cpu" or "nvme"',
    "optimizer.params.lr": "the learning rate, such as 5e-5",
    "optimizer.params.betas": "such as [0.9, 0.999]",
    "optimizer.params.eps": "such as 1e-8",
    "optimizer.params.weight_decay": "such as 0.01, or 0",
    "scheduler.params.warmup_min_lr": "where the warm-up begins, such as 0",
    "scheduler.params.warmup_max_lr": "where it ends, such as the optimizer's lr",
    "scheduler.params.warmup_num_steps": "a number of steps, such as 100",
    "scheduler.params.total_num_steps": "a number of steps, such as 1000",
}
#: Beginnings of the paths that decide the recipe. The rest of a file concerns `onefold.initialize`
#: only.
OF_RECIPES = (
    "fp16.enabled",
    "bf16.enabled",
    "zero_optimization.stage",
    "communication_data_type",
    "data_types.",
)
#: Each of these three follows from the other two.
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
#: Beginnings of the paths by which DeepSpeed tunes itself. Their "auto" may stay, unless they are
#: in `GIVE`.
_TUNING = ("zero_optimization.", "aio.")


def undecided(left: Collection[str], settled: Collection[str] = ()) -> list[str]:
    """Return those paths at "auto" for which the user must write a value.

    Args:
        left: the paths whose value is "auto".
        settled: beginnings of paths that something else decides.
    """
    found = [path for path in left if path in GIVE or not path.startswith(_TUNING)]
    return [path for path in found if not path.startswith(tuple(settled))]


def refuse_auto(paths: Collection[str]) -> None:
    """Refuse paths at "auto".

    Raises:
        ValueError: there is such a path. The message says what to write for each.
    """
    if not paths:
        return
    give = "; ".join(
        f'"{path}": {GIVE.get(path, "a value, or remove the key for its default")}'
        for path in paths
    )
    raise ValueError(
        'the configuration says "auto" where nothing can fill it in: the Hugging Face Trainer does'
        " that from its own arguments, and it does not run here. Write values in place of it:"
        f" {give}."
    )
