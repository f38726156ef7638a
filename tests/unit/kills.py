"""A process that is killed at a chosen change of the file system."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


class Killed(BaseException):
    """Stands for SIGKILL."""


def killed(monkeypatch: pytest.MonkeyPatch, point: int, work: Callable[[], None]) -> bool:
    """Do `work` up to the change of the disk with number `point`; False if there were not so many."""
    left = point

    def counted(change):
        def call(*arguments, **options):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return change(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except Killed:
            return True
    return False
