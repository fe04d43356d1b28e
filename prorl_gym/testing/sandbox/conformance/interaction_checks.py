"""Commands that keep running: programs that read input, background jobs, control keys."""

import asyncio

from prorl_gym.sandbox.protocol import Sandbox, Shell, ShellResult
from prorl_gym.testing.sandbox.conformance._helpers import (
    TIMEOUT_SECONDS,
    assert_usable,
    count_processes,
    run_command,
    unique_sleep_seconds,
)


async def _read_until(shell: Shell, text: str, first: ShellResult) -> str:
    """Look until ``text`` was printed; return everything that was."""
    output, result = first.output, first
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while text not in output and result.exit_code is None:
            result = await shell.send_input("", wait=0.1)
            output += result.output
    return output


async def _start_sleep(shell: Shell) -> None:
    """Start a program that sleeps, and wait until it is in the foreground: a key before that is the shell's."""
    # Until the exec it is a bash, which ignores SIGQUIT unless it has a trap.
    program = f"bash -c 'trap \"exit 131\" QUIT; echo up; exec sleep {unique_sleep_seconds()}'"
    await _read_until(shell, "up", await shell.start_command(program, wait=0.05))


async def start_returns_while_it_runs(box: Sandbox) -> None:
    """Output so far, no exit code; then the rest, the code, and a free shell."""
    shell = await box.shell()
    first = await shell.start_command("echo begin; read answer; echo got $answer; (exit 5)", wait=0.05)
    assert first.exit_code is None, first
    assert "begin\n" in await _read_until(shell, "begin", first)
    last = await shell.send_input("yes\n", wait=TIMEOUT_SECONDS)
    assert (last.output, last.exit_code) == ("got yes\n", 5), last
    await assert_usable(shell)


