"""The import rules of the design: what each package may load, and that help is fast."""

import ast
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "areal_hpc"
HEAVY = {"torch", "mpi4py", "h5py", "vllm", "megatron", "transformers"}

FORBIDDEN = {
    "types.py": HEAVY,
    "messages.py": HEAVY,
    "paths.py": HEAVY,
    "telemetry.py": HEAVY,
    "heartbeat.py": HEAVY,
    "stop.py": HEAVY,
    "terminal.py": HEAVY,
    "cli.py": HEAVY,
    "main.py": HEAVY,
    "config": HEAVY,
    "data": HEAVY,
    "launch": HEAVY,
    "plan": HEAVY,
    "replay": HEAVY,
    "controller": {"torch", "vllm", "megatron", "transformers"},
    "mpi": HEAVY,
}
NOT_EACH_OTHER = {
    "controller": {"rollout", "trainer", "launch", "analysis"},
    "rollout": {"controller", "trainer", "launch", "analysis"},
    "trainer": {"controller", "rollout", "launch", "analysis"},
    "spool": {"controller", "rollout", "trainer", "launch", "analysis"},
    "rewards": {"controller", "rollout", "trainer", "launch", "analysis"},
    "mpi": {"controller", "rollout", "trainer", "launch", "analysis", "spool"},
    "replay": {"rollout"},
    "config": {"controller", "rollout", "trainer", "launch", "analysis", "spool", "mpi", "weights"},
}


def modules(name: str) -> list[Path]:
    path = PACKAGE / name
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def imported(file: Path, *, lazy: bool) -> set[str]:
    """Dotted names that a module imports; with `lazy` also those inside functions."""
    tree = ast.parse(file.read_text())
    names: set[str] = set()
    for node in ast.walk(tree) if lazy else _top_level(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _top_level(tree: ast.Module):
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            stack += list(ast.iter_child_nodes(node))


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_light_modules_import_nothing_heavy_at_the_top(name):
    for file in modules(name):
        heavy = {module.split(".")[0] for module in imported(file, lazy=False)} & FORBIDDEN[name]
        assert not heavy, f"{file.relative_to(ROOT)} imports {heavy} at its top"


@pytest.mark.parametrize("name", sorted(NOT_EACH_OTHER))
def test_packages_do_not_import_across(name):
    for file in modules(name):
        for module in imported(file, lazy=True):
            parts = module.split(".")
            crossing = parts[0] == "areal_hpc" and len(parts) > 1 and parts[1] in NOT_EACH_OTHER[name]
            assert not crossing, f"{file.relative_to(ROOT)} imports {module}"


def test_vllm_is_imported_by_rollout_and_weights_only():
    for file in PACKAGE.rglob("*.py"):
        package = file.relative_to(PACKAGE).parts[0]
        uses = {module for module in imported(file, lazy=True) if module.split(".")[0] == "vllm"}
        assert not uses or package in ("rollout", "weights"), f"{file.relative_to(ROOT)} imports {uses}"


def test_mpi4py_is_imported_inside_functions_only():
    for file in PACKAGE.rglob("*.py"):
        assert not any(module.split(".")[0] == "mpi4py" for module in imported(file, lazy=False)), file


def test_light_imports_load_nothing_heavy_in_fact():
    code = (
        "import sys, areal_hpc.cli, areal_hpc.main, areal_hpc.config, areal_hpc.messages, areal_hpc.launch.local\n"
        f"loaded = {sorted(HEAVY)!r}\n"
        "print([name for name in loaded if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_answers_in_under_a_second():
    best = min(_timed_help() for _ in range(3))
    assert best < 1.0


def _timed_help() -> float:
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-m", "areal_hpc.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "areal-hpc run" in result.stdout
    return time.perf_counter() - start


def test_test_files_have_names_of_their_own():
    """pytest imports them by their bare names: two alike stop the collection of all."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("*.py"))
    assert not [name for name, count in names.items() if count > 1 and name not in ("conftest.py", "__init__.py")]
