"""`ShardSpec`: properties over random layouts and schemes, and that runtime and plan read the same
one.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import TinyMLP
from onefold.layout import Dtypes, ShardSpec, Topology, overlap
from onefold.plan.from_module import model_shape
from onefold.plan.random_checks import nothing as _nothing  # noqa: F401
from onefold.plan.states import resting, units_of
from onefold.quant import codec
from onefold.recipe import Recipe
from ranks import run_ranks
