"""Commands that stay: programs that ask, background jobs, control keys."""

import asyncio

from prorl_gym.sandbox.conformance._helpers import SECONDS, marker, run, running, usable
from prorl_gym.sandbox.protocol import Sandbox, Shell, ShellResult


async def _until(shell: Shell, text: str, first: ShellResult) -> str:
    """Look until ``text`` was printed; return everything that was."""
    output, result = first.output, first
    async with asyncio.timeout(SECONDS):
        while text not in output and result.exit_code is None:
            result = await shell.send("", wait=0.1)
            output += result.output
    return output


async def _start_sleep(shell: Shell) -> None:
    """Start a program that sleeps, and wait until it is in the foreground: a key before that is the shell's."""
    await _until(shell, "up", await shell.start(f"bash -c 'echo up; exec sleep {marker()}'", wait=0.05))


async def start_returns_while_it_runs(box: Sandbox) -> None:
    """Output so far, no exit code; then the rest, the code, and a free shell."""
    shell = await box.shell()
    first = await shell.start("echo begin; read answer; echo got $answer; (exit 5)", wait=0.05)
    assert first.exit_code is None, first
    assert "begin\n" in await _until(shell, "begin", first)
    last = await shell.send("yes\n", wait=SECONDS)
    assert (last.output, last.exit_code) == ("got yes\n", 5), last
    await usable(shell)


async def start_returns_at_once_when_done(box: Sandbox) -> None:
    """A short command does not use up its wait."""
    async with asyncio.timeout(SECONDS):
        result = await (await box.shell()).start("echo quick", wait=600)
    assert (result.output, result.exit_code) == ("quick\n", 0), result


async def a_program_can_be_talked_to(box: Sandbox) -> None:
    """A python REPL, line by line."""
    shell = await box.shell()
    output = await _until(shell, ">>>", await shell.start("python3 -q -i -c ''", wait=0.1))
    for line, answer in (("x = 20 + 1\n", ""), ("print(x * 2)\n", "42"), ("print('o' + 'k')\n", "ok")):
        output = await _until(shell, answer, await shell.send(line, wait=0.05))
        assert answer in output, (line, output)
    last = await shell.send("raise SystemExit(3)\n", wait=SECONDS)
    assert last.exit_code == 3, last
    await usable(shell)


async def one_command_at_a_time(box: Sandbox) -> None:
    """While one runs, another is refused in words, and does not run."""
    shell = await box.shell()
    await shell.start("cat", wait=0)
    refused = await run(shell, "touch should-not-exist")
    assert refused.exit_code is None and "still running" in refused.output, refused
    assert (await shell.send("C-d", wait=SECONDS)).exit_code == 0
    assert "should-not-exist" not in [entry.name for entry in await box.list_dir(".")]


async def nothing_is_typed_into_an_idle_shell(box: Sandbox) -> None:
    """Text without a reader is refused; it does not become input of the next command."""
    shell = await box.shell()
    await run(shell, "true")
    assert "nothing was typed" in (await shell.send("leak\n", wait=0)).output
    assert (await run(shell, 'read -t 0.1 line; echo "<$line>"')).output == "<>\n"


async def control_c_interrupts(box: Sandbox) -> None:
    """``C-c`` ends the job with 130; the shell keeps its state."""
    shell = await box.shell()
    await run(shell, "x=kept")
    await _start_sleep(shell)
    result = await shell.send("C-c", wait=SECONDS)
    assert result.exit_code == 130 and not result.timed_out, result
    assert (await run(shell, "echo $x")).output == "kept\n"


async def control_z_stops(box: Sandbox) -> None:
    """``C-z`` stops the job; ``kill %1`` removes it."""
    shell = await box.shell()
    await _start_sleep(shell)
    result = await shell.send("C-z", wait=SECONDS)
    assert result.exit_code == 128 + 20, result
    assert "Stopped" in result.output, result
    assert "Stopped" in (await run(shell, "jobs")).output
    await run(shell, "kill -9 %1; wait 2>/dev/null; true")
    await usable(shell)


