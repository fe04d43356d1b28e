"""The tools: what they ask of the sandbox, and how they tell the model."""

import pytest
from scripted_sandbox import ScriptedSandbox, done, lost

from prorl_gym.agents.tools import BashTool, FinishTool, PythonTool
from prorl_gym.agents.tools.bash import INPUT_SECONDS
from prorl_gym.errors import Cause, FailureKind, SandboxError
from prorl_gym.sandbox.protocol import CellResult


def bash(*answers: object, alive: bool = True) -> tuple[BashTool, ScriptedSandbox]:
    sandbox = ScriptedSandbox(answers, alive=alive)
    return BashTool(sandbox.lease, 30.0), sandbox


def python(*answers: object, alive: bool = True) -> tuple[PythonTool, ScriptedSandbox]:
    sandbox = ScriptedSandbox(answers, alive=alive)
    return PythonTool(sandbox.lease, 30.0), sandbox


async def test_no_sandbox_before_the_first_call():
    tool, sandbox = bash(done("hi\n"))
    assert tool.spec.name == "bash"
    assert sandbox.leases == 0
    await tool({"command": "echo hi"})
    assert sandbox.leases == 1


async def test_command_reports_output_directory_and_exit_code():
    tool, sandbox = bash(done("hi\n", 3))
    said = await tool({"command": "echo hi; false"})
    assert sandbox.asked == [("start", "echo hi; false", 30.0)]
    assert said.text == "hi\n[Current working directory: /workspace]\n[Command finished with exit code 3]"
    assert said.answer is None


async def test_restart_and_stop_are_reported():
    tool, _ = bash(done("", 1, restarted=True, timed_out=True))
    said = await tool({"command": "exit 1"})
    assert "started again" in said.text
    assert "stopped after 30 seconds" in said.text


async def test_running_command_can_be_polled_typed_into_and_interrupted():
    tool, sandbox = bash(done("name? ", None), done("", None), done("hello bob\n", None), done("^C\n", 130))
    first = await tool({"command": "./greet"})
    assert "still running" in first.text
    await tool({"command": ""})
    await tool({"command": "bob", "is_input": True})
    last = await tool({"command": "C-c"})
    assert sandbox.asked[1:] == [
        ("send", "", 30.0),
        ("send", "bob\n", INPUT_SECONDS),
        ("send", "C-c", INPUT_SECONDS),
    ]
    assert last.text.endswith("[Command finished with exit code 130]")


@pytest.mark.parametrize(
    "spelling", ["C-c", "C-C", " C-c ", "C-c\n", "^C", "ctrl+c", "Ctrl-C", "C-\\", "C-d", "C-z", "\x03"]
)
@pytest.mark.parametrize("typed", [{}, {"is_input": True}])
async def test_key_is_pressed_and_not_run(spelling: str, typed: dict[str, object]):
    tool, sandbox = bash(done("", None), done("", 130))
    await tool({"command": "sleep 100"})
    await tool({"command": spelling, **typed})
    assert sandbox.asked[1] == ("send", spelling, INPUT_SECONDS)


@pytest.mark.parametrize("spelling", ["C-c", "^C", "ctrl+d", "C-\\"])
@pytest.mark.parametrize("typed", [{}, {"is_input": True}])
async def test_key_with_nothing_running_is_not_run(spelling: str, typed: dict[str, object]):
    tool, sandbox = bash()
    assert (await tool({"command": spelling, **typed})).text == (
        "Nothing is running, so the key was not sent. Send a command."
    )
    assert sandbox.leases == 0


async def test_silent_command_is_reported_as_such():
    tool, _ = bash(done("", None), done("tick\n", None))
    assert "still running. It has printed nothing since the last look." in (await tool({"command": "sleep 100"})).text
    assert "printed nothing" not in (await tool({"command": ""})).text


