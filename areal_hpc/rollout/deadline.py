"""Deadlines of calls to the engine, with errors that say what it was asked to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """TimeoutError "the engine did not `what` within ..." where the body takes longer."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise TimeoutError(f"the engine did not {what} within {seconds:g} s") from None