async def keys_are_read_in_every_spelling(box: Sandbox) -> None:
    """``C-c`` and its relatives, alone, with or without blanks; as a part of a text they are text."""
    shell = await box.shell()
    for spelling in ("C-c", "C-C", " C-c ", "c-c\n", "^C", "^c", "ctrl+c", "Ctrl-C", "CTRL C", "<C-c>", "\x03"):
        await _start_sleep(shell)
        result = await shell.send(spelling, wait=SECONDS)
        assert result.exit_code == 130, (spelling, result)
    for spelling, code in (("C-\\", 128 + 3), ("^\\", 128 + 3), ("^Z", 128 + 20)):
        await _start_sleep(shell)
        assert (await shell.send(spelling, wait=SECONDS)).exit_code == code, spelling
    await run(shell, "kill -9 %%; wait 2>/dev/null; true")
    await shell.start("cat", wait=0.05)
    assert (await shell.send("^C is a key\n", wait=0.2)).output == "^C is a key\n"
    assert (await shell.send("ctrl+d", wait=SECONDS)).exit_code == 0


async def restart_ends_what_ignores_every_key(box: Sandbox) -> None:
    """A new shell with the last directory and exported variables; nothing of the old one lives on."""
    shell = await box.shell()
    await run(shell, "cd /usr; export KEPT=kept; lost=1")
    stubborn = "trap '' INT TSTP QUIT TERM HUP"
    seconds = marker()
    for command in (
        f"cd /; {stubborn}; echo begun; while :; do sleep {seconds}; done",
        f'sh -c "{stubborn}; setsid sleep {seconds} & echo begun; stty raw; sleep {seconds}; sleep {seconds}"',
        "echo begun; suspend -f",
        "echo begun; kill -STOP $$",
    ):
        output = await _until(shell, "begun", await shell.start(command, wait=0.05))
        assert "begun" in output, (command, output)
        for key in ("C-c", "C-z"):
            assert (await shell.send(key, wait=0.05)).exit_code is None, (command, key)
        result = await shell.restart()
        assert (result.exit_code, result.restarted, result.cwd) == (0, True, "/usr"), (command, result)
        assert await running(box, seconds) == 0, command
        result = await run(shell, "pwd; echo $KEPT$lost")
        assert (result.output, result.restarted) == ("/usr\nkept\n", False), (command, result)


async def restart_of_an_idle_shell(box: Sandbox) -> None:
    """It takes functions, options and jobs along; what was printed and not seen yet is in the answer."""
    shell = await box.shell()
    seconds = marker()
    await run(shell, f"cd /usr; f() {{ echo f; }}; set -f; sleep {seconds} &")
    result = await shell.restart()
    assert (result.exit_code, result.cwd) == (0, "/usr"), result
    assert await running(box, seconds) == 0
    assert (await run(shell, "type -t f; jobs; echo /us[r]")).output == "/usr\n"


async def background_jobs_do_not_hold_the_shell(box: Sandbox) -> None:
    """A job that keeps the terminal open: the command ends, later output is seen later."""
    shell = await box.shell()
    result = await run(shell, "(sleep 0.3; echo late) & echo now")
    assert "now\n" in result.output and result.exit_code == 0, result
    assert "late\n" in (await run(shell, "wait")).output


async def background_jobs_outlive_a_later_timeout(box: Sandbox) -> None:
    """Only what the timed-out command started is killed."""
    shell = await box.shell()
    old, new = marker(), marker()
    await run(shell, f"sleep {old} &")
    await asyncio.sleep(0.05)  # start times have ticks of 10 ms
    result = await run(shell, f"(trap '' INT; setsid sleep {new}) & sleep {new}", 0.3)
    assert result.timed_out, result
    assert await running(box, new) == 0
    assert await running(box, old) == 1


async def floods_while_nobody_looks_are_bounded(box: Sandbox) -> None:
    """A job that prints without end costs no memory, and the shell still answers."""
    shell = await box.shell()
    await run(shell, "yes flood &")
    await asyncio.sleep(0.3)
    result = await run(shell, "kill %1; wait 2>/dev/null; true")
    assert len(result.output) < box.spec.limits.output + 200, len(result.output)
    await usable(shell)


INTERACTION = (
    start_returns_while_it_runs,
    start_returns_at_once_when_done,
    a_program_can_be_talked_to,
    one_command_at_a_time,
    nothing_is_typed_into_an_idle_shell,
    control_c_interrupts,
    control_z_stops,
    keys_are_read_in_every_spelling,
    restart_ends_what_ignores_every_key,
    restart_of_an_idle_shell,
    background_jobs_do_not_hold_the_shell,
    background_jobs_outlive_a_later_timeout,
    floods_while_nobody_looks_are_bounded,
)