@pytest.mark.parametrize("arguments", [{"restart": True}, {"command": "", "restart": True, "is_input": True}])
async def test_restart_frees_a_shell_that_is_held(arguments: dict[str, object]):
    tool, sandbox = bash(done("", None), done("tick\n", restarted=True), done("back\n"))
    assert "restart=true" in (await tool({"command": "./ignores-keys"})).text
    assert "restart=true" in (await tool({"command": "ls"})).text
    said = (await tool(arguments)).text
    assert said.startswith("tick\n[The shell was restarted") and "exit code" not in said
    assert (await tool({"command": "echo back"})).text.startswith("back\n")
    assert [asked[0] for asked in sandbox.asked] == ["start", "restart", "start"]


async def test_restart_runs_no_command():
    tool, sandbox = bash(done(restarted=True))
    assert (
        "[The command was not run. Send it without restart.]" in (await tool({"command": "ls", "restart": True})).text
    )
    assert sandbox.asked == [("restart",)]


@pytest.mark.parametrize(
    ("kept", "words"), [(True, "variables that it had at its end"), (False, "variables from before this command")]
)
async def test_what_a_new_shell_has_is_said(kept: bool, words: str):
    tool, _ = bash(done("", 3, restarted=True, state_kept=kept))
    assert words in (await tool({"command": "exit 3"})).text


async def test_second_command_is_refused_while_one_runs():
    tool, sandbox = bash(done("", None))
    await tool({"command": "sleep 100"})
    said = await tool({"command": "ls"})
    assert "still running" in said.text
    assert len(sandbox.asked) == 1


@pytest.mark.parametrize("arguments", [{"command": ""}, {"command": " \n"}, {"command": "y", "is_input": True}, {}])
async def test_nothing_running_is_said_without_a_sandbox(arguments: dict[str, object]):
    tool, sandbox = bash()
    assert (await tool(arguments)).text.startswith("Nothing is running")
    assert sandbox.leases == 0


async def test_nul_is_refused():
    tool, sandbox = bash()
    assert "NUL" in (await tool({"command": "echo a\0b"})).text
    assert sandbox.asked == []


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (CellResult("42\n", True), "42"),
        (CellResult("", True), "[No output.]"),
        (CellResult("ValueError: x", False), "ValueError: x"),
        (CellResult("", True, images=(b"png", b"png")), "[2 figure(s) were drawn; they cannot be shown here.]"),
        (CellResult("tick\n", False, timed_out=True), "tick\n[The code was stopped after 30 seconds.]"),
        (
            CellResult("", False, restarted=True),
            "[The Python session ended and was started again: its variables are lost.]",
        ),
    ],
)
async def test_cell_is_described(result: CellResult, text: str):
    tool, sandbox = python(result)
    assert (await tool({"code": "6*7"})).text == text
    assert sandbox.asked == [("run", "6*7", 30.0)]


async def test_finish_answers():
    assert (await FinishTool()({"answer": " 4 "})).answer == " 4 "


@pytest.mark.parametrize("make", [bash, python])
async def test_sandbox_that_still_answers_was_broken_by_the_agent(make):
    tool, _ = make(lost(), alive=True)
    with pytest.raises(SandboxError) as caught:
        await tool({"command": "kill -9 -1", "code": "x"})
    assert caught.value.kind is FailureKind.SANDBOX_BROKEN_BY_AGENT
    assert caught.value.cause is Cause.POLICY


@pytest.mark.parametrize("make", [bash, python])
async def test_silent_sandbox_is_infrastructure(make):
    tool, _ = make(lost(), alive=False)
    with pytest.raises(SandboxError) as caught:
        await tool({"command": "ls", "code": "x"})
    assert caught.value.kind is FailureKind.SANDBOX_LOST
    assert caught.value.retryable


async def test_named_cause_is_kept():
    tool, _ = bash(SandboxError(FailureKind.SANDBOX_LIMIT, "The disk is full."), alive=True)
    with pytest.raises(SandboxError) as caught:
        await tool({"command": "cat /dev/zero > f"})
    assert caught.value.kind is FailureKind.SANDBOX_LIMIT


async def test_failed_start_is_not_blamed_on_the_agent():
    async def no_sandbox() -> ScriptedSandbox:
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, "No backend.")

    with pytest.raises(SandboxError) as caught:
        await BashTool(no_sandbox, 1.0)({"command": "ls"})
    assert caught.value.kind is FailureKind.SANDBOX_UNAVAILABLE
