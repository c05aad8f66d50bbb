"""What `onefold plan` says of groups, codecs and links between nodes: its options as arguments of
`Recipe.zero`.
"""

from __future__ import annotations

from typing import Any


def groups_asked(**words: Any) -> dict[str, Any]:
    """Arguments of `Recipe.zero` from the options of the command line, by their names; what was not
    given is None or False.

    Raises:
        ValueError: a group that is neither "node" (or "flat", of `group`) nor a number of ranks.
    """
    found = {
        name: value
        for name, value in words.items()
        if value not in (None, False, "none", "nearest")
    }
    for name in ("group", "shard_group"):
        known = ("node", "flat") if name == "group" else ("node",)
        if name in found and found[name] not in known:
            text = str(found[name]).strip()
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')} {text}: expected {', '.join(known)}, or a number"
                    " of ranks, 1 or more."
                )
            found[name] = int(text)
    return found
