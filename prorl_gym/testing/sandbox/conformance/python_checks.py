"""The python session: state, output, and cells that attack it. Wording differs between consoles; facts do not."""

from prorl_gym.sandbox.protocol import CellResult, PythonSession, Sandbox
from prorl_gym.testing.sandbox.conformance._helpers import (
    TIMEOUT_SECONDS,
    assert_cancel_kills,
    count_processes,
    unique_sleep_seconds,
)


async def _run_cell(session: PythonSession, code: str, timeout: float = TIMEOUT_SECONDS) -> CellResult:
    return await session.run_cell(code, timeout=timeout)


async def python_keeps_state(box: Sandbox) -> None:
    """Names, imports and functions of earlier cells; the last expression's value is shown."""
    python = await box.python()
    assert (await _run_cell(python, "import math\ndef f(x):\n    return x * k\nk = 3")).output == ""
    result = await _run_cell(python, "print('printed')\nf(14)")
    assert (result.output, result.ok) == ("printed\n42\n", True), result
    assert (await _run_cell(python, "None")).output == ""


async def python_shows_errors(box: Sandbox) -> None:
    """Exceptions and syntax errors are output, with the line, and harm nothing."""
    python = await box.python()
    await _run_cell(python, "x = 1")
    result = await _run_cell(python, "def f():\n    return 1 / 0\nf()")
    assert not result.ok and "ZeroDivisionError" in result.output and "return 1 / 0" in result.output, result
    result = await _run_cell(python, "def broken(:\n")
    assert not result.ok and "SyntaxError" in result.output, result
    assert not (await _run_cell(python, "import sys; sys.exit(3)")).restarted
    assert (await _run_cell(python, "x")).output == "1\n"


async def python_output_has_every_source(box: Sandbox) -> None:
    """stdout, stderr, the descriptor itself and subprocesses, in order."""
    python = await box.python()
    code = "import os, sys, subprocess\nprint(1)\nprint(2, file=sys.stderr)\nos.write(1, b'3\\n')\n"
    result = await _run_cell(python, code + "subprocess.run(['echo', '4'])\nprint(5)")
    assert result.output == "1\n2\n3\n4\n5\n", result


async def python_input_is_empty(box: Sandbox) -> None:
    """``input()`` does not hang."""
    result = await _run_cell(await box.python(), "input()")
    assert not result.ok and "EOFError" in result.output, result


async def python_bounds_output(box: Sandbox) -> None:
    """A hundred megabytes come back as head, marker and tail."""
    result = await _run_cell(await box.python(), "for _ in range(100): print('x' * 1000000)\nprint('last')", 60)
    assert result.ok and len(result.output) < box.spec.limits.output + 200, result.ok
    assert "bytes left out" in result.output and result.output.endswith("last\n")


async def python_timeout_interrupts(box: Sandbox) -> None:
    """Loops, sleeps and subprocesses end at the timeout; the state stays."""
    python = await box.python()
    await _run_cell(python, "x = 'kept'")
    for code in ("while True: pass", "import time; time.sleep(1000)", "import os; os.system('sleep 1000')"):
        result = await _run_cell(python, code, 0.3)
        assert result.timed_out and not result.ok and not result.restarted, (code, result)
    assert (await _run_cell(python, "x")).output == "'kept'\n"


async def python_timeout_kills_what_ignores_it(box: Sandbox) -> None:
    """A cell that swallows the interrupt is killed with everything it started; an empty session follows."""
    python = await box.python()
    seconds = unique_sleep_seconds()
    code = f"import subprocess, time\nx = 1\nsubprocess.Popen(['sleep', '{seconds}'], start_new_session=True)\n"
    code += "while True:\n    try:\n        time.sleep(1000)\n    except BaseException:\n        pass"
    result = await _run_cell(python, code, 0.3)
    assert result.timed_out and result.restarted and not result.ok, result
    assert await count_processes(box, seconds) == 0
    result = await _run_cell(python, "'x' in globals()")
    assert (result.output, result.restarted) == ("False\n", False), result


async def python_survives_its_death(box: Sandbox) -> None:
    """``os._exit``, a segmentation fault, memory: reported, restarted, usable."""
    python = await box.python()
    for code in (
        "import os; os._exit(1)",
        "import ctypes; ctypes.string_at(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ):
        result = await _run_cell(python, "print('before', flush=True)\n" + code)
        assert result.restarted and not result.ok and not result.timed_out, (code, result)
        assert result.output.startswith("before\n"), result
        assert (await _run_cell(python, "1 + 1")).output == "2\n"


async def python_survives_garbage_on_its_channel(box: Sandbox) -> None:
    """Forged answers on any descriptor are at worst a restart."""
    python = await box.python()
    forge = (
        'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"cell": "x", "ok": true, "images": []}\\n\')\n'
    )
    await _run_cell(python, forge + "    except OSError: pass")
    await _run_cell(python, "import os; os.closerange(3, 20)")
    assert (await _run_cell(python, "'fine'")).output == "'fine'\n"


async def python_cancel_kills(box: Sandbox) -> None:
    """A cancelled await leaves nothing of its cell."""
    python = await box.python()
    seconds = unique_sleep_seconds()
    cell = _run_cell(python, f"import subprocess\nsubprocess.run(['sleep', '{seconds}'])")
    await assert_cancel_kills(box, cell, seconds, 1)
    assert (await _run_cell(python, "1 + 1")).output == "2\n"


async def python_works_beside_the_shell(box: Sandbox) -> None:
    """Both see the same files."""
    python, shell = await box.python(), await box.shell()
    await _run_cell(python, "open('shared', 'w').write('from python')")
    assert (await shell.run_command("cat shared", timeout=TIMEOUT_SECONDS)).output == "from python"


PYTHON_CHECKS = (
    python_keeps_state,
    python_shows_errors,
    python_output_has_every_source,
    python_input_is_empty,
    python_bounds_output,
    python_timeout_interrupts,
    python_timeout_kills_what_ignores_it,
    python_survives_its_death,
    python_survives_garbage_on_its_channel,
    python_cancel_kills,
    python_works_beside_the_shell,
)
