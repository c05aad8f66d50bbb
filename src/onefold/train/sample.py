"""A greedy sample of text, before and after training."""

from __future__ import annotations

from typing import Any

import torch

import onefold
from onefold.train.prepare import Run

PROMPTS = {"topics": 'The "with" statement is used to'}
OTHER_PROMPT = "The"


def prompt_of(run: Run) -> str:
    return run.config.prompt or PROMPTS.get(run.config.data, OTHER_PROMPT)


def sample(run: Run) -> str | None:
    """What the model continues the prompt with, or None if it cannot generate or none is wanted.
    Collective.
    """
    model: Any = run.model
    words = run.loaded.tokenizer
    if (
        not run.config.sample_tokens
        or words is None
        or not callable(getattr(model, "generate", None))
    ):
        return None
    ids = torch.tensor(
        [words.encode(prompt_of(run), add_special_tokens=False)], device=run.ranks.device
    )
    model.eval()
    try:
        # Whole parameters on every rank for this while; each rank writes the same text. Compiled
        # blocks run as they are
        # written: the lengths that generating goes through would each be compiled.
        with onefold.full_params(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=run.config.sample_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=words.eos_token_id,
            )
    finally:
        model.train()
    return words.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
