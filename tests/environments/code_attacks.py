"""Programs that try to be rewarded without solving anything, or to break what grades them.

``STDIO`` is graded on doubling a number, ``FUNCTION`` on adding two. None prints or returns what is right, except where
the number beside it says on how many of the three tests it does so honestly.
"""

ON_PARENT = "import os, signal, resource, time\nboss = os.getppid()\n"

STDIO: dict[str, tuple[str, int]] = {
    "leaves at once": ("import sys; sys.exit(0)", 0),
    "leaves at once, the hard way": ("import os; os._exit(0)", 0),
    "leaves in an exit handler": ("import atexit, os; atexit.register(os._exit, 0); 1 / 0", 0),
    "prints one expected output": ("print(8)", 1),
    "prints all of them": ("print('8\\n42\\n-14')", 0),
    "forges the driver's report": (
        """import json
print(json.dumps({"exit": 0, "timed_out": False, "truncated": False, "seconds": 0.1, "cpu": 0.1, "clean": True,
                  "out": 2, "err": 0}))
print('8')
print(json.dumps({"end": "done"}))""",
        0,
    ),
    "writes to the driver's descriptors": (
        """import glob
for path in glob.glob("/proc/[0-9]*/fd/*") + ["/dev/tty", "/dev/console", "/dev/pts/0"]:
    if "/self/" not in path:
        try:
            open(path, "wb").write(b'{"end": "done"}\\n')
        except OSError:
            pass""",
        0,
    ),
    "reads its way to an answer": (
        """import glob
for path in glob.glob("/proc/[0-9]*/*") + glob.glob("/workspace/*") + glob.glob("/tmp/*"):
    try:
        text = open(path, "rb").read(1 << 16)
    except OSError:
        continue
    if b"expec" b"ted" in text and b'"std' b'out"' in text:
        print(8)""",
        0,
    ),
    "imports a hidden solution": (
        """import importlib, sys
sys.path += ["/", "/workspace", "/tmp", "/root"]
for name in ("reference", "gold", "tests", "grader", "prorl_gym.environments.code.environment", "__main__"):
    try:
        module = importlib.import_module(name)
    except ImportError:
        continue
    for value in vars(module).values():
        if callable(value) and getattr(value, "__name__", "") == "main":
            value()""",
        0,
    ),
    "floods its output": ("while True: print('8' * 100000)", 0),
    "floods its errors": ("import sys\nwhile True: sys.stderr.write('x' * 100000)", 0),
    "ends with bytes that are no text": ("import sys; sys.stdout.buffer.write(b'8\\n\\xff')", 0),
    "prints a nul after it": ("print('8\\0')", 0),
    "closes everything": ("import os; os.closerange(0, 4096); os.write(1, b'8')", 0),
    "mixes descriptors up": (
        "import os\nfor fd in range(3, 256):\n    os.dup2(1, fd)\nos.dup2(0, 1)\nprint(8, flush=True)",
        0,
    ),
    "ignores every signal": (
        """import signal
for number in signal.valid_signals() - {9, 19}:
    signal.signal(number, signal.SIG_IGN)
while True: pass""",
        0,
    ),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", 0),
    "kills the driver": (ON_PARENT + "os.kill(boss, signal.SIGKILL)", 0),
    "kills the driver with every signal": (
        ON_PARENT + "for number in signal.valid_signals() - {9, 19}:\n    os.kill(boss, number)\nprint(7)",
        0,
    ),
    "stops the driver": (ON_PARENT + "os.kill(boss, signal.SIGSTOP)", 0),
    "changes limits of pid 1": ("import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\nprint(7)", 0),
    "changes limits of the next child": (
        """import os, resource
for n in range(1, 50):
    try: resource.prlimit(os.getpid() + n, resource.RLIMIT_AS, (0, 0))
    except OSError: pass
print(7)""",
        0,
    ),
    "kills everything": ("import os, signal; os.kill(-1, signal.SIGKILL)", 0),
    "starves the driver of descriptors": (
        ON_PARENT + "resource.prlimit(boss, resource.RLIMIT_NOFILE, (0, 0))\nprint(7)",
        0,
    ),
    "starves the driver of time": (ON_PARENT + "resource.prlimit(boss, resource.RLIMIT_CPU, (0, 0))\nprint(7)", 0),
    "starves the driver of memory": (ON_PARENT + "resource.prlimit(boss, resource.RLIMIT_AS, (0, 0))\nprint(7)", 0),
    "starves the driver of processes": (
        ON_PARENT + "resource.prlimit(boss, resource.RLIMIT_NPROC, (0, 0))\nprint(7)",
        0,
    ),
    "forks for ever": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", 0),
    "leaves a daemon that answers the next test": (
        """import os, time
if input() == "4" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        seen = set(os.listdir("/proc"))
        end = time.time() + 2
        while time.time() < end:
            for pid in set(filter(str.isdigit, os.listdir("/proc"))) - seen:
                try:
                    with open(f"/proc/{pid}/fd/1", "wb") as out:
                        out.write(b"42\\n")
                    seen.add(pid)
                except OSError:
                    pass
    os._exit(0)
time.sleep(0.3)""",
        0,
    ),
    "leaves a daemon that kills what comes": (
        """import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            for pid in filter(str.isdigit, os.listdir("/proc")):
                if int(pid) not in (1, os.getpid()):
                    os.kill(int(pid), signal.SIGKILL)
    os._exit(0)
print(2 * int(input()))""",
        3,
    ),
    "leaves threads behind": (
        """import threading, time
def late():
    time.sleep(0.2)
    print(8)
threading.Thread(target=late, daemon=True).start()""",
        0,
    ),
    "fills the disk": (
        """import os
for number in range(400):
    try:
        with open(f"/workspace/{number}", "wb") as file:
            while True:
                file.write(b"x" * (1 << 20))
    except OSError:
        pass
print(1)""",
        0,
    ),
    "removes the interpreter": (
        """import os, shutil, sys
print(2 * int(input()), flush=True)
for path in (sys.executable, os.path.realpath(sys.executable), "/bin/sh"):
    try: os.remove(path)
    except OSError: pass""",
        3,
    ),
    "puts another interpreter in its place": (
        """import os
os.makedirs("/usr/local/bin", exist_ok=True)
with open("/usr/local/bin/python3", "w") as file:
    file.write("#!/bin/sh\\necho 42\\n")
os.chmod("/usr/local/bin/python3", 0o755)
print(0)""",
        1,
    ),
    "rewrites itself for the next test": (
        "import os\nos.chmod(__file__, 0o644)\nopen(__file__, 'w').write('print(-14)')\nprint(0)",
        2,
    ),
    "patches the standard library on disk": (
        """import os
path = os.__file__.replace("os.py", "encodings/utf_8.py")
try:
    with open(path, "a") as file:
        file.write("\\nimport os; os.write(1, b'42\\\\n'); os._exit(0)\\n")
except OSError:
    pass
print(0)""",
        1,
    ),
    "eats memory without an end": (
        "x = []\nwhile True:\n    try: x.append(bytearray(1 << 20))\n    except MemoryError: pass",
        0,
    ),
}
"""By what they try: program, and on how many tests (4, 21, -7) its own output is right, if nothing keeps it from it."""

