"""Layers larger than the device: their weights are gathered and computed with a few rows at a time.

(ZeRO-Infinity's memory-centric tiling, arXiv 2104.07857, section 5.1.3.) The way of a weight
through this folder:

    nn.Linear  weight [V, H]                 cut.py       replaces the weight by tiles, before units are found
      ▼
    Linear     tiles.0.weight [0 .. R, H]    modules.py   each tile is a module, and as such a unit: gathered when it is called,
               tiles.1.weight [R .. 2R, H]                released behind it, reduced, stepped and stored like any other
               ...
    linear.weight                            weight.py    the whole, for code that asks for it by name

Outside of the process nobody sees tiles: a state dict, a checkpoint, an export have
`linear.weight`, of which each tile is an interval (`layout.Part`).
"""
