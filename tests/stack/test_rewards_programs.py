"""The code reward and its sandbox against hostile programs, in real sandboxes."""

import asyncio
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import program_cases
import pytest

from areal_hpc.config.schema import RewardsConfig, Sandbox
from areal_hpc.rewards import isolation, sandbox
from areal_hpc.rewards.code import code_reward, parse_tests, same_output
from areal_hpc.rewards.isolation import Isolation, SandboxError
from areal_hpc.rewards.proctree import descendants
from areal_hpc.rewards.protocol import Limits
from areal_hpc.rewards.registry import RewardError, UnscorableGold
from areal_hpc.rewards.selftest import try_to_break
from areal_hpc.rewards.service import RewardService
from areal_hpc.types import Prompt

ROOT = Path(__file__).parents[2]
README = ROOT / "areal_hpc" / "rewards" / "README.md"
MEMORY = 256 * 1024**2
LIMITS = Limits(timeout_s=20.0, memory_bytes=MEMORY)  # of time only what hangs uses up
SHORT = Limits(timeout_s=2.0, memory_bytes=MEMORY)
HANGS = ("an endless answer", "hangs in the second test")


def kernel_answers(call: str) -> int:
    """What a system call says in a process of its own, asked without the sandbox's code."""
    code = f"import ctypes; print(ctypes.CDLL(None).{call})"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)


NAMESPACES = kernel_answers("unshare(0x10000000)") == 0
LANDLOCK = kernel_answers("syscall(444, None, 0, 1)")
protected = pytest.mark.skipif(not NAMESPACES, reason="this kernel allows no user namespaces")


@pytest.mark.parametrize(
    ("name", "tests", "program", "reward"),
    [pytest.param(*case, id=case[0]) for case in program_cases.PROGRAMS],
)
def test_programs_are_paid_as_the_table_says(name, tests, program, reward):
    prompt = Prompt(1, "", tests=json.dumps(tests))
    assert code_reward(prompt, program, limits=SHORT if name in HANGS else LIMITS) == reward


@protected
@pytest.mark.parametrize(
    ("program", "verdict"),
    [pytest.param(*case[1:], id=case[0]) for case in program_cases.ATTACKS],
)
def test_attacks_end_as_the_table_says(program, verdict, monkeypatch):
    monkeypatch.setenv("AREAL_SECRET", "SECRET")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0areal-test")
        abstract.listen()
        program = program.replace("PORT", str(server.getsockname()[1]))
        start = time.monotonic()
        timeout_s = 1.5 if verdict in ("timeout", None) else 20.0
        result = sandbox.run_python(program, "one line\n", timeout_s=timeout_s, memory_bytes=MEMORY)
    assert time.monotonic() - start < timeout_s + 5.0
    assert "BROKEN" not in result.stdout
    assert len(result.stdout) <= sandbox.MAX_OUTPUT_BYTES and len(result.stderr) <= 64 * 1024
    assert result.verdict == verdict if verdict else result.verdict != "ok", result
    assert left_over() == []


def left_over() -> list[str]:
    """Processes of sandboxes and zombies that this process still has."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"PPid:\t{os.getpid()}\n" in (entry / "status").read_text():
                found.append((entry / "cmdline").read_bytes()[:60].decode("utf-8", "replace"))
        except OSError:
            pass
    return [name for name in found if "bwrap" in name or not name]


def test_the_readme_shows_every_program_and_attack():
    text = README.read_text()
    for name, _, _, reward in program_cases.PROGRAMS:
        assert f"| {name} | {reward:g} |" in text
    for name, _, verdict in program_cases.ATTACKS:
        assert f"| {name} | {verdict or 'not ok'} |" in text


@protected
def test_planted_secrets_are_unreadable():
    """Files in the home and run folder; arguments and environment of the runner."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    planted = [
        home / ".areal-secret-test",
        Path.cwd() / ".areal-secret-test",
        Path("/var/tmp/.areal-secret-test"),
    ]
    program = (
        "import json, os\nfor path in json.loads(input()):\n"
        "    try:\n        print('BROKEN', open(path).read())\n"
        "    except OSError:\n        pass\nprint(sorted(os.environ))\n"
        "print(os.listdir('/'), os.listdir('.'))"
    )
    try:
        for path in planted:
            path.write_text("SECRET")
        result = sandbox.run_python(program, json.dumps([*map(str, planted), "/etc/passwd", "/etc/shadow"]))
    finally:
        for path in planted:
            path.unlink(missing_ok=True)
    assert result.verdict == "ok" and "BROKEN" not in result.stdout and "SECRET" not in result.stdout
    variables, listing = result.stdout.strip().split("\n")
    assert set(eval(variables)) <= set(isolation.INNER_VARIABLES)
    assert "home" not in listing and "var" not in listing


