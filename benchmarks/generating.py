"""Tokens a second of `generate` at stage 3: gathering for every token, with units kept gathered,
and with whole parameters.

    python -m benchmarks.generating --model smollm2 --ranks 2 --tokens 16

Every rank continues a prompt of its own, greedily, with a cache of keys and values. The figure is
of one rank: the best of `--rounds`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> None:
    import onefold
    from onefold.models.build import load_model, quiet_transformers

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.meet}", rank=rank, world_size=ranks
    )
    model: Any = load_model(arguments.model, "bytes", 0, 64).module.eval()
    onefold.shard(model, onefold.Recipe.zero(3, precision=arguments.precision))
    prompt = torch.randint(0, 200, (1, 16), generator=torch.Generator().manual_seed(rank))
    nbytes = sum(u.numel for u in onefold.engine_of(model).units) * (
        4 if arguments.precision == "fp32" else 2
    )
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "keep_gathered, half of it": lambda: onefold.keep_gathered(model, nbytes // 2),
        "keep_gathered": lambda: onefold.keep_gathered(model),
        "full_params": lambda: onefold.full_params(model),
    }
    best, entering = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, float("inf"))
    texts: dict[str, list[int]] = {}
    for _ in range(arguments.rounds):
        for way, context in ways.items():
            dist.barrier()
            start = time.perf_counter()
            with context(), torch.no_grad(), quiet_transformers():
                entering[way] = min(entering[way], time.perf_counter() - start)
                start = time.perf_counter()
                out = model.generate(
                    prompt,
                    max_new_tokens=arguments.tokens,
                    min_new_tokens=arguments.tokens,
                    do_sample=False,
                )
                best[way] = max(best[way], arguments.tokens / (time.perf_counter() - start))
            texts[way] = out[0].tolist()
    if rank == 0:
        print(
            f"{arguments.model}, {ranks} ranks, {arguments.precision}, {arguments.tokens} tokens,"
            f" best of {arguments.rounds} rounds"
        )
        for way in ways:
            same = "same tokens" if texts[way] == texts["plain"] else "OTHER TOKENS"
            print(
                f"{way:28} {best[way]:8.2f} tokens/s   {entering[way]:6.2f} s to enter   {same}",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    parser = harness.parser("generating", __doc__, rounds=3)
    parser.add_argument("--model", default="smollm2", help="as in `onefold train --model`")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    for name, value in (("ranks", 2), ("tokens", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = harness.parsed(parser, None)
    with tempfile.TemporaryDirectory() as folder:
        arguments.meet = f"{folder}/meet"
        torch.multiprocessing.spawn(measure, (arguments.ranks, arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
