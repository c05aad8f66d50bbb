"""How many examples a property test looks at: a quarter of what it asks for in `make test`, other ones
in each run, and all of them with `--all` (tests/conftest.py loads the profile).
"""

from __future__ import annotations

from hypothesis import settings

#: What a property that asks for nothing looks at, in `make test` and with `--all`.
SAMPLE, ALL = 25, 100


def examples(n: int) -> settings:
    """The decorator of a property that looks at `n` examples with `--all`, in `make test` at a
    quarter of them, five at least.
    """
    return settings(max_examples=max(5, n * settings().max_examples // ALL))
