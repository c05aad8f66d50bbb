"""What is measured: the peers, the turns that each takes, and their order in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PEERS: tuple[str, ...] = ("onefold-3", "onefold-1", "fsdp2", "deepspeed-3", "deepspeed-1")
"""Every peer, in the order of a round. A number is the ZeRO stage."""

ANYWHERE: tuple[str, ...] = ("onefold-3", "onefold-1", "fsdp2")
"""Those that load on another number of ranks than saved. DeepSpeed needs a conversion in between, which is not measured."""

WAYS: tuple[str, ...] = (
    "onefold-weights",
    "onefold-rank0",
    "fsdp2-every",
    "fsdp2-rank0",
    "fsdp2-stream",
)
"""Ways to open a Hugging Face folder as a sharded model."""

NOTES: dict[str, str] = {
    "onefold-N": (
        "onefold.shard with Recipe.zero(N); onefold.save, save_async and load of model and AdamW"
    ),
    "fsdp2": (
        "fully_shard of each block and the root; get_state_dict, dcp.save, dcp.async_save (a"
        " process group of its own) and dcp.load into get_state_dict, then set_state_dict."
        " 'default': async_save as its tutorial has it; 'kept': with one DefaultStager for all"
        " saves, so that its buffers are reused. DCP stores a tied weight under both names"
    ),
    "deepspeed-N": (
        "DeepSpeed ZeRO stage N, save_checkpoint and load_checkpoint; it does not flush, so `until"
        " on disk` is what counts. It stores a copy of the weights beside the fp32 masters, and"
        " loads on as many ranks as saved"
    ),
    "onefold-weights": (
        "model on the meta device, onefold.shard(model, zero(3), weights=folder): every rank reads"
        " what it will own"
    ),
    "onefold-rank0": (
        "from_pretrained on rank 0, the meta device elsewhere, then onefold.shard, which sends"
        " every rank its part"
    ),
    "fsdp2-every": "from_pretrained on every rank, then fully_shard",
    "fsdp2-rank0": (
        "from_pretrained on rank 0; fully_shard on the meta device, to_empty, "
        "set_model_state_dict(full_state_dict, broadcast_from_rank0)"
    ),
    "fsdp2-stream": (
        "fully_shard on the meta device, to_empty, dcp.load with HuggingFaceStorageReader into its"
        " state dict"
    ),
}
"""How each peer is set up, printed under the tables."""


@dataclass(frozen=True)
class Counts:
    """How often a turn repeats what it measures.

    Attributes:
        warmup: optimizer steps before anything is measured. steps: those timed alone before each
            save that goes on behind.
        saves: saves that the training waits for. behind: saves behind the training, in each of the
            peer's ways.
    """

    warmup: int = 2
    steps: int = 3
    saves: int = 2
    behind: int = 3


LIGHT = Counts(warmup=1, steps=0, saves=1, behind=0)
"""Of a turn whose checkpoint is wanted more than its time."""


@dataclass(frozen=True)
class Turn:
    """One task of one peer.

    Attributes:
        kind: "save", "load" or "pretrained". peer: a name of PEERS, or of WAYS for "pretrained".
        ranks: how many run. saved: on how many the checkpoint was saved (equal to `ranks` but for
            loads). light: see LIGHT.
    """

    kind: str
    peer: str
    ranks: int
    saved: int
    light: bool = False

    @property
    def title(self) -> str:
        sizes = f"{self.saved} -> {self.ranks}" if self.kind == "load" else str(self.ranks)
        return f"{self.kind} {self.peer} on {sizes}"


def peers_turns(peer: str, ranks: int, elsewhere: bool = True) -> Iterator[Turn]:
    """Of one peer in a round: save on `ranks`, load there and `elsewhere`; then the way back."""
    yield Turn("save", peer, ranks, ranks)
    yield Turn("load", peer, ranks, ranks)
    if peer in ANYWHERE and elsewhere:
        yield Turn("load", peer, 2 * ranks, ranks)
        if ranks > 1:
            yield Turn("load", peer, ranks // 2, ranks)
        yield Turn("save", peer, 2 * ranks, 2 * ranks, light=True)
        yield Turn("load", peer, ranks, 2 * ranks)


def pretrained_turns(ways: Sequence[str], ranks: int, elsewhere: bool = True) -> Iterator[Turn]:
    """Every way on `ranks` and on twice as many."""
    for count in (ranks, 2 * ranks) if elsewhere else (ranks,):
        for way in ways:
            yield Turn("pretrained", way, count, count)
