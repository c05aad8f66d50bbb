"""ZeRO beside context parallelism: each rank computes with a part of every sample's tokens.

    torchrun --nproc-per-node 4 examples/context_parallel.py               (2 data ranks x 2 of context parallelism)
    torchrun --nproc-per-node 4 examples/context_parallel.py --cp 4 --attention ulysses --stage 3

Only attention looks at other tokens, so only attention communicates, as a function that transformers calls.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import onefold

VOCABULARY, LENGTH, STEPS = 64, 32, 20
DATA = ("dp_shard", "cp")  # the axes whose ranks compute with different tokens


def gathered(cp: DeviceMesh, module, query, key, value, mask, scaling=None, dropout=0.0, **more):
    """Attention of this rank's queries (batch, heads, tokens, width) over the keys and values of all ranks."""
    refuse(more)
    # The gather's backward pass adds the ranks' gradients up: a reduce-scatter
    both = collectives.all_gather_single(torch.stack((key, value)), gather_dim=3, group=cp)
    seen = (cp.get_local_rank() + 1) * query.shape[2]  # the tokens up to this rank's last one
    key, value = (repeated(x, query.shape[1]) for x in both[..., :seen, :])
    causal = causal_lower_right(query.shape[2], seen)
    out = F.scaled_dot_product_attention(query, key, value, causal, dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def ulysses(cp: DeviceMesh, module, query, key, value, mask, scaling=None, dropout=0.0, **more):
    """Attention of some heads over all tokens: the ranks exchange tokens for heads, and back."""
    refuse(more)
    heads, ranks = query.shape[1], cp.size()
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be divided among {ranks} ranks: use gathered")
    if key.shape[1] % ranks:
        key, value = repeated(key, heads), repeated(value, heads)
    query, key, value = (exchanged(cp, x, split=1, join=2) for x in (query, key, value))
    key, value = repeated(key, query.shape[1]), repeated(value, query.shape[1])
    out = F.scaled_dot_product_attention(query, key, value, None, dropout, True, scale=scaling)
    return exchanged(cp, out, split=2, join=1).transpose(1, 2).contiguous(), None


def repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def refuse(more: dict) -> None:
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if more.get(name) is not None:
            raise ValueError(f"this attention is causal over all tokens, and the model has {name}")


def exchanged(cp: DeviceMesh, x: Tensor, split: int, join: int) -> Tensor:
    """Divide `x` along one dimension among the ranks, and join what comes along another."""
    parts = torch.stack(x.chunk(cp.size(), split))
    return torch.cat(collectives.all_to_all_single(parts, None, None, cp).unbind(), join)


def part_of(cp: DeviceMesh, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """This rank's part of the samples. All ranks of `cp` have the same samples (batch, length)."""
    if tokens.shape[1] % cp.size():
        raise ValueError(f"pad {tokens.shape[1]} tokens to a multiple of {cp.size()}")
    # Shifted first: the last token of a part predicts the first one of the next part
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    tokens, targets, positions = (
        x.chunk(cp.size(), 1)[cp.get_local_rank()].contiguous()
        for x in (tokens, targets, positions)
    )
    given = {"input_ids": tokens, "position_ids": positions}
    return given | {"labels": targets, "shift_labels": targets}


def summed(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over all ranks that have different tokens."""
    value = value.detach().clone()
    for axis in DATA:
        dist.all_reduce(value, group=mesh.get_group(axis))
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--attention", choices=("gathered", "ulysses"), default="gathered")
    parser.add_argument("--stage", type=int, default=2)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(
        device, (dist.get_world_size() // given.cp, given.cp), mesh_dim_names=DATA
    )
    attend = {"gathered": gathered, "ulysses": ulysses}[given.attention]
    AttentionInterface.register("over_cp", partial(attend, mesh["cp"]))

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, attn_implementation="over_cp")  # fmt: skip
    recipe = onefold.Recipe.zero(given.stage, reduce_op="sum")
    model = onefold.shard(LlamaForCausalLM(config), recipe, mesh=mesh, data=DATA, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp_shard"))  # one for all of cp
    for step in range(STEPS):
        start, stride = torch.randint(1, 8, (2, 8, 1), generator=generator)
        tokens = (start + stride * torch.arange(LENGTH)) % VOCABULARY
        prompt = torch.randint(1, LENGTH // 2, (8, 1), generator=generator)
        labels = tokens.masked_fill(torch.arange(LENGTH) < prompt, -100)  # prompts are not learned
        batch = part_of(mesh["cp"], tokens.to(device), labels.to(device))
        counted = summed((batch["labels"] != -100).sum(), mesh)
        loss = model(**batch, num_items_in_batch=counted, use_cache=False).loss  # sum / counted
        loss.backward()
        norm = onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole = summed(loss, mesh)
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {whole.item():.4f}, gradient norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
