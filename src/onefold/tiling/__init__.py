"""Layers larger than the device: gather and compute a few rows of their weights at a time.

(ZeRO-Infinity's memory-centric tiling, arXiv 2104.07857, section 5.1.3.) A weight passes through
these files:

    nn.Linear  weight [V, H]                 cut.py       replaces the weight by tiles, before units are found
      ▼
    Linear     tiles.0.weight [0 .. R, H]    modules.py   each tile is a module, and therefore a unit: gathered when it is called,
               tiles.1.weight [R .. 2R, H]                released after the call, reduced, stepped and stored like any other
               ...
    linear.weight                            weight.py    the whole, for code that asks for it by name

Tiles are not visible outside the process. A state dict, a checkpoint and an export have
`linear.weight`; each tile is an interval of it (`layout.Part`).
"""
