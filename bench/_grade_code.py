"""What grading 50 tests of one program costs beside running it 50 times on the host.

The peers, in the same run and with the same interpreter: a loop that starts ``python3 program`` on the host for each
test and keeps its output, and the floor, the same loop with an empty program. Ours includes the start and the end of
the clean sandboxes.
"""

import subprocess
import tempfile
import time
from pathlib import Path

from _report import SHORT, Figure, figure, peer

from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.grader import grade
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend, SandboxSpec

TESTS = 50
ROUNDS = 3 if SHORT else 15
TARGET_RATIO = 1.5
STDIO = "n = int(input())\nprint(sum(i * i for i in range(n)))\n"
FUNCTION = "def squares(n):\n    return sum(i * i for i in range(n))\n"
CALL = FUNCTION + "\n\nimport json\nprint(json.dumps(squares(json.loads(input()))))\n"
"""The same work on the host: arguments and result as JSON."""


def rows() -> dict[str, tuple[CodeRow, str, str]]:
    """Return a row of each kind with a program that passes it, and what does the same on the host."""
    answers = [(n, sum(i * i for i in range(n))) for n in range(TESTS)]
    stdio = [{"stdin": f"{n}\n", "stdout": f"{answer}\n"} for n, answer in answers]
    function = [{"args": [n], "expected": answer} for n, answer in answers]
    made = {
        "stdin and stdout": ({"kind": "stdio", "cases": stdio}, STDIO, STDIO),
        "function": ({"kind": "function", "entry": "squares", "cases": function}, FUNCTION, CALL),
    }
    return {
        name: (CodeRow.model_validate({"question": "?", "tests": tests}), program, alone)
        for name, (tests, program, alone) in made.items()
    }


async def ours(backend: SandboxBackend, row: CodeRow, program: str) -> float:
    """Return the ms of one grading.

    Raises:
        RuntimeError: the program did not pass: the figure would be worthless.
    """
    leases = SandboxLeases(backend)
    began = time.perf_counter()
    try:
        score = await grade(row, program, leases, 300.0)
    finally:
        await leases.close()
    took = (time.perf_counter() - began) * 1000
    if score.reward != 1.0:
        raise RuntimeError(f"a right program failed: {score.detail}")
    return took


def plain(python: str, program: str) -> float:
    """Return the ms of running a program once per test on the host, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "solution.py")
        path.write_text(program, encoding="utf-8")
        began = time.perf_counter()
        for n in range(TESTS):
            subprocess.run([python, str(path)], input=f"{n}\n".encode(), capture_output=True, check=True)
        return (time.perf_counter() - began) * 1000


async def interpreter(backend: SandboxBackend) -> str:
    """Return the path of the sandbox's python3, which the host's ``/usr`` also has."""
    sandbox = await backend.start_sandbox(SandboxSpec())
    try:
        result = await sandbox.exec(["python3", "-c", "import sys; print(sys.executable)"], timeout=60)
    finally:
        await sandbox.close()
    return result.stdout.decode().strip()


async def run() -> list[Figure]:
    """Measure both kinds of tests; ours and the peers in turns, so that noise hits all of them."""
    backend = await open_backend(SandboxConfig(backend="userns"))
    figures: list[Figure] = []
    try:
        python = await interpreter(backend)
        for name, (row, program, alone) in rows().items():
            graded: list[float] = []
            host: list[float] = []
            floor: list[float] = []
            for _ in range(ROUNDS):
                graded.append(await ours(backend, row, program))
                host.append(plain(python, alone))
                floor.append(plain(python, ""))
            figures.append(
                figure(
                    f"{TESTS} tests of one program, {name}",
                    graded,
                    "ms",
                    better="lower",
                    backend="userns",
                    peers=[peer("plain python on the host", host), peer("empty program on the host", floor)],
                )
            )
            figures.append(
                figure(
                    f"{TESTS} tests of one program, {name}: beside plain python",
                    [mine / theirs for mine, theirs in zip(graded, host, strict=True)],
                    "x",
                    better="lower",
                    backend="userns",
                    target=TARGET_RATIO,
                )
            )
    finally:
        await backend.close()
    return figures
