"""What the tracer says a module keeps and holds is what a real step keeps and holds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measured_memory import RealStep, seeded
from torch import Tensor, nn

from onefold.tracing.repeat import checkpointed
from onefold.tracing.trace import trace
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

TEXT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
#: name: (model class, configuration class, its arguments)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
              "bos_token_id": 1, "eos_token_id": 2}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "BERT": ("BertForMaskedLM", "BertConfig", TEXT),
    "T5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
           "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}),
    "Mixtral, grouped": ("MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "experts_implementation": "grouped_mm"}),
    "Mixtral, a loop": ("MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "experts_implementation": "eager"}),
}  # fmt: skip
HERE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "MLP": (lambda: TinyMLP(7, 64, 4, 5), (features_of(0, 16, 7),)),
    "GPT": (lambda: TinyGPT(width=32, heads=4, tied=True, dropout=0.1), (tokens_of(0),)),
}


def build(name: str, **changes: Any) -> nn.Module:
    if name in HERE:
        return HERE[name][0]()
    import transformers

    transformers.logging.set_verbosity_error()
    model_class, config_class, arguments = ARCHITECTURES[name]
    return getattr(transformers, model_class)(
        getattr(transformers, config_class)(**{**arguments, **changes})
    )


def batch_of(name: str, samples: int = 2) -> Any:
    if name in HERE:
        return HERE[name][1]
    ids = torch.randint(3, 97, (samples, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


everywhere = pytest.mark.parametrize(
    "name",
    [
        *HERE,
        *(
            pytest.param(n, marks=needs_transformers)
            for n in ARCHITECTURES
            if n != "Mixtral, a loop"
        ),
    ],
)


@everywhere
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_saved_bytes_and_peak_in_fp32_are_those_of_a_real_step(
    name: str, checkpointing: Any
) -> None:
    with seeded():
        module = build(name)
        said = trace(module, batch_of(name), checkpointing=checkpointing)
        with checkpointed(module, checkpointing):
            step = RealStep(module, batch_of(name), "fp32")
            assert said.saved == step.saved()
            allocated = step.allocated()
    # Scratch memory of kernels (a few hundred bytes here) is the allocator's alone.
    assert said.peak <= allocated <= 1.002 * said.peak, (
        f"traced {said.peak:,}, allocated {allocated:,}"
    )


def enter_autocast(module: nn.Module, _: Any) -> None:
    """A module that computes under autocast whoever calls it."""
    module.autocast = torch.autocast("cpu", torch.bfloat16)
    module.autocast.__enter__()


def leave_autocast(module: nn.Module, *_: Any) -> None:
    module.autocast.__exit__(None, None, None)


@everywhere
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_saved_bytes_and_peak_in_bf16_are_those_of_a_real_step(
    name: str, autocast: bool, checkpointing: Any
) -> None:
    precision: Any = "fp32" if autocast else "bf16"
    with seeded():
        module = build(name)
        if autocast:
            module.register_forward_pre_hook(enter_autocast)
            module.register_forward_hook(leave_autocast)
        said = trace(module, batch_of(name), precision=precision, checkpointing=checkpointing)
        with checkpointed(module, checkpointing):
            step = RealStep(module, batch_of(name), precision)
            # Under autocast torch's fake layer norm says 16 bits of the two statistics of a row
            # that are kept in 32.
            assert said.saved == pytest.approx(step.saved(), rel=0.003 if autocast else 0)
            held = step.tensors()
    # Tensors, since the CPU's kernels for 16 bits take scratch memory that an accelerator's do not.
    # The mode that counts them makes autograd add gradients out of place, which the tracer
    # corrects: up to one tensor more.
    assert said.peak <= held <= 1.05 * said.peak, f"traced {said.peak:,}, held {held:,}"


@needs_transformers
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_experts_in_a_loop_save_what_a_real_step_saves_however_it_routes(
    checkpointing: Any,
) -> None:
    name = "Mixtral, a loop"
    with seeded():
        module = build(name)
        said = trace(module, batch_of(name), checkpointing=checkpointing)
        with checkpointed(module, checkpointing):
            step = RealStep(module, batch_of(name), "fp32")
            assert said.saved == step.saved()
            allocated = step.allocated()
    assert any("balanced" in note for note in said.notes)
    # The peak is that of the expert with most tokens, and a real router is not balanced: within 5 %
    # at 4 experts and 48 tokens.
    assert abs(said.peak / allocated - 1) < 0.05, f"traced {said.peak:,}, allocated {allocated:,}"


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_model_that_checkpoints_by_itself_is_traced_as_it_does(how: Any) -> None:
    def make() -> nn.Module:
        return TinyGPT(width=32, heads=4, checkpointing=how)

    with seeded():
        said = trace(make(), (tokens_of(0),))
        step = RealStep(make(), (tokens_of(0),), "fp32")
        assert said.saved == step.saved()
        allocated = step.allocated()
    assert said.saved < trace(TinyGPT(width=32, heads=4), (tokens_of(0),)).saved
    assert said.peak <= allocated <= 1.002 * said.peak, (
        f"traced {said.peak:,}, allocated {allocated:,}"
    )


@dataclass
class Answer:
    scores: Tensor
    hidden: tuple[Tensor, Tensor]


class Odd(nn.Module):
    """A block used three times, an output that is a dataclass, a buffer, a view that is saved, an
    in-place change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))
        self.scale = nn.Buffer(torch.linspace(1, 2, 12))
        self.head = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Answer:
        for _ in range(3):
            x = x + self.block(x) * self.scale
        left, right = x.chunk(2, dim=-1)
        scores = self.head(torch.cat([right, left], dim=-1)).relu_()
        return Answer(scores, (left * left, right))


