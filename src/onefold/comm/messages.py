"""Small messages between ranks. What the host reads goes over gloo, on any backend."""

from __future__ import annotations

import torch
import torch.distributed as dist

from onefold.comm.stall import CollectiveContext
from onefold.comm.standing import Standing


class Messages(Standing):
    """The small messages of a group."""

    def exchange_control(
        self, payload: torch.Tensor, context: CollectiveContext, kind: str = "control"
    ) -> list[torch.Tensor]:
        """Gather every rank's small uint8 payload ([n], the same length on all ranks, on the host),
        in rank order. Waits.

        Takes log2(ranks) rounds: in each, a rank passes on all payloads that it has (Bruck et al.
        1997). The messages go over gloo on any backend, because the host reads them.

        Args:
            kind: messages of different kinds are never taken for each other ("call": a collective
                that the user calls, at any time).
        """
        if self.size == 1 or self.fake:  # on a fake backend the others' payloads equal this rank's
            return [payload] * self.size
        # Row i is of the rank i positions after this one
        have = torch.empty((self.size, payload.numel()), dtype=torch.uint8, device="cpu")
        have[0] = payload
        step = 1
        while step < self.size:
            more = min(step, self.size - step)
            self._round(
                have[:more],
                (self.rank - step) % self.size,
                have[step : step + more],
                (self.rank + step) % self.size,
                context,
                kind,
                payload.numel(),
            )
            step *= 2
        return list(have.roll(self.rank, 0).unbind())

    def any_of(self, bits: bytes, context: CollectiveContext) -> bytes:
        """Return the bitwise or of `bits` over all ranks, which give equally many. Waits.

        Takes log2(ranks) rounds of one message, over gloo on any backend. With `both` and `alike`
        it also tells whether all ranks gave the same bits.
        """
        if self.size == 1 or self.fake:
            return bits
        mine = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        step = 1
        # Bits that arrive twice change nothing, so the number of ranks need not be a power of 2
        while step < self.size:
            theirs = torch.empty_like(mine)
            self._round(
                mine,
                (self.rank + step) % self.size,
                theirs,
                (self.rank - step) % self.size,
                context,
                "agreement",
                len(bits),
            )
            mine = mine | theirs
            step *= 2
        return mine.numpy().tobytes()

    def _round(
        self,
        sent: torch.Tensor,
        to: int,
        received: torch.Tensor,
        source: int,
        context: CollectiveContext,
        kind: str,
        length: int,
    ) -> None:
        """Send to one rank and receive from another, on the host. Messages of different `length`
        have different tags, so they are never taken for each other.
        """
        tag = self.tag(kind, length)
        self.ledger.control_bytes += sent.numel()
        with self.launching(context):
            works = [
                dist.irecv(
                    received, group=self.control_group, group_src=self._at_control[source], tag=tag
                ),
                dist.isend(sent, group=self.control_group, group_dst=self._at_control[to], tag=tag),
            ]
        self._wait(works, context, None, on_host=True)

    def gather_values(self, value: torch.Tensor, context: CollectiveContext) -> torch.Tensor:
        """Gather a few numbers of every rank: [...] becomes [size, ...], in rank order. On native
        backends the host does not wait.
        """
        shape = (self.size, *value.shape)
        if self.size == 1 or self.fake:
            return value.expand(shape)
        if not self.native:
            payload = value.detach().cpu().reshape(-1).view(torch.uint8)
            return (
                torch.cat(self.exchange_control(payload, context))
                .view(value.dtype)
                .view(shape)
                .to(value.device)
            )
        out = torch.empty(shape, dtype=value.dtype, device=value.device)
        self.ledger.control_bytes += value.numel() * value.element_size() * (self.size - 1)
        self.note_launch(1, "control", 0, value.numel())
        with self.launching(context):
            work = dist.all_gather_single(
                out.view(-1), value.reshape(-1).contiguous(), group=self.reduce_group, async_op=True
            )
        self.wait([work], context)
        if self.ordered:
            return out
        if self._row_of is None:  # copied to the device once
            self._row_of = torch.tensor(self.at, device="cpu").to(value.device)
        return out.index_select(0, self._row_of)


def both(bits: bytes) -> bytes:
    """Return `bits` followed by their complement: the input of `any_of` whose result `alike` can
    read.
    """
    return bits + bytes(b ^ 0xFF for b in bits)


def alike(found: bytes) -> bool:
    """Whether all ranks gave the same bits to `both`; `found` is the result of `any_of` on it."""
    half = len(found) // 2
    return not any(a & b for a, b in zip(found[:half], found[half:], strict=True))
