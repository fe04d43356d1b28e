"""The persistent shell: state, results, commands that attack it, and commands that keep running and read input."""

import asyncio

from prorl_gym.sandbox.protocol import Sandbox, Shell, ShellResult
from prorl_gym.testing.sandbox.conformance._helpers import (
    TIMEOUT_SECONDS,
    assert_cancel_kills,
    assert_usable,
    count_processes,
    run_command,
    unique_sleep_seconds,
)


async def shell_keeps_state(box: Sandbox) -> None:
    """Directory, variables, functions, arrays, aliases and the last status."""
    shell = await box.shell()
    await run_command(
        shell, "cd /usr; x=5; f() { echo f$x; }; declare -A m; m[a]=1; alias hello='echo alias'; export E=e"
    )
    result = await run_command(shell, "pwd; f; echo ${m[a]}; hello; sh -c 'echo $E'; (exit 4)")
    assert result.output == "/usr\nf5\n1\nalias\ne\n", result
    assert (result.exit_code, result.cwd) == (4, "/usr"), result
    assert (await run_command(shell, "echo $?")).output == "4\n"


async def shell_starts_in_the_workdir(box: Sandbox) -> None:
    """The shell starts in the spec's directory, which the result contains."""
    result = await run_command(await box.shell(), "pwd")
    assert result.output.strip() == result.cwd == box.spec.workdir, result


async def shell_survives_syntax_errors(box: Sandbox) -> None:
    """Unterminated quotes and here-documents are errors, not hangs."""
    shell = await box.shell()
    for command in ("echo 'a", 'echo "', "if true; then", ")", "echo $(", "for"):
        result = await run_command(shell, command)
        assert result.exit_code not in (0, None) and not result.timed_out, (command, result)
    assert (await run_command(shell, "cat <<EOF\nbody")).exit_code == 0
    await assert_usable(shell)


async def shell_reports_the_exit_of_bash(box: Sandbox) -> None:
    """``exit 3`` is exit code 3 and a new shell in the same directory with the exported variables."""
    shell = await box.shell()
    await run_command(shell, "cd /usr; export KEPT='two words'; lost=1")
    result = await run_command(shell, "exit 3")
    assert (result.exit_code, result.restarted) == (3, True), result
    result = await run_command(shell, 'pwd; echo "$KEPT$lost"')
    assert (result.output, result.restarted) == ("/usr\ntwo words\n", False), result


async def shell_keeps_what_an_exit_left(box: Sandbox) -> None:
    """Directory and exported variables of the command that ends bash survive it, and the user's EXIT trap fires."""
    shell = await box.shell()
    await run_command(shell, "mkdir -p d; echo 'exit 3' > d/ends")
    for number, end in enumerate(("exit 3", ". ./ends", "set -e; (exit 3); echo not reached", "f() { exit 3; }; f")):
        result = await run_command(shell, f"cd {box.spec.workdir}/d; export KEPT='two\nwords {number}'; lost=1; {end}")
        assert (result.exit_code, result.restarted, result.state_kept) == (3, True, True), (end, result)
        assert result.cwd == f"{box.spec.workdir}/d", (end, result)
        result = await run_command(shell, 'pwd; echo "$KEPT$lost"; cd /')
        assert result.output == f"{box.spec.workdir}/d\ntwo\nwords {number}\n", (end, result)
    result = await run_command(shell, "trap 'echo bye' EXIT; exit 3")
    assert (result.output, result.exit_code, result.restarted) == ("bye\n", 3, True), result


async def shell_says_when_an_end_left_nothing(box: Sandbox) -> None:
    """``exec`` and SIGKILL take directory and variables along: those from before the command are back."""
    shell = await box.shell()
    await run_command(shell, "cd /usr; export KEPT=before")
    for end in ("exec true", "kill -9 $$", "trap - EXIT; exit 0"):
        result = await run_command(shell, f"cd /; export KEPT=after; {end}")
        assert (result.restarted, result.state_kept, result.cwd) == (True, False, "/usr"), (end, result)
        assert (await run_command(shell, "pwd; echo $KEPT")).output == "/usr\nbefore\n", end


async def shell_cannot_be_told_an_end(box: Sandbox) -> None:
    """A command that runs what reports an end, and does not end, goes on and has its own result."""
    shell = await box.shell()
    result = await run_command(shell, 'cd /; eval "$__prorl_bye"; (trap "$(trap -p EXIT)" EXIT); cd /usr; (exit 5)')
    assert (result.exit_code, result.cwd, result.restarted) == (5, "/usr", False), result
    await assert_usable(shell)


