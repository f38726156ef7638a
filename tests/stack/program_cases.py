"""Odd and hostile programs, and the verdict of each, for the code reward and its sandbox.

PROGRAMS: (name, tests, program, reward). ATTACKS: (name, program, verdict of run_python);
an attack prints "BROKEN" where it got through. The README of areal_hpc/rewards shows
all of them; `test_rewards_programs` holds them.
"""

SUM = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}
SILENT = {"inputs": [""], "outputs": [""]}
HALF = {"inputs": ["1"], "outputs": ["0.333333333\n"]}
BIG = {"inputs": [""], "outputs": ["100000000000000001\n"]}
ADD = {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}
PAIRS = {"inputs": [[[3, 1]]], "outputs": [[1, 3]], "fn_name": "order"}
SQUARE = {
    "prompt": 'from typing import List\n\ndef square(x: int) -> int:\n    """x * x"""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(-3) - 9) < 1e-6\n",
    "entry_point": "square",
}
RAISES = {
    "test": (
        "def check(candidate):\n    try:\n        candidate(-1)\n    except ValueError:\n        return\n"
        "    assert False\n"
    ),
    "entry_point": "root",
}
LISTED = {"test_list": ["assert double([1]) == [2]", "assert set(double([1, 2])) == {2, 4}"]}
LIVE = [
    {"input": "[1, 2]\n3", "output": "6", "testtype": "functional", "metadata": {"func_name": "total"}},
    {"input": "[]\n0", "output": "0", "testtype": "functional", "metadata": {"func_name": "total"}},
]

