"""The terminal a run was started from, kept while the process's own output goes to its log."""

from __future__ import annotations

import os

_descriptor: int | None = None


def keep_terminal() -> None:
    """Duplicate standard output; call before logging is redirected."""
    global _descriptor
    if _descriptor is None:
        _descriptor = os.dup(1)
        os.set_inheritable(_descriptor, False)


def echo(line: str) -> None:
    """Write one line where the user sees it; a closed terminal is no error."""
    try:
        os.write(1 if _descriptor is None else _descriptor, (line + "\n").encode())
    except OSError:
        pass
