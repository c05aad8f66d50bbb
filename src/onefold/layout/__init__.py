"""Room `layout`: where every element lives. Knows no processes and no tensors."""

from onefold.layout.flat import ALIGNMENT, BLOCK, FlatLayout, Part, Slot, overlap, round_up

__all__ = ["ALIGNMENT", "BLOCK", "FlatLayout", "Part", "Slot", "overlap", "round_up"]
