"""What the tests of PyTorch and torchtitan check where axes come together, and where it is checked here.

torch's tests of composability (2D: FSDP and tensor parallelism; pipelines with FSDP):

| they check                                               | here                                                        |
|----------------------------------------------------------|-------------------------------------------------------------|
| 2D training equals DDP: MLP and transformer, with        | test_tensor_parallel: "Llama", "GPT", "kept for backward",  |
| resharding or without, checkpointing, tied embeddings    | "checkpointing", "tied"                                     |
| 2D with parameters on the host                           | test_tensor_parallel "offloaded"; test_axes_crossed         |
| 2D: training goes on from a checkpoint                   | below: `..._goes_on_from_its_checkpoint_bit_equal`           |
| 2D state dicts: whole, even and uneven parts, loaded     | test_dtensor_parameters: `test_state_dicts_and_contexts_...`; |
| again; optimizer states                                  | test_checkpoints_of_meshes, also as DCP                      |
| 2D meta initialization                                   | test_tensor_parallel "meta"                                 |
| 2D clipping by norms of several kinds                    | below: `test_norms_of_every_kind_...`                        |
| pp + dp + tp under each schedule                         | test_eight_ranks; test_pipelines                            |
| pp and mixed precision                                   | test_pipelines: bf16                                        |
| pp and DCP: stages saved, loaded at another division     | below: `test_three_axes_load_at_other_degrees`              |
| replicate (DDP) and pp, its gradients                    | test_pipelines at stage 0                                   |

torchtitan's integration settings:

| setting                                                  | here                                                        |
|----------------------------------------------------------|-------------------------------------------------------------|
| FSDP, DDP, HSDP; each with TP                            | test_tensor_parallel: stages 0 to 3, `hybrid`                |
| TP + compile                                             | test_tensor_parallel: compiled blocks                        |
| selective and full checkpointing                         | test_tensor_parallel "checkpointing"                        |
| checkpoints: full, of the model alone, of another dtype  | test_checkpoints_of_meshes (export, load)                   |
| PP 1F1B, GPipe, looped, zero bubble, ZBV, own schedule   | test_pipelines                                              |
| PP + FSDP, PP + TP, PP + FSDP + TP, with checkpoints     | test_pipelines, test_eight_ranks, below                     |
| PP + FSDP + TP + compile                                 | below: `test_compiled_stages_...`                           |
| DDP + CP, FSDP + CP, HSDP + CP, FSDP + TP + CP           | below: `test_context_parallelism_...`                       |
| EP, EP + TP, PP + EP                                     | test_experts, test_eight_ranks, test_transformers_plans;    |
|                                                          | stages of experts: none                                      |
| CPU offload, with the optimizer in the backward pass     | test_axes_crossed, test_recipes_beside_axes                 |
| validation between steps with TP, CP, PP                 | test_pipelines "evaluation"; test_dtensor_parameters        |
| generation from a checkpoint                             | test_published_transformers                                 |
| float8, asynchronous TP, symmetric memory                | none: they need a GPU                                       |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipeline_models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from axes_models import VOCABULARY, Case, batches_of, built, mesh_of_case, parallelized
from pipeline_models import resumed, saved
from test_pipelines import close, compare
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranks import run_ranks
from zoo import tokens_of

pytestmark = pytest.mark.one_in(4)

# -- checkpoints -----------------------------------------------------------------------------------


def goes_on(folder: str, stage: int) -> dict[str, Any]:
    """Four steps; and two steps, a checkpoint, another model that loads it, and two more."""
    import onefold

    case = Case(steps=4, plan="sequence")
    mesh = mesh_of_case(case)
    batches = batches_of(case, mesh.get_local_rank("dp"))

    def made(scale: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = parallelized(case, mesh)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(scale)
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
        model = onefold.shard(model, recipe, mesh=mesh, data="dp")
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, some: list[Tensor]) -> list[Any]:
        seen = []
        for batch in some:
            loss = model(batch)
            loss.backward()
            seen.append((loss.item(), onefold.clip_grad_norm_(model, 0.5).item()))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    model, optimizer = made(1.0)
    whole = train(model, optimizer, batches)
    first, its = made(1.0)
    parts = train(first, its, batches[:2])
    onefold.save(folder, model=first, optimizer=its, step=2)
    second, another = made(0.5)
    assert onefold.load(folder, model=second, optimizer=another).step == 2
    parts += train(second, another, batches[2:])
    a, b = onefold.full_state_dict(model), onefold.full_state_dict(second)
    return {"whole": whole, "parts": parts, "equal": all(torch.equal(a[k], b[k]) for k in a)}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_training_on_two_axes_goes_on_from_its_checkpoint_bit_equal(
    stage: int, tmp_path: Path
) -> None:
    for seen in run_ranks(4, goes_on, str(tmp_path / "step-2"), stage):
        assert seen["whole"] == seen["parts"] and seen["equal"], seen


@pytest.mark.slow
@pytest.mark.slow
def test_three_axes_load_at_other_degrees(tmp_path: Path) -> None:
    """Saved under pp 2 × dp 2 × tp 2, loaded without a pipeline, and without tensor parallelism."""
    written = pipeline_models.Case("Schedule1F1B", tp=2, steps=4)
    expected = pipeline_models.in_one_process(written)
    folder = str(tmp_path / "step-7")
    run_ranks(8, saved, written, folder)
    for case in (
        pipeline_models.Case("Schedule1F1B", pp=1, stages=1, tp=2, steps=4),
        pipeline_models.Case("Schedule1F1B", steps=4),
    ):
        ranks = run_ranks(4, resumed, case, folder, case.pp == 1)
        weights = {key: value for seen in ranks for key, value in seen["weights"].items()}
        assert weights.keys() == expected["weights"].keys()
        for seen in ranks:
            later = expected["losses"][seen["dp"]][2 * case.micro_batches :]
            assert not seen["losses"] or close(seen["losses"], later), (seen["losses"], later)
        for key, value in expected["weights"].items():
            apart = (weights[key] - value).abs().max().item()
            assert apart < 2e-5, f"pp {case.pp}, tp {case.tp}: {key} differs by {apart}"


# -- norms, compiled stages ------------------------------------------------------------------------

KINDS = [1.0, 2.0, 2.5, float("inf")]


def norms(stages: tuple[int, ...]) -> list[list[float]]:
    import onefold

    case = Case(plan="sequence")
    mesh = mesh_of_case(case)
    found = []
    for stage in stages:
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
        model = onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp")
        model(batches_of(case, mesh.get_local_rank("dp"))[0]).backward()
        found.append([onefold.clip_grad_norm_(model, 1e9, kind).item() for kind in KINDS])
    return found


def test_norms_of_every_kind_are_those_of_one_process() -> None:
    model = built(Case())
    for dp in range(2):
        (model(batches_of(Case(), dp)[0]) / 2).backward()
    grads = [p.grad for p in model.parameters()]
    wanted = [nn.utils.get_total_norm(grads, kind).item() for kind in KINDS]
    for seen in run_ranks(4, norms, (0, 1, 3)):
        for found in seen:
            assert found == pytest.approx(wanted, rel=2e-5), (found, wanted)
            assert found == seen[0]


@pytest.mark.slow
@pytest.mark.slow
def test_compiled_stages_beside_tensor_parallelism_train_as_one_process() -> None:
    case = pipeline_models.Case("Schedule1F1B", dp=1, tp=2, steps=2, compiled=True, max_norm=0.5)
    compare("compiled stages", case, 1, 3)


# -- context ---------------------------------------------------------------------------------------

WIDTH, LENGTH = 16, 8


class Gathered(torch.autograd.Function):
    """The keys or values [batch, heads, tokens, width] of all ranks along cp, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, 2)[rank], None


class ContextBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, first: int, group: Any) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, 2, -1).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if group is not None:
            k, v = Gathered.apply(k, group), Gathered.apply(v, group)
        at = torch.arange(first, first + length, device=x.device)[:, None]
        seen = torch.arange(k.shape[2], device=x.device)[None] <= at
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.last(x))))


class ContextNet(nn.Module):
    """A part of the tokens, from number `first` on -> the mean loss of that part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(ContextBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor, first: int, group: Any = None) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[first : first + tokens.shape[1]]
        for block in self.blocks:
            x = block(x, first, group)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def texts(data_rank: int, step: int) -> tuple[Tensor, Tensor]:
    rows = tokens_of(10 * data_rank + step, batch=2, length=LENGTH + 1, vocabulary=VOCABULARY)
    return rows[:, :-1], rows[:, 1:]


MESHES: dict[str, dict[str, int]] = {
    "DDP, FSDP + CP": {"dp": 2, "cp": 2},
    "HSDP + CP": {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
    "HSDP + CP, eight ranks": {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    "FSDP + TP + CP": {"dp": 2, "cp": 2, "tp": 2},
}


def in_contexts(sizes: dict[str, int], stages: tuple[int, ...]) -> list[dict[str, Any]]:
    import onefold

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = tuple(name for name in sizes if name != "tp")
    cp, found = mesh.get_local_rank("cp"), []
    at = dict(zip(sizes, mesh.get_coordinate(), strict=True))
    data_rank = at["dp"] if "dp" in at else at["dp_replicate"] * sizes["dp_shard"] + at["dp_shard"]
    for stage in stages:
        model: Any = ContextNet()
        if "tp" in sizes:
            plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0)
        model = onefold.shard(model, recipe, mesh=mesh, data=data)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        losses, norms = [], []
        for step in range(2):
            mine = [t.chunk(sizes["cp"], 1)[cp] for t in texts(data_rank, step)]
            loss = model(*mine, cp * LENGTH // sizes["cp"], mesh.get_group("cp"))
            loss.backward()
            losses.append(loss.item())
            norms.append(onefold.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        weights = onefold.full_state_dict(model)
        found.append({"losses": losses, "norms": norms, "weights": weights, "at": data_rank})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_context_parallelism_trains_as_one_process(name: str) -> None:
    sizes = MESHES[name]
    ranks = 1
    for size in sizes.values():
        ranks *= size
    data, parts = ranks // sizes["cp"] // sizes.get("tp", 1), sizes["cp"]
    plain = ContextNet()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    losses: list[list[float]] = [[] for _ in range(data)]
    norms = []
    for step in range(2):
        for data_rank in range(data):
            loss = plain(*texts(data_rank, step), 0)
            losses[data_rank].append(loss.item())
            (loss / data).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    stages = (0, 1, 2, 3) if name.startswith("DDP") else (1, 3)
    seen = run_ranks(ranks, in_contexts, sizes, stages)
    for i, stage in enumerate(stages):
        told = f"{name}, stage {stage}"
        for data_rank in range(data):
            parts_of = [each[i]["losses"] for each in seen if each[i]["at"] == data_rank]
            mean = torch.tensor(parts_of, dtype=torch.float64).mean(0)
            assert len(parts_of) == parts * sizes.get("tp", 1)
            assert close(mean.tolist(), losses[data_rank]), f"{told}: {mean} {losses[data_rank]}"
        for each in seen:
            assert close(each[i]["norms"], norms), f"{told}: {each[i]['norms']} {norms}"
        for key, value in plain.state_dict().items():
            apart = (seen[0][i]["weights"][key] - value).abs().max().item()
            assert apart < 2e-5, f"{told}: {key} differs by {apart}"
            same = torch.equal(seen[0][i]["weights"][key], seen[0][0]["weights"][key])
            assert same, f"{told}: {key} has other bits"
