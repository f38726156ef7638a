"""Fixtures of all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder that AREAL_TEST_DATA names; without it the test is skipped by name."""
    folder = os.environ.get("AREAL_TEST_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("AREAL_TEST_DATA names no folder with test data")
    return Path(folder)