async def shell_traps_fire_as_in_bash(box: Sandbox) -> None:
    """ERR once for each command that fails, DEBUG once for each, that of ERR among them."""
    shell = await box.shell()
    await run_command(shell, "trap 'echo ERR $?' ERR")
    assert (await run_command(shell, "(exit 3)")).output == "ERR 3\n"
    assert (await run_command(shell, "echo $?")).output == "3\n"
    await run_command(shell, "trap 'echo DEBUG' DEBUG")
    assert (await run_command(shell, "false")).output == "DEBUG\nDEBUG\nERR 1\n"
    syntax_error = await run_command(shell, ")")
    assert "DEBUG" not in syntax_error.output and syntax_error.exit_code == 2, syntax_error
    assert (await run_command(shell, "false")).output == "DEBUG\nDEBUG\nERR 1\n"
    await run_command(shell, "trap - ERR DEBUG")
    assert (await run_command(shell, "echo $LINENO\nfalse\necho $LINENO")).output == "1\n3\n"


async def shell_is_ended_by_what_breaks_it(box: Sandbox) -> None:
    """A function named ``builtin``, disabled builtins: a new shell, no endless output."""
    shell = await box.shell()
    for command in ("builtin() { echo fooled; }", "builtin() { :; }", "enable -n printf read eval"):
        result = await run_command(shell, command)
        assert (result.exit_code, result.restarted) == (70, True) and len(result.output) < 1000, (command, result)
        assert (await run_command(shell, "echo fine")).output == "fine\n", command


async def shell_survives_its_own_death(box: Sandbox) -> None:
    """``exec`` and ``kill -9 $$`` end the command with the right code; the next one runs."""
    shell = await box.shell()
    result = await run_command(shell, "exec sh -c 'echo replaced; exit 9'")
    assert (result.output, result.exit_code, result.restarted) == ("replaced\n", 9, True), result
    result = await run_command(shell, "echo before; kill -9 $$")
    assert (result.output, result.exit_code, result.restarted) == ("before\n", 137, True), result
    await assert_usable(shell)


async def shell_notices_a_death_between_commands(box: Sandbox) -> None:
    """A bash that was killed while idle is replaced, and the next result reports it."""
    shell = await box.shell()
    pid = (await run_command(shell, "echo $$")).output.strip()
    assert (await box.exec(["kill", "-9", pid], timeout=TIMEOUT_SECONDS)).exit_code == 0
    await box.exec(["true"], timeout=TIMEOUT_SECONDS)  # by its end, the end of bash has been reported, too
    result = await run_command(shell, "echo hi")
    assert (result.output, result.restarted) == ("hi\n", True), result
    await assert_usable(shell)


async def shell_survives_loop_control(box: Sandbox) -> None:
    """``break``, ``continue`` and ``return`` outside of loops cannot derail it."""
    shell = await box.shell()
    for command in ("continue", "break", "break 5", "return 3", "continue 2", "echo a; break; echo b"):
        assert not (await run_command(shell, command, 5)).timed_out, command
    await assert_usable(shell)


async def shell_survives_settings(box: Sandbox) -> None:
    """Terminal modes, prompts, traps and options of a command do not break later ones."""
    shell = await box.shell()
    for command in (
        "stty -echo",
        "stty raw",
        "PS1='prompt> '; PS2=more",
        "PROMPT_COMMAND='echo prompted'",
        "trap 'true' DEBUG",
        "trap '' INT TERM HUP",
        "trap - INT TERM HUP DEBUG",
        "set -u",
        "set -f",
        "IFS=:",
        "TMOUT=1",
        "shopt -s extglob nullglob",
        "read() { echo fooled; }; printf() { echo fooled; }; eval() { :; }",
        "unset -f read printf eval; unset IFS",
        "set -o posix",
        "set +o posix",
    ):
        assert not (await run_command(shell, command, 5)).timed_out, command
        assert (await run_command(shell, "echo fine", 5)).output == "fine\n", command
    await assert_usable(shell)


async def shell_survives_errexit(box: Sandbox) -> None:
    """``set -e`` may end bash, but a failing command still reports its code and the next one runs."""
    shell = await box.shell()
    await run_command(shell, "set -e")
    result = await run_command(shell, "false; echo not reached")
    assert (result.output, result.exit_code, result.restarted) == ("", 1, True), result
    await assert_usable(shell)


async def shell_traces_the_command_only(box: Sandbox) -> None:
    """``set -x`` shows the user's commands, not the machinery."""
    shell = await box.shell()
    await run_command(shell, "set -x")
    output = (await run_command(shell, "true traced")).output
    assert output.strip("+ \n") == "true traced", output
    await run_command(shell, "set +x")
    await assert_usable(shell)


async def shell_is_not_fooled_by_terminal_bytes(box: Sandbox) -> None:
    """Printing what ends of commands look like elsewhere ends nothing."""
    shell = await box.shell()
    result = await run_command(
        shell, r"printf '\0000\000/\000'; printf '\001\002\004\003\032'; echo '###PS1END###'; (exit 6)"
    )
    assert result.exit_code == 6 and result.output.endswith("###PS1END###\n"), result
    await assert_usable(shell)


