"""Token ids of a spool as text that a terminal can be shown.

Reads the tokenizer that the run's configuration names (or another folder). What a policy
writes may hold anything, terminal control sequences included: `printable` makes it harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_hpc.config.errors import ConfigError
from areal_hpc.paths import RunPaths

Decode = Callable[[Sequence[int]], str]
"""Ids to text, special tokens included."""

UNFINISHED = "\ufffd"
"""What a tokenizer makes of the first bytes of a character."""


def printable(text: str, *, newlines: bool = False) -> str:
    """`text` with everything a terminal would act on, or not show, as an escape; `newlines` stay if wanted."""
    return "".join(
        character
        if character.isprintable() or (newlines and character == "\n")
        else character.encode("unicode_escape").decode()
        for character in text
    )


def load_decoder(paths: RunPaths, tokenizer: str | None) -> Decode:
    """The decoder of `tokenizer`, a Hugging Face folder, or of the run's own. Raises ConfigError."""
    source = f"--tokenizer={tokenizer}"
    if tokenizer is None:
        from areal_hpc.config.load import read_config

        if not paths.config.is_file():
            raise ConfigError(f"RUN={paths.root} has no config.yaml that names a tokenizer: give --tokenizer FOLDER")
        config = read_config(paths.config)
        tokenizer = str(_started_in(paths.root, config.run.folder) / Path(config.model.tokenizer).expanduser())
        source = f"model.tokenizer={tokenizer} of {paths.root}"
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{source} is no folder: give --tokenizer FOLDER")
    try:
        loaded = _load(folder)
    except Exception as error:  # the tokenizer libraries raise bare Exception for a damaged file
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{source} cannot be loaded ({reason}): give --tokenizer FOLDER") from None
    return lambda ids: loaded.decode([int(token) for token in ids], skip_special_tokens=False)


def _started_in(root: Path, folder: str) -> Path:
    """Where the run was started: relative paths of its configuration begin there."""
    parts, own = root.resolve().parts, Path(folder).parts
    inside = not Path(folder).is_absolute() and parts[-len(own) :] == own
    return Path(*parts[: -len(own)]) if inside else Path()


def _load(folder: Path) -> Any:
    if (folder / "tokenizer.json").is_file():
        # Without transformers, which takes seconds to import.
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, [len(ids)]; together they are the text.

    A character of several tokens belongs to its last one. Decoding goes on from the last
    piece, so that spaces at the joints come out as in the whole text.
    """
    found = [""] * len(ids)
    before = start = 0
    for index in range(len(ids)):
        shown, longer = decode(ids[before:start]), decode(ids[before : index + 1])
        if longer.endswith(UNFINISHED) and index + 1 < len(ids) and index - start < 3:
            continue
        found[index] = longer[len(shown) :]
        before, start = start, index + 1
    return found
