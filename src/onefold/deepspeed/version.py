"""The names of `deepspeed` that tell its version."""

from onefold.deepspeed.serving import VERSION as __version__

__all__ = [
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
]
__git_branch__ = __git_hash__ = "onefold"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