def test_files_input_and_output(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 41\n")
    tmp_path.chmod(0o755)  # root's programs run as nobody
    program = (
        "import helper, os, sys\nprint(helper.VALUE + 1, open('data/in.txt').read(), sys.stdin.read())\n"
        "open('out.txt', 'w').write('x')\nprint(sorted(os.listdir('.')))\n"
        "print('\u00e9', file=sys.stderr)\nsys.exit(3)"
    )
    result = sandbox.run_python(
        program, "caf\u00e9", files={"data/in.txt": "42"}, paths=[str(tmp_path)], require=False
    )
    assert result.stdout == "42 42 caf\u00e9\n['data', 'out.txt']\n"
    assert (result.stderr, result.returncode, result.verdict) == ("\u00e9\n", 3, "error")
    for name in ("/etc/x", "../x", "a/../../x", "."):
        with pytest.raises(ValueError, match="leaves the program's working folder"):
            sandbox.run_python("", files={name: ""}, require=False)


def test_starting_a_program_is_cheap():
    def fastest(action, times: int) -> float:
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            assert action().stdout == "1\n"
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    sandbox.run_python("print(1)", require=False)
    each_s = fastest(lambda: sandbox.run_python("print(1)", require=False), 5)
    with sandbox.Cage() as cage:
        again_s = fastest(lambda: cage.run("print(1)", timeout_s=5), 20)
    print(f"a sandbox {1000 * each_s:.0f} ms, a further run in it {1000 * again_s:.1f} ms")
    assert each_s < 0.3 and again_s < 0.1


@protected
def test_with_namespaces_every_protection_holds():
    assert sandbox.find_isolation().namespaces
    missing = {p.name for p in sandbox.protections() if not p.present}
    assert missing == (set() if sandbox.find_isolation().limits_processes else {"process limit"})


# ---- with less than all protections ----------------------------------------------------------


def test_the_self_test_finds_what_is_missing():
    """Without namespaces a program sees that other processes exist and may fork freely."""
    broken = try_to_break(Isolation())
    assert {"processes", "process limit"} <= broken


def test_missing_protections_are_refused_unless_allowed(monkeypatch):
    sandbox.protections.cache_clear()
    monkeypatch.setattr(sandbox, "find_isolation", lambda: Isolation())
    try:
        with pytest.raises(SandboxError, match="process limit"):
            sandbox.run_python("print(1)")
        assert sandbox.run_python("print(1)", require=False).stdout == "1\n"
    finally:
        sandbox.protections.cache_clear()


def test_a_run_without_namespaces_is_refused_unless_best_effort(monkeypatch):
    """As on a kernel without user namespaces: bubblewrap cannot be found by the workers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = RewardsConfig(fn="without_namespaces:code_reward")
    folder = Path(__file__).parent / "fakes"
    monkeypatch.syspath_prepend(str(folder))
    tests = json.dumps(program_cases.SUM)

    async def score(config):
        async with RewardService(config) as service:
            return await service.score(Prompt(1, "", tests=tests), ["print(sum(map(int, input().split())))"])

    with pytest.raises(RewardError, match="rewards.sandbox=best_effort"):
        asyncio.run(score(config))
    config.sandbox = Sandbox.best_effort
    assert asyncio.run(score(config))[0].reward == 1.0


LOADS_THE_MACHINE = ("fork bomb", "thread bomb", "memory in many processes", "disk flood in many files")
DIFFERS = ("other processes", "stops its parent", "packages of this environment", "link out of the folder")


def test_attacks_without_namespaces():
    """Landlock (where the kernel has it), the filter and the limits alone."""
    if LANDLOCK < 6:
        pytest.skip(f"this kernel's Landlock has version {LANDLOCK}; signals are kept in from 6 on")
    assert try_to_break(Isolation()) == {"processes", "process limit"}
    wrong = []
    for name, program, verdict in program_cases.ATTACKS:
        if name in LOADS_THE_MACHINE or (name == "becomes root" and os.geteuid() == 0):
            continue
        if verdict in ("timeout", None) and name != "endless loop":
            continue  # they end as that one does
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            sandbox.Cage(isolation_mode=Isolation()) as cage,
        ):
            program = program.replace("PORT", str(server.getsockname()[1]))
            timeout_s = 1.0 if verdict in ("timeout", None) else 20.0
            result = cage.run(program, "one line\n", timeout_s=timeout_s, memory_bytes=MEMORY)
            ended = result.verdict == verdict if verdict else result.verdict != "ok"
            again = "2\n" if cage.closed else cage.run("print(2)", timeout_s=20.0).stdout
        if "BROKEN" in result.stdout or again != "2\n" or not (ended or name in DIFFERS):
            wrong.append((name, result))
    assert wrong == []
    assert (
        "time.sleep(1000)" not in subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user")
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is missing")
def test_an_ordinary_user_has_all_protections(tmp_path):
    """With an interpreter that such a user may run; root's may lie in a closed folder."""
    python = next((p for p in ("/usr/bin/python3.11", "/usr/bin/python3.12") if os.path.exists(p)), "")
    if not python or f"{sys.version_info[0]}.{sys.version_info[1]}" not in python:
        pytest.skip("no system interpreter of this version")
    for part in ("config", "rewards"):
        shutil.copytree(ROOT / "areal_hpc" / part, tmp_path / "p" / "areal_hpc" / part)
    for file in ("__init__.py", "types.py", "telemetry.py"):
        shutil.copy(ROOT / "areal_hpc" / file, tmp_path / "p" / "areal_hpc" / file)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    [writes_elsewhere] = [case[1] for case in program_cases.ATTACKS if case[0] == "writes elsewhere"]
    run = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-B", "-c",
         "import os\nfrom areal_hpc.rewards import sandbox\n"
         "print(os.getuid(), sandbox.missing_protections(), sandbox.run_python(os.environ['PROGRAM']).stdout)"],
        env={
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "p"), *packages]),
            "PATH": "/usr/bin:/bin",
            "PROGRAM": writes_elsewhere + "\nprint(7)",
        },
        capture_output=True, text=True, timeout=60, cwd="/",
    )  # fmt: skip
    assert run.stdout == "65534 [] 7\n\n", run.stderr


