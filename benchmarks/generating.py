"""Tokens a second of `generate` at stage 3: gathering for every token, with units kept gathered,
and with whole parameters.

    python -m benchmarks.generating --model smollm2 --ranks 2 --tokens 16

Every rank continues a prompt of its own, greedily, with a cache of keys and values. The figure is
of one rank: the best of `--rounds`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness, launch


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """For each way tokens a second, seconds to enter its context, and the tokens."""
    import onefold
    from onefold.models.build import load_model, quiet_transformers

    model: Any = load_model(job["model"], "bytes", 0, 64).module.eval()
    onefold.shard(model, onefold.Recipe.zero(3, precision=job["precision"]))
    prompt = torch.randint(0, 200, (1, 16), generator=torch.Generator().manual_seed(job["rank"]))
    units, wide = onefold.engine_of(model).units, 4 if job["precision"] == "fp32" else 2
    half = wide * sum(u.numel for u in units) // 2
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "keep_gathered, half of it": lambda: onefold.keep_gathered(model, half),
        "keep_gathered": lambda: onefold.keep_gathered(model),
        "full_params": lambda: onefold.full_params(model),
    }
    count, found = job["tokens"], {way: [0.0, float("inf"), []] for way in ways}
    for _ in range(job["rounds"]):
        for way, context in ways.items():
            dist.barrier()
            start = time.perf_counter()
            with context(), torch.no_grad(), quiet_transformers():
                entered = time.perf_counter()
                out = model.generate(
                    prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False
                )
                rate = count / (time.perf_counter() - entered)
            best, entering, _ = found[way]
            found[way] = [max(best, rate), min(entering, entered - start), out[0].tolist()]
    return found


@harness.command(
    "generating",
    __doc__,
    results=False,
    rounds=3,
    model=("smollm2", "as in `onefold train --model`"),
    precision=("fp32", "what is computed in", ("fp32", "bf16")),
    ranks=(2, "how many ranks"),
    tokens=(16, "tokens that each continues its prompt by"),
)
def main(options: harness.Options) -> int:
    job = {name: getattr(options, name) for name in ("model", "precision", "tokens", "rounds")}
    found, *_ = launch.all_ranks("benchmarks.generating", job, options.ranks, timeout=7200.0)
    print(
        f"{options.model}, {options.ranks} ranks, {options.precision}, {options.tokens} tokens,"
        f" best of {options.rounds} rounds"
    )
    for way, (best, entering, text) in found.items():
        same = "same tokens" if text == found["plain"][2] else "OTHER TOKENS"
        print(f"{way:28} {best:8.2f} tokens/s   {entering:6.2f} s to enter   {same}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
