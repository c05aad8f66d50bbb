"""`--pp`: cut a causal language model of transformers into the stages of a pipeline.

    whole      embed_tokens ─► layers.0 ... layers.L-1 ─► norm ─► lm_head ─► loss
    stage 0    embed_tokens ─► layers.0 ... layers.k-1                              ─► hidden states
    stage 1    hidden states ─► layers.k ... layers.L-1 ─► norm ─► lm_head ─► loss

Each stage keeps the whole model's module and its forward. What belongs to other stages becomes a
`PassedOver`, which returns its input. Names and the numbers of layers therefore stay those of the
whole model, and checkpoints of the stages join. Masks and rotations are computed in each stage.

[Note: nothing happens between layers] A stage gives hidden states to the model as `inputs_embeds`. A
model that scales its embeddings would scale them again in each stage. So `refuse_uncut` runs the
model with all of its parts passed over: the output must equal the input.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from onefold.plan.degrees import Degrees
from onefold.plan.divided import stages_of
from onefold.plan.modules import model_shape
from onefold.wording import TrainError

#: Of the inner model: what a stage may have beside its layers. The first is the first stage's, the
#: second the last stage's. Every stage has the rotations, which have no parameters.
EMBEDDING, NORM, LAYERS = "embed_tokens", "norm", "layers"


class PassedOver(nn.Module):
    """Stands where a module of another stage is: returns its first argument."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        # Models look at such words of a layer to choose its mask
        for name in ("attention_type", "layer_type"):
            if isinstance(value := getattr(other, name, None), str):
                setattr(self, name, value)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


def refuse_uncut(model: nn.Module, stages: int) -> None:
    """Raise TrainError if a model cannot be cut into so many stages. The model is unchanged.

    Args:
        model: a whole model, also on the meta device.
    """
    inner, reason = _inner(model), None
    if inner is None:
        reason = (
            "its layers are not found. It takes a causal language model of transformers with"
            f" {EMBEDDING}, {LAYERS}, {NORM} and a head, such as Llama, Qwen3 or Mixtral"
        )
    elif _is_tied(model):
        reason = (
            "its head shares its weight with the embedding (tie_word_embeddings), and they lie in"
            " different stages: each would train its own. Give a model with a head of its own"
        )
    elif getattr(model.config, "output_router_logits", False):
        reason = (
            "its router loss (output_router_logits) is over the layers of all stages: set it to"
            " false in config.json"
        )
    elif stages > (count := len(getattr(inner, LAYERS))):
        reason = f"it has {count} layers, and each stage needs one: use at most --pp {count}"
    elif not _passes_over(model, inner):
        reason = "its code changes hidden states between embedding, layers and norm"
    if reason is not None:
        raise TrainError(
            f"--pp {stages}: a {type(model).__name__} cannot be cut into stages: {reason}. For any"
            " other model write a loop with onefold.parallel.PipelineStage, as docs/pipelines.md shows."
        )


def layers_of_stages(model: nn.Module, stages: int) -> tuple[int, ...]:
    """Return how many layers each stage gets, as the plan counts: the largest stage, with embedding or
    head, has as few parameters as possible.
    """
    depth = len(getattr(_inner(model), LAYERS))
    found = stages_of(model_shape(model), Degrees(pp=stages))
    counts = tuple(stage.blocks for stage in found)
    if sum(counts) == depth:
        return counts
    # Other blocks than layers repeat more often (experts)
    return tuple(depth * (n + 1) // stages - depth * n // stages for n in range(stages))


def cut(model: Any, stage: int, layers: Sequence[int]) -> None:
    """Leave in `model`, in place, what one stage of a pipeline has, and let it be called as torch's
    stages call their modules: with token ids or hidden states, and keyword arguments. It returns
    hidden states; the last stage, which is given `labels`, its mean loss of shape [1].

    Args:
        model: one that `refuse_uncut` lets pass, whole or divided by tensor parallelism.
        stage: which stage, from 0.
        layers: how many layers each stage has.
    """
    inner = _inner(model)
    assert inner is not None
    first, last = stage == 0, stage == len(layers) - 1
    start = sum(layers[:stage])
    blocks, head = getattr(inner, LAYERS), model.get_output_embeddings()
    absent = [block for n, block in enumerate(blocks) if not start <= n < start + layers[stage]]
    absent += [] if first else [getattr(inner, EMBEDDING)]
    absent += [] if last else [getattr(inner, NORM), head]
    names = [name for name, module in model.named_modules() if module in absent]
    for name in names:
        model.set_submodule(name, PassedOver(model.get_submodule(name)))
    # A folder has the whole model, and what other stages read is nothing to warn of
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    prefix = f"{model.base_model_prefix}."
    elsewhere = [rf"^({re.escape(prefix)})?{re.escape(n.removeprefix(prefix))}\." for n in names]
    model._keys_to_ignore_on_load_unexpected = [*ignored, *elsewhere]
    key = "input_ids" if first else "inputs_embeds"

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (), {key: args[0], **kwargs} if args else kwargs

    def after(_: nn.Module, args: Any, output: Any) -> torch.Tensor:
        found: torch.Tensor = output.loss.float().reshape(1) if last else output.logits
        return found

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)


def _inner(model: Any) -> Any:
    """Return the model inside a causal language model; None if it is not built as expected."""
    inner: Any = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    parts = {EMBEDDING: nn.Module, LAYERS: nn.ModuleList, NORM: nn.Module}
    if head is None or not all(isinstance(getattr(inner, n, None), k) for n, k in parts.items()):
        return None
    # Anything else with parameters would be in every stage
    others = [child for name, child in inner.named_children() if name not in parts]
    others += [child for child in model.children() if child not in (inner, head)]
    own = [*inner.parameters(recurse=False), *model.parameters(recurse=False)]
    return None if own or any(True for child in others for _ in child.parameters()) else inner


def _is_tied(model: Any) -> bool:
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    return bool(tied) or head.weight is words.weight


def _passes_over(model: Any, inner: Any) -> bool:
    """See [Note: nothing happens between layers]."""
    width = getattr(inner, EMBEDDING).weight.shape[-1]
    given = torch.linspace(-1.0, 1.0, 3 * width, device="cpu").reshape(1, 3, width)
    with _all_passed_over(inner), torch.no_grad():
        try:
            found = inner(inputs_embeds=given, use_cache=False).last_hidden_state
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError):
            return False
    return torch.equal(found, given)


@contextlib.contextmanager
def _all_passed_over(inner: Any) -> Iterator[None]:
    kept = dict(inner.named_children())
    blocks: Any = kept[LAYERS]
    layers = nn.ModuleList(PassedOver(block) for block in blocks)
    try:
        for name, child in kept.items():
            setattr(inner, name, layers if child is blocks else PassedOver(child))
        yield
    finally:
        for name, child in kept.items():
            setattr(inner, name, child)