PROGRAMS = [
    # ordinary
    ("reads and prints", SUM, "```python\na, b = map(int, input().split())\nprint(a + b)\n```", 1.0),
    ("wrong on the second test", SUM, "input(); print(3)", 0.0),
    ("trailing spaces and lines", SUM, "a, b = map(int, input().split())\nprint(a + b, '  \\n\\n')", 1.0),
    ("prints more than asked", SUM, "a, b = map(int, input().split())\nprint(a + b)\nprint('done')", 0.0),
    ("sys.exit(0) after the output", SUM, "import sys\nprint(sum(map(int, input().split())))\nsys.exit()", 1.0),
    ("exit() of the interactive prompt", SUM, "print(sum(map(int, input().split())))\nexit(0)", 1.0),
    ("output in an exit function", SUM,
     "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))", 1.0),
    ("output in a thread", SUM,
     "import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()", 1.0),
    ("a main guard", SUM, "if __name__ == '__main__':\n    print(sum(map(int, input().split())))", 1.0),
    ("close decimal", HALF, "print(1 / 3)", 1.0),
    ("far decimal", HALF, "print(0.3334)", 0.0),
    ("integers are exact", BIG, "print(100000000000000000)", 0.0),
    ("function", ADD, "def add(a, b):\n    return a + b", 1.0),
    ("method of Solution", ADD, "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b", 1.0),
    ("tuple for a list", PAIRS, "def order(v):\n    return tuple(sorted(v))", 1.0),
    ("rest of a function", SQUARE, "    return x * x\n", 1.0),
    ("whole function", SQUARE, "```python\ndef square(x):\n    return x ** 2\n```", 1.0),
    ("expected exception", RAISES, "def root(x):\n    if x < 0:\n        raise ValueError\n    return x ** 0.5", 1.0),
    ("asserts", LISTED, "def double(v):\n    return [2 * x for x in v]", 1.0),
    ("LiveCodeBench call", LIVE, "class Solution:\n    def total(self, v: List[int], k: int):\n        return sum(v) + k", 1.0),
    ("no program", SUM, "I would add the numbers.", 0.0),
    ("only a shell block", SUM, "```bash\nexpr 1 + 2\n```", 0.0),
    ("syntax error", SUM, "```python\nprint((\n```", 0.0),
    ("the last block counts", SUM, "```python\nprint(sum(map(int, input().split())))\n```\n```python\n1/0\n```", 0.0),
    # early ends
    ("empty program, empty output", SILENT, "pass", 1.0),
    ("sys.exit(0), empty output", SILENT, "import sys\nsys.exit(0)", 0.0),
    ("os._exit(0), empty output", SILENT, "import os\nos._exit(0)", 0.0),
    ("exception, empty output", SILENT, "1 / 0", 0.0),
    ("exception after the right output", SUM, "print(sum(map(int, input().split())))\n1 / 0", 0.0),
    ("os._exit(0) after the right output", SUM,
     "import os\nprint(sum(map(int, input().split())), flush=True)\nos._exit(0)", 0.0),
    ("killed by itself, empty output", SILENT, "import os\nos.kill(os.getpid(), 9)", 0.0),
    ("sys.exit(0) while it is called", ADD, "import sys\ndef add(a, b):\n    sys.exit(0)", 0.0),
    ("os._exit(0) while it is called", ADD, "import os\ndef add(a, b):\n    os._exit(0)", 0.0),
    ("sys.exit(0) before the tests", SQUARE, "import sys\nsys.exit(0)", 0.0),
    ("os._exit(0) in a test", SQUARE, "import os\ndef square(x):\n    os._exit(0)", 0.0),
    # cheats
    ("equals everything", ADD, "class E:\n    def __eq__(self, o):\n        return True\ndef add(a, b):\n    return E()", 0.0),
    ("an int that equals everything", ADD,
     "class E(int):\n    def __eq__(self, o):\n        return True\ndef add(a, b):\n    return E(5)", 0.0),
    ("own check()", SQUARE, "def check(candidate):\n    pass\ndef square(x):\n    return 0", 0.0),
    ("own abs()", SQUARE, "def abs(x):\n    return 0\ndef square(x):\n    return 4", 0.0),
    ("own builtins", SQUARE,
     "import builtins\nbuiltins.abs = lambda x: 0\ndef square(x):\n    return 4", 0.0),
    ("own set()", LISTED, "def set(v):\n    return {2, 4}\ndef double(v):\n    return [2]", 0.0),
    ("own AssertionError", SQUARE,
     "import builtins\nbuiltins.AssertionError = None\ndef square(x):\n    return 4", 0.0),
    ("writes a verdict to every descriptor", ADD,
     "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'\\x00\\x00\\x00\\x13{\"passed\": [true]}')\n"
     "    except OSError:\n        pass\ndef add(a, b):\n    return 0", 0.0),
    ("looks for the tests in its frames", SQUARE,
     "import sys\nfound = []\nframe = sys._getframe()\nwhile frame:\n    found.append(repr(frame.f_locals))\n"
     "    frame = frame.f_back\ndef square(x):\n    return 9 if 'assert' in str(found) else 0", 0.0),
    ("looks for the outputs in memory", SUM,
     "import gc\nprint([o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o])", 0.0),
    ("an endless answer", ADD, "import itertools\ndef add(a, b):\n    return itertools.count()", 0.0),
    ("a deep answer", ADD, "def add(a, b):\n    v = []\n    for _ in range(100000):\n        v = [v]\n    return v", 0.0),
    ("hangs in the second test", SUM, "a, b = map(int, input().split())\nprint(a + b)\nwhile a > 9:\n    pass", 0.0),
]  # fmt: skip

