"""Imported last by the fork server: what is loaded so far is nothing that a rank could ever
collect.

Without this a collection in a rank, and a walk over all its objects, goes over some 300 000 of
torch's first, and writes to the pages they lie on, which the rank then has to copy: some 0.2 s
each.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
gc.enable()