class Frozen(nn.Module):
    """Half of it is not trained; float and integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        for block in self.blocks[:2]:
            block.requires_grad_(False)

    def forward(self, x: Tensor, rows: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = F.gelu(block(x))
        return {"loss": x[rows].square().mean()}


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


ODD: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "reused block": (Odd, (features_of(0, 10, 12),)),
    "frozen half": (Frozen, (features_of(0, 9, 16), torch.tensor([1, 4, 4]))),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True),
        (features_of(0, 3, 7, 16),),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_modules_are_traced_to_the_byte(name: str) -> None:
    make, batch = ODD[name]
    with seeded():
        said, step = trace(make(), batch), RealStep(make(), batch, "fp32")
        assert said.saved == step.saved()
        allocated = step.allocated()
    assert said.peak <= allocated <= 1.002 * said.peak, (
        f"traced {said.peak:,}, allocated {allocated:,}"
    )


def test_a_convolution_saves_what_it_saves_and_its_kernels_scratch_memory_is_left_out() -> None:
    batch = (features_of(0, 4, 3, 16, 16),)
    with seeded():
        said, step = trace(convolutions(), batch), RealStep(convolutions(), batch, "fp32")
        assert said.saved == step.saved()
        assert said.peak <= step.allocated()


@needs_transformers
def test_padding_costs_a_mask_and_an_unpadded_mask_costs_nothing() -> None:
    module, ids = build("Llama"), batch_of("Llama")["input_ids"]
    masks = {"none": None, "ones": torch.ones_like(ids), "padded": torch.ones_like(ids)}
    masks["padded"][0, 15:] = 0
    said = {}
    for name, mask in masks.items():
        batch = {"input_ids": ids, "labels": ids} | (
            {} if mask is None else {"attention_mask": mask}
        )
        said[name] = trace(module, batch).saved
        with seeded():
            assert said[name] == RealStep(build("Llama"), batch, "fp32").saved(), name
    assert said["none"] == said["ones"] < said["padded"]


# -- what a trace says besides sums ----------------------------------------------------------------


def test_spans_follow_each_other_and_hand_over_every_gradient_once() -> None:
    module = TinyGPT(width=32, heads=4, tied=True)
    said = trace(module, (tokens_of(0),))
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert sorted(s.arrives for s in said.spans if s.arrives) == sorted(trainable)
    for before, after in zip(said.spans, said.spans[1:], strict=False):
        assert max(before.begin, before.end) <= before.peak
        assert before.arrives or before.end == after.begin, (before, after)
        assert 0 <= before.gradients <= before.peak and 0 <= before.logits <= before.peak
    owners = [
        s.unit for s in said.spans if s.phase == "backward" and s.arrives.startswith("blocks.")
    ]
    assert owners == [
        ".".join(s.arrives.split(".")[:2]) for s in said.spans if s.arrives.startswith("blocks.")
    ]


def test_a_gradient_of_a_parameter_is_dropped_where_it_arrives() -> None:
    module = TinyMLP(7, 64, 4, 5)
    said = trace(module, (features_of(0, 16, 7),))
    nbytes = {name: p.numel() * 4 for name, p in module.named_parameters()}
    for before, after in zip(said.spans, said.spans[1:], strict=False):
        if before.arrives:
            assert before.end - after.begin == nbytes[before.arrives], (before, after)
    assert max(s.gradients for s in said.spans) < sum(nbytes.values()) / 2


def test_a_tied_head_holds_its_gradient_until_the_embedding_adds_its_own() -> None:
    vocabulary, width = 61, 32
    tied = trace(TinyGPT(vocabulary, width, 4, tied=True), (tokens_of(0),))
    apart = trace(TinyGPT(vocabulary, width, 4, tied=False), (tokens_of(0),))
    held = [s.gradients for s in tied.spans if s.unit == "blocks.1" and s.phase == "backward"]
    free = [s.gradients for s in apart.spans if s.unit == "blocks.1" and s.phase == "backward"]
    assert [a - b for a, b in zip(held, free, strict=True)] == [vocabulary * width * 4] * len(held)
    assert tied.saved == apart.saved


def test_logits_are_what_is_as_wide_as_the_vocabulary() -> None:
    batch, length, vocabulary = 2, 12, 61
    said = trace(TinyGPT(vocabulary), (tokens_of(0),))
    rows = batch * (length - 1)
    # cross-entropy keeps log-probabilities, and not the logits
    assert said.logits == rows * vocabulary * 4
    assert max(s.logits for s in said.spans) >= 2 * rows * vocabulary * 4  # both of them at a time
    assert trace(TinyMLP(), (features_of(0, 4, 7),)).logits == 0


def test_flops_are_those_of_the_matrix_products() -> None:
    batch, length, width, heads, depth, vocabulary = 2, 12, 32, 4, 3, 61
    said = {
        how: trace(TinyGPT(vocabulary, width, heads, depth), (tokens_of(0),), checkpointing=how)
        for how in ("none", "full")
    }
    tokens = batch * length
    attention = 2 * 2 * batch * length * length * width  # scores and their product with the values
    block = 2 * tokens * 12 * width * width + attention
    head = 2 * tokens * width * vocabulary
    forward = {u.name: u.forward_flops for u in said["none"].units}
    assert forward == {"(root)": head} | {f"blocks.{i}": block for i in range(depth)}
    backward = {u.name: u.backward_flops for u in said["none"].units}
    assert backward["(root)"] == 2 * head
    # The kernel computes the scores again
    assert backward["blocks.1"] == 2 * (block - attention) + attention // 2 * 5
    again = {u.name: u.backward_flops - backward[u.name] for u in said["full"].units}
    # Recomputation stops at the last tensor that was saved: the last linear layer is not run again,
    # being no input of anything.
    last = 2 * tokens * 4 * width * width
    assert again == {"(root)": 0} | {f"blocks.{i}": block - last for i in range(depth)}


def test_checkpointing_keeps_less_and_every_second_block_keeps_half_of_the_rest() -> None:
    said = {
        how: trace(TinyGPT(width=32, depth=4), (tokens_of(0),), checkpointing=how)
        for how in ("none", "selective", "full")
    }
    assert said["full"].saved < said["selective"].saved < said["none"].saved
    assert (
        said["none"].saved - said["selective"].saved == said["selective"].saved - said["full"].saved
    )
    assert said["full"].peak < said["none"].peak


def test_a_trace_leaves_the_module_and_the_random_numbers_as_they_were() -> None:
    module = TinyGPT(width=32, heads=4, dropout=0.1).eval()
    module.blocks[1].train()
    module.head.weight.grad = torch.ones_like(module.head.weight)
    before = [(n, p, p.data_ptr(), p.clone(), p.grad) for n, p in module.named_parameters()]
    modes = [m.training for m in module.modules()]
    state = torch.get_rng_state()
    trace(module, (tokens_of(0),), checkpointing="full", precision="bf16")
    for name, param, address, values, grad in before:
        now = module.get_parameter(name)
        assert (
            now is param
            and now.data_ptr() == address
            and torch.equal(now, values)
            and now.grad is grad
        )
    assert [m.training for m in module.modules()] == modes
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__
        for m in module.modules()
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failed_trace_leaves_the_module_as_it_was() -> None:
    module = TinyMLP()
    params = dict(module.named_parameters())
    with pytest.raises(RuntimeError):
        trace(module, (features_of(0, 4, 99),))
    assert all(module.get_parameter(n) is p for n, p in params.items())
    assert not any(m._forward_hooks for m in module.modules())


def test_a_module_on_the_meta_device_is_traced_like_a_real_one() -> None:
    with torch.device("meta"):
        empty = TinyGPT(width=32, heads=4, tied=False)
    real = trace(TinyGPT(width=32, heads=4, tied=False), (tokens_of(0),))
    assert trace(empty, (tokens_of(0),)) == real
    assert all(p.is_meta for p in empty.parameters())


# -- an accelerator's kernels ----------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training)


def test_dropout_keeps_one_byte_an_element_on_cuda() -> None:
    x = (features_of(0, 8, 64),)
    saved = {device: trace(Dropped(), x, device=device).saved for device in ("cpu", "cuda")}
    assert saved["cpu"] - saved["cuda"] == 8 * 64 * (4 - 1)


class Attends(nn.Module):
    def __init__(self, masked: bool, dropout: float) -> None:
        super().__init__()
        self.qkv, self.masked, self.dropout = nn.Linear(64, 192, bias=False), masked, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=self.dropout, is_causal=mask is None
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fused_attention_never_keeps_scores_on_cuda(precision: Any, dropout: float) -> None:
    length = 512
    said = trace(
        Attends(False, dropout),
        (features_of(0, 1, length, 64),),
        device="cuda",
        precision=precision,
    )
    scores = 4 * length * length * (4 if precision == "fp32" else 2)
    assert said.peak < scores
    masked = trace(
        Attends(True, dropout), (features_of(0, 1, length, 64),), device="cuda", precision=precision
    )
    assert masked.saved - said.saved < scores / 2  # the mask once, as numbers, for all heads


def test_checkpointing_recomputes_with_the_kernels_of_the_device() -> None:
    said = {how: trace(TinyGPT(width=32, heads=4, dropout=0.1), (tokens_of(0),), checkpointing=how, device="cuda", precision="bf16")
            for how in ("none", "full")}  # fmt: skip
    assert said["full"].saved < said["none"].saved