ATTACKS = [
    ("endless loop", "import signal\nfor s in range(1, 32):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n"
     "    except OSError:\n        pass\nwhile True:\n    pass", "timeout"),
    ("sleep", "import time\ntime.sleep(1000)", "timeout"),
    ("10 GB at once", "x = bytearray(10 * 1024**3)", "memory"),
    ("memory by and by", "x = []\nwhile True:\n    x.append(bytearray(10**7))", "memory"),
    ("memory in many processes",
     "import os, time\nfor k in range(30):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (200 * 2**20)\n"
     "        time.sleep(100)\ntime.sleep(100)", "memory"),
    ("fork bomb", "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "timeout"),
    ("thread bomb", "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
     "timeout"),
    ("output flood", "while True:\n    print('x' * 10**6)", "output"),
    ("error flood", "import sys\nwhile True:\n    sys.stderr.write('x' * 10**6)", "timeout"),
    ("flood of a grandchild",
     "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        os.write(1, b'y' * 4096)\nimport time\ntime.sleep(9)",
     "output"),
    ("grandchildren left behind",
     "import os, time\nfor k in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
     "            time.sleep(1000)\n        os._exit(0)\nprint('left')", "ok"),
    ("disk flood", "with open('big', 'wb') as f:\n    while True:\n        f.write(b'x' * 2**20)", "error"),
    ("disk flood in many files",
     "k = 0\nwhile True:\n    k += 1\n    with open(f'f{k}', 'wb') as f:\n        f.write(b'x' * 2**22)", "error"),
    ("writes elsewhere",
     "import os\nfor path in ('/x', '/usr/x', '/etc/x', '/dev/x', '/proc/x', '/home/x', '/var/tmp/x', '/bin/x', '/dev/shm/../x'):\n"
     "    try:\n        open(path, 'w')\n        print('BROKEN', path)\n    except OSError:\n        pass", "ok"),
    ("changes modes and owners",
     "import os\nfor path in ('/', '/usr', '/bin/sh', '/dev/null'):\n    for change in (lambda p: os.chmod(p, 0o777), lambda p: os.chown(p, 0, 0)):\n"
     "        try:\n            change(path)\n            print('BROKEN', path)\n        except OSError:\n            pass", "ok"),
    ("link out of the folder",
     "import os\nos.symlink('/', 'root')\nfor path in ('root/etc/passwd', 'root/etc/hostname', 'root/root/.bashrc'):\n    try:\n"
     "        print('BROKEN', open(path).read()[:20])\n    except OSError:\n        pass", "ok"),
    ("environment of process 1",
     "try:\n    print('BROKEN' if b'SECRET' in open('/proc/1/environ', 'rb').read() else '')\nexcept OSError:\n    pass", "ok"),
    ("other processes",
     "import os\nprint('BROKEN' if [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())] else '')",
     "ok"),
    ("connection to this machine",
     "import socket\ntry:\n    socket.create_connection(('127.0.0.1', PORT), 1)\n    print('BROKEN')\nexcept OSError:\n    pass", "ok"),
    ("connection by UDP",
     "import socket\ntry:\n    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))\n    print('BROKEN')\n"
     "except OSError:\n    pass", "ok"),
    ("abstract socket of this machine",
     "import socket\ntry:\n    socket.socket(socket.AF_UNIX).connect('\\0areal-test')\n    print('BROKEN')\nexcept OSError:\n    pass", "ok"),
    ("stops its parent",
     "import os, signal\nfor pid in (os.getppid(), 1, -1):\n    for s in (signal.SIGSTOP, signal.SIGKILL):\n        try:\n"
     "            os.kill(os.getppid(), s)\n        except OSError:\n            pass\nprint('alive')", "ok"),
    ("kills everything", "import os\ntry:\n    os.kill(-1, 9)\nexcept OSError:\n    pass\nprint('alive')", "ok"),
    ("closes all descriptors", "import os\nos.closerange(0, 1000)\nprint('ok')", "error"),
    ("debugs process 1",
     "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint('BROKEN' if libc.ptrace(16, 1, 0, 0) == 0 else '')", "ok"),
    ("writes into process 1",
     "try:\n    open('/proc/1/mem', 'r+b')\n    import ctypes\n    print('' if ctypes.CDLL(None).prctl(3) else '')\nexcept OSError:\n    pass", "ok"),
    ("new namespaces",
     "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint('BROKEN' if libc.unshare(0x10000000) == 0 else '')", "ok"),
    ("mounts", "import ctypes\nprint('BROKEN' if ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 else '')", "ok"),
    ("becomes root", "import os\ntry:\n    os.setuid(0)\n    print('BROKEN')\nexcept OSError:\n    pass", "ok"),
    ("raises its own limits",
     "import resource\nfor name in ('RLIMIT_AS', 'RLIMIT_NPROC', 'RLIMIT_CPU'):\n    try:\n"
     "        resource.setrlimit(getattr(resource, name), (-1, -1))\n        print('BROKEN')\n    except (OSError, ValueError):\n        pass", "ok"),
    ("endless recursion", "def f():\n    return f()\nf()", "error"),
    ("recursion without a limit", "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return [f(x)]\nf(1)", None),
    ("recursion in C", "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6):\n    x = [x]\nrepr(x)", None),
    ("huge number printed", "print(10 ** 5000)", "error"),
    ("slow regular expression", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "timeout"),
    ("crash in C", "import ctypes\nctypes.string_at(0)", "error"),
    ("reads more than there is", "while True:\n    input()", "error"),
    ("never reads", "print('ok')", "ok"),
    ("packages of this environment", "import msgspec", "error"),
]  # fmt: skip
