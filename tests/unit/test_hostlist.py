"""Slurm's compressed host lists against a second reading of them and against generated ones."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.launch.hostlist import expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("nodeA,nodeB[001,003],rack[0-1]_blade[08-11]",
         ["nodeA", "nodeB001", "nodeB003", "rack0_blade08", "rack0_blade09", "rack0_blade10", "rack0_blade11",
          "rack1_blade08", "rack1_blade09", "rack1_blade10", "rack1_blade11"]),
        ("n[1-3,5]", ["n1", "n2", "n3", "n5"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("a[1-2]-ib.site.org, b", ["a1-ib.site.org", "a2-ib.site.org", "b"]),
        ("x1000c0s[0-1]b[0-1]n0", ["x1000c0s0b0n0", "x1000c0s0b1n0", "x1000c0s1b0n0", "x1000c0s1b1n0"]),
    ],
)  # fmt: skip
def test_known_lists(text, hosts):
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-", "n1]", "n[3-1]", "n[a]", "n[]", "n[1-2-3]", "n[[1]]", "a,,b", ",", "n[1]]", "n[1-99999999]",
             "n[0-999]m[0-999]"]
)  # fmt: skip
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(ValueError, match="host list"):
        expand(text)


_RANGES = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=4)
_PREFIX = st.from_regex(r"[a-z][a-z0-9_.-]{0,6}[a-z]", fullmatch=True)


@settings(deadline=None)
@given(st.lists(st.tuples(_PREFIX, _RANGES), min_size=1, max_size=4))
def test_generated_lists(items):
    written, wanted = [], []
    for prefix, ranges in items:
        parts = []
        for low, length, width in ranges:
            parts.append(f"{low:0{width}}-{low + length:0{width}}" if length else f"{low:0{width}}")
            wanted += [prefix + format(number, f"0{width}") for number in range(low, low + length + 1)]
        written.append(f"{prefix}[{','.join(parts)}]")
    assert expand(",".join(written)) == wanted


def test_submitit_reads_lists_without_padding_rules_of_its_own_the_same_way():
    slurm = pytest.importorskip("submitit.slurm.slurm")
    for text in ("a,b[1-3,7],c[08-11]x[0-1]", "n[001,003]", "rack[0-1]_blade[08-11]"):
        assert expand(text) == slurm._parse_node_list(text), re.sub(r"\s", "", text)
