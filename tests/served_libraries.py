"""Imported by the fork server "served": the name deepspeed is served, and then come the libraries.
Each rank that is forked from it starts as under `python -m onefold.deepspeed`.
"""

from __future__ import annotations

import onefold.deepspeed

onefold.deepspeed.serve(say=False)

import libraries

__all__ = ["libraries"]