PARENT = """
import asyncio, json, sys
from areal_hpc.config.schema import RewardsConfig, Sandbox
from areal_hpc.rewards.service import RewardService
from areal_hpc.types import Prompt

async def main():
    config = RewardsConfig(fn=sys.argv[1], timeout_s=100.0, sandbox=Sandbox.best_effort)
    async with RewardService(config) as service:
        print("ready", flush=True)
        await service.score(Prompt(1, "", tests=json.dumps({"inputs": [""], "outputs": [""]})), [sys.argv[2]])

asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["parent", "worker"])
@pytest.mark.parametrize("fn", ["code", "without_namespaces:code_reward"])
def test_programs_die_with_the_service(fn, victim):
    """SIGKILL to the rollout's process, or to the reward worker: no program is left."""
    program = "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\nwhile True:\n    time.sleep(0.01)"
    path = os.pathsep.join([str(Path(__file__).parent / "fakes"), str(ROOT)])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, fn, program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert parent.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while len(family := descendants(parent.pid)) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(family) >= 4, "worker, supervisor and two processes of the program"
        # The worker is the first; its death is a crash that the service mends, so its children count.
        os.kill(parent.pid if victim == "parent" else family[0], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(map(alive, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, family))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- the service ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["math", "code"])
def test_hostile_checks_do_not_hold_up_an_easy_one(kind):
    """Default limits: two workers, four checks that hang, then an easy one within 20 s."""
    if kind == "math":
        easy_prompt = Prompt(9, "", gold="4")
        easy, hostile = "4", r"\boxed{\binom{1000000000}{500000000}}"
    else:
        easy_prompt = Prompt(9, "", tests=json.dumps(program_cases.SUM))
        easy = "print(sum(map(int, input().split())))"
        hostile = program_cases.ATTACKS[0][1]

    async def inner():
        config = RewardsConfig(fn=kind, workers=2, sandbox=Sandbox.best_effort)
        async with RewardService(config) as service:
            start = time.monotonic()
            tasks = [asyncio.create_task(service.score(easy_prompt, [hostile])) for _ in range(4)]
            await asyncio.sleep(0)
            result = await service.score(easy_prompt, [easy])
            seconds = time.monotonic() - start
            return (
                result[0].reward,
                seconds,
                [r[0].reward for r in await asyncio.gather(*tasks)],
                service.stats(),
            )

    reward, seconds, hostile_rewards, stats = asyncio.run(inner())
    print(f"{kind}: easy check after {seconds:.1f} s")
    assert reward == 1.0 and hostile_rewards == [0.0] * 4
    assert seconds < 20
    if kind == "math":
        assert stats["timeouts"] == stats["kills"] == stats["restarts"] == 4