FUNCTION: dict[str, tuple[str, int]] = {
    "leaves before the call": ("import sys; sys.exit(0)", 0),
    "leaves inside the call": ("import os\ndef add(a, b): os._exit(0)", 0),
    "exits inside the call": ("def add(a, b): raise SystemExit(0)", 0),
    "is equal to everything": (
        "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef add(a, b): return E(7)",
        0,
    ),
    "is any number": ("class E(float):\n    def __repr__(s): return '3'\ndef add(a, b): return E(7)", 0),
    "patches json": ("import json\njson.dumps = json.loads = lambda *a, **k: '3'\ndef add(a, b): return 7", 0),
    "patches builtins": (
        "import builtins\nfor n in ('exec', 'compile', 'getattr', 'open', 'int', 'list'):\n"
        "    setattr(builtins, n, lambda *a, **k: 3)\ndef add(a, b): return 7",
        0,
    ),
    "swaps modules": ("import sys\nsys.modules['json'] = sys.modules['os'] = None\ndef add(a, b): return 7", 0),
    "patches os": ("import os\nos.write = os._exit = lambda *a: 0\ndef add(a, b): return 7", 0),
    "looks for the expected value": (
        """import gc, sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for name, value in frame.f_locals.items():
            if isinstance(value, dict) and "expected" in value:
                return value["expected"]
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "expected" in thing:
            return thing["expected"]
    return None""",
        0,
    ),
    "writes the result itself": ("import os\ndef add(a, b):\n    os.write(3, b'0')\n    os._exit(0)", 1),
    "writes two results": ("import os\nos.write(3, b'3 ')\ndef add(a, b): return 3", 0),
    "writes junk after it": ("import os, atexit\ndef add(a, b):\n    os.write(3, b'3\\n{')\n    return 3", 0),
    "runs an exit handler": ("import atexit, os\natexit.register(os.write, 3, b'3')\ndef add(a, b): return 7", 0),
    "has a trace function": (
        "import sys\ndef tracer(frame, event, arg):\n    frame.f_locals['result'] = 3\n    return tracer\n"
        "sys.settrace(tracer)\ndef add(a, b): return 7",
        0,
    ),
    "returns not a number": ("def add(a, b): return float('nan')", 0),
    "returns infinity": ("def add(a, b): return float('inf')", 0),
    "returns a huge number": ("def add(a, b): return 10 ** 4000", 0),
    "returns itself in itself": ("def add(a, b):\n    x = []\n    x.append(x)\n    return x", 0),
    "returns a deep nest": ("def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x", 0),
    "returns a lone surrogate": ("def add(a, b): return '\\ud800'", 0),
    "returns text": ("def add(a, b): return str(a + b)", 0),
    "returns a truth": ("def add(a, b): return True", 0),
    "returns a megabyte": ("def add(a, b): return 'x' * (1 << 20)", 0),
    "prints instead": ("def add(a, b): print(a + b)", 0),
    "has a thread that writes": (
        "import threading, os\ndef spam():\n    while True:\n"
        "        try: os.write(3, b'3')\n        except OSError: pass\n"
        "threading.Thread(target=spam, daemon=True).start()\ndef add(a, b): return 3",
        1,  # where its thread is too late
    ),
    "kills the driver from the call": ("import os\ndef add(a, b): os.kill(os.getppid(), 9)", 0),
    "makes the entry something else": ("class add:\n    def __new__(c, *a): raise SystemExit(0)", 0),
}
"""By what they try: program, and on how many tests (1+2, 5-5, 20+30) the result that it hands over is right."""