async def start_returns_at_once_when_done(box: Sandbox) -> None:
    """A short command does not use up its wait."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        result = await (await box.shell()).start_command("echo quick", wait=600)
    assert (result.output, result.exit_code) == ("quick\n", 0), result


async def a_program_can_be_talked_to(box: Sandbox) -> None:
    """A python REPL, line by line."""
    shell = await box.shell()
    output = await _read_until(shell, ">>>", await shell.start_command("python3 -q -i -c ''", wait=0.1))
    for line, answer in (("x = 20 + 1\n", ""), ("print(x * 2)\n", "42"), ("print('o' + 'k')\n", "ok")):
        output = await _read_until(shell, answer, await shell.send_input(line, wait=0.05))
        assert answer in output, (line, output)
    last = await shell.send_input("raise SystemExit(3)\n", wait=TIMEOUT_SECONDS)
    assert last.exit_code == 3, last
    await assert_usable(shell)


async def one_command_at_a_time(box: Sandbox) -> None:
    """While one runs, another is refused in words, and does not run."""
    shell = await box.shell()
    await shell.start_command("cat", wait=0)
    refused = await run_command(shell, "touch should-not-exist")
    assert refused.exit_code is None and "still running" in refused.output, refused
    assert (await shell.send_input("C-d", wait=TIMEOUT_SECONDS)).exit_code == 0
    assert "should-not-exist" not in [entry.name for entry in await box.list_dir(".")]


async def nothing_is_typed_into_an_idle_shell(box: Sandbox) -> None:
    """Text without a reader is refused; it does not become input of the next command."""
    shell = await box.shell()
    await run_command(shell, "true")
    assert "nothing was typed" in (await shell.send_input("leak\n", wait=0)).output
    assert (await run_command(shell, 'read -t 0.1 line; echo "<$line>"')).output == "<>\n"


async def control_c_interrupts(box: Sandbox) -> None:
    """``C-c`` ends the job with 130; the shell keeps its state."""
    shell = await box.shell()
    await run_command(shell, "x=kept")
    await _start_sleep(shell)
    result = await shell.send_input("C-c", wait=TIMEOUT_SECONDS)
    assert result.exit_code == 130 and not result.timed_out, result
    assert (await run_command(shell, "echo $x")).output == "kept\n"


async def control_z_stops(box: Sandbox) -> None:
    """``C-z`` stops the job; ``kill %1`` removes it."""
    shell = await box.shell()
    await _start_sleep(shell)
    result = await shell.send_input("C-z", wait=TIMEOUT_SECONDS)
    assert result.exit_code == 128 + 20, result
    assert "Stopped" in result.output, result
    assert "Stopped" in (await run_command(shell, "jobs")).output
    await run_command(shell, "kill -9 %1; wait 2>/dev/null; true")
    await assert_usable(shell)


async def keys_are_read_in_every_spelling(box: Sandbox) -> None:
    """``C-c`` and its relatives, alone, with or without blanks; as a part of a text they are text."""
    shell = await box.shell()
    for spelling in ("C-c", "C-C", " C-c ", "c-c\n", "^C", "^c", "ctrl+c", "Ctrl-C", "CTRL C", "<C-c>", "\x03"):
        await _start_sleep(shell)
        result = await shell.send_input(spelling, wait=TIMEOUT_SECONDS)
        assert result.exit_code == 130, (spelling, result)
    for spelling, code in (("C-\\", 128 + 3), ("^\\", 128 + 3), ("^Z", 128 + 20)):
        await _start_sleep(shell)
        assert (await shell.send_input(spelling, wait=TIMEOUT_SECONDS)).exit_code == code, spelling
    await run_command(shell, "kill -9 %%; wait 2>/dev/null; true")
    await shell.start_command("cat", wait=0.05)
    assert (await shell.send_input("^C is a key\n", wait=0.2)).output == "^C is a key\n"
    assert (await shell.send_input("ctrl+d", wait=TIMEOUT_SECONDS)).exit_code == 0


async def restart_ends_what_ignores_every_key(box: Sandbox) -> None:
    """A new shell with the last directory and exported variables; nothing of the old one lives on."""
    shell = await box.shell()
    await run_command(shell, "cd /usr; export KEPT=kept; lost=1")
    stubborn = "trap '' INT TSTP QUIT TERM HUP"
    seconds = unique_sleep_seconds()
    for command in (
        f"cd /; {stubborn}; echo begun; while :; do sleep {seconds}; done",
        f'sh -c "{stubborn}; setsid sleep {seconds} & echo begun; stty raw; sleep {seconds}; sleep {seconds}"',
        "echo begun; suspend -f",
        "echo begun; kill -STOP $$",
    ):
        output = await _read_until(shell, "begun", await shell.start_command(command, wait=0.05))
        assert "begun" in output, (command, output)
        for key in ("C-c", "C-z"):
            assert (await shell.send_input(key, wait=0.05)).exit_code is None, (command, key)
        result = await shell.restart()
        assert (result.exit_code, result.restarted, result.cwd) == (0, True, "/usr"), (command, result)
        assert await count_processes(box, seconds) == 0, command
        result = await run_command(shell, "pwd; echo $KEPT$lost")
        assert (result.output, result.restarted) == ("/usr\nkept\n", False), (command, result)


async def restart_of_an_idle_shell(box: Sandbox) -> None:
    """It takes functions, options and jobs along; what was printed and not seen yet is in the answer."""
    shell = await box.shell()
    seconds = unique_sleep_seconds()
    await run_command(shell, f"cd /usr; f() {{ echo f; }}; set -f; sleep {seconds} &")
    result = await shell.restart()
    assert (result.exit_code, result.cwd) == (0, "/usr"), result
    assert await count_processes(box, seconds) == 0
    assert (await run_command(shell, "type -t f; jobs; echo /us[r]")).output == "/usr\n"


async def background_jobs_do_not_hold_the_shell(box: Sandbox) -> None:
    """A job that keeps the terminal open: the command ends, later output is seen later."""
    shell = await box.shell()
    result = await run_command(shell, "(sleep 0.3; echo late) & echo now")
    assert "now\n" in result.output and result.exit_code == 0, result
    assert "late\n" in (await run_command(shell, "wait")).output


async def background_jobs_outlive_a_later_timeout(box: Sandbox) -> None:
    """Only what the timed-out command started is killed."""
    shell = await box.shell()
    old, new = unique_sleep_seconds(), unique_sleep_seconds()
    await run_command(shell, f"sleep {old} &")
    await asyncio.sleep(0.05)  # start times have ticks of 10 ms
    result = await run_command(shell, f"(trap '' INT; setsid sleep {new}) & sleep {new}", 0.3)
    assert result.timed_out, result
    assert await count_processes(box, new) == 0
    assert await count_processes(box, old) == 1


async def floods_while_nobody_looks_are_bounded(box: Sandbox) -> None:
    """A job that prints without end costs no memory, and the shell still answers."""
    shell = await box.shell()
    await run_command(shell, "yes flood &")
    await asyncio.sleep(0.3)
    result = await run_command(shell, "kill %1; wait 2>/dev/null; true")
    assert len(result.output) < box.spec.limits.output + 200, len(result.output)
    await assert_usable(shell)


INTERACTION_CHECKS = (
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