# ---- forms of tests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tests",
    ["", "nonsense", "[]", "{}", '{"inputs": ["1"], "outputs": []}', '{"inputs": [], "outputs": []}',
     '{"test": "def check(", "entry_point": "f"}', '{"test": "x", "entry_point": "a b"}', '{"test_list": []}',
     '[{"input": "1"}]', '{"inputs": [1], "outputs": [2]}',
     '[{"input": "1", "output": "1", "testtype": "functional"}]',
     "[" * 100_000],
)  # fmt: skip
def test_tests_that_are_none_are_refused(tests):
    with pytest.raises(UnscorableGold):
        parse_tests(tests)


def test_partial_pays_the_fraction():
    tests = json.dumps({"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "5"]})
    assert code_reward(Prompt(1, "", tests=tests), "print(input())", limits=LIMITS, partial=True) == 0.75
    assert code_reward(Prompt(1, "", tests=tests), "print(input())", limits=LIMITS) == 0.0


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("1\n2\n", "1 \n2\n\n", True),
        ("1 2", "1\n2", False),
        ("0.5", ".5000000001", True),
        ("0.5", "0.51", False),
        ("1", "1.0", False),
        ("yes", "YES", False),
        ("", "\n", True),
        ("nan", "nan", True),
        ("1e9", "1000000000.0", True),
        ("  x", "x", False),
        ("1   2", "1 2", True),
        ("a   b", "a b", False),
        ("Case 1: 0.5", "Case 1: 0.50", True),
        ("Case 1: 0.5", "Case 2: 0.5", False),
    ],
)
def test_outputs(expected, output, same):
    assert same_output(expected, output) is same


def test_isolation_binds_no_home():
    roots = isolation.readable_roots()
    home = os.path.realpath(os.path.expanduser("~"))
    assert home not in roots and not any(home.startswith(root + os.sep) for root in roots)