async def shell_survives_writes_to_every_descriptor(box: Sandbox) -> None:
    """Garbage on any descriptor is at worst a restart, never a wrong result afterwards."""
    shell = await box.shell()
    await run_command(
        shell, r"for i in {3..20} {195..210}; do { printf 'x\0007\000/\000' >&$i; } 2>/dev/null; done; true", 5
    )
    await assert_usable(shell)
    await run_command(shell, 'for i in {3..20} {195..210}; do eval "exec $i>&-" 2>/dev/null; done; true', 5)
    await assert_usable(shell)


async def shell_takes_long_commands(box: Sandbox) -> None:
    """20 kB on one line: far beyond what a terminal takes."""
    text = "x" * 20_000
    result = await run_command(await box.shell(), f"v='{text}'; echo ${{#v}}")
    assert result.output == "20000\n", result


async def shell_takes_many_lines(box: Sandbox) -> None:
    """Here-documents arrive byte for byte."""
    shell = await box.shell()
    body = "\n".join(f"line {n} }} \\ $x `y` \t é" for n in range(500)) + "\n"
    await run_command(shell, f"cat > body.txt <<'EOF'\n{body}EOF")
    assert (await box.read_file("body.txt")).decode() == body


async def shell_refuses_impossible_commands(box: Sandbox) -> None:
    """NUL bytes and megabytes are answered, not sent."""
    shell = await box.shell()
    assert (await run_command(shell, "echo a\0b")).exit_code == 126
    assert (await run_command(shell, "#" * (2 << 20))).exit_code == 126
    await assert_usable(shell)


async def shell_bounds_output(box: Sandbox) -> None:
    """Ten megabytes come back as head, marker and tail, quickly."""
    limit = box.spec.limits.output
    result = await run_command(
        await box.shell(), "echo first; head -c 10000000 /dev/zero | tr '\\0' x; echo; echo last"
    )
    assert result.exit_code == 0 and len(result.output) < limit + 200, result.exit_code
    assert result.output.startswith("first\n") and result.output.endswith("last\n")
    assert "bytes left out" in result.output


async def shell_decodes_anything(box: Sandbox) -> None:
    """Binary output is text with replacements; UTF-8 stays whole; CRLF is folded."""
    shell = await box.shell()
    assert "\ufffd" in (await run_command(shell, "head -c 4096 /dev/urandom")).output
    assert (await run_command(shell, "printf 'h\\xc3\\xa9\\r\\n\\xe2\\x82\\xac'")).output == "hé\n€"


async def shell_loses_no_output(box: Sandbox) -> None:
    """Output of every size is complete when the end is reported."""
    shell = await box.shell()
    for size in (0, 1, 100, 4095, 4096, 4097, 8191, 12000) * 8:
        result = await run_command(shell, f"printf '%*s' {size} ''")
        assert len(result.output) == size, (size, len(result.output))


async def shell_timeout_interrupts(box: Sandbox) -> None:
    """At the timeout the command gets SIGINT, and shell and state live on."""
    shell = await box.shell()
    await run_command(shell, "x=kept")
    for command in (
        f"sleep {unique_sleep_seconds()}",
        "while :; do :; done",
        f"while true; do sleep {unique_sleep_seconds()}; done",
    ):
        result = await run_command(shell, command, 0.3)
        assert result.timed_out and result.exit_code == 130 and not result.restarted, (command, result)
    assert (await run_command(shell, "echo $x")).output == "kept\n"


async def shell_timeout_kills_what_ignores_it(box: Sandbox) -> None:
    """SIGINT ignored, own sessions, double forks: killed; bash lives on."""
    shell = await box.shell()
    seconds = unique_sleep_seconds()
    await run_command(shell, "x=kept")
    script = f'trap "" INT; setsid sleep {seconds} & (setsid sleep {seconds} &) ; sleep {seconds}; sleep {seconds}'
    result = await run_command(shell, f"sh -c '{script}'", 0.3)
    assert result.timed_out and result.exit_code is not None, result
    assert await count_processes(box, seconds) == 0
    assert (await run_command(shell, "echo $x")).output == "kept\n"


async def shell_timeout_replaces_a_deaf_bash(box: Sandbox) -> None:
    """A bash that ignores everything is killed and replaced."""
    shell = await box.shell()
    result = await run_command(shell, "trap '' INT; while :; do :; done", 0.3)
    assert result.timed_out and result.restarted and result.exit_code == 137, result
    await assert_usable(shell)


async def shell_cancel_kills_the_tree(box: Sandbox) -> None:
    """A cancelled await leaves nothing of its command, and a usable shell."""
    shell = await box.shell()
    seconds = unique_sleep_seconds()
    await assert_cancel_kills(box, run_command(shell, f"setsid sleep {seconds} & sleep {seconds}"), seconds, 2)
    await assert_usable(shell)


async def shell_cancel_at_any_moment(box: Sandbox) -> None:
    """Cancelled right after its start, a command neither runs on nor confuses the next one."""
    shell = await box.shell()
    for turns in range(8):
        task = asyncio.ensure_future(run_command(shell, "echo cancelled; sleep 30"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await assert_usable(shell)


# --- programs that keep running ---------------------------------------------------------------------------------------


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
