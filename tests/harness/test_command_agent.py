"""What a program is given, what ends it, and what of it is kept; the sandbox is a fake that runs nothing."""

import asyncio
import errno
import json
from collections.abc import Sequence
from socket import socket
from typing import Any

import pytest
from fake_gateway import FakeGateway

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.agents.tools import FinishTool
from prorl_gym.environments.protocol import Episode
from prorl_gym.errors import EngineError, Evidence, FailureKind, Limit, LimitReached, RolloutError
from prorl_gym.harness.command import HOME, CommandAgent, CommandConfig
from prorl_gym.records import Message
from prorl_gym.sandbox.protocol import ExecResult, Sandbox
from prorl_gym.testing.sandbox.fake_sandbox import FakeSandbox, SandboxScript

PROMPT = (Message(role="system", content="Be brief."), Message(role="user", content="Add 1 and 1 for $5."))
SAID = (Message(role="user", content="prompt"), Message(role="assistant", content="<think>?</think>2"))


class Bench:
    """A sandbox with a gateway, and the agent's artifacts."""

    def __init__(self, result: ExecResult | None = None, messages: Sequence[Message] = SAID) -> None:
        self.result = result or ExecResult(0, b"", b"")
        self.box = FakeSandbox(script=SandboxScript(on_exec=self._exec))
        self.gateway = FakeGateway(messages)
        self.artifacts = Artifacts()

    def _exec(self, argv: Sequence[str], stdin: bytes) -> ExecResult:
        return ExecResult(0, b"printed", b"") if argv[0] == "tail" else self.result

    async def lease(self) -> Sandbox:
        return self.box

    async def run(self, command: CommandConfig, **episode: Any) -> None:
        made = {"messages": PROMPT, "tools": (FinishTool("Hand in the sum."),), "sandbox": self.lease, **episode}
        await CommandAgent(command, self.gateway).run(Episode(**made), self.artifacts)

    @property
    def launched(self) -> tuple[list[str], dict[str, str]]:
        """The command line and the environment of the program."""
        call = next(call for call in self.box.calls if call.method == "exec" and call.args[0][0] != "tail")
        return call.args[0], dict(call.options["env"])


async def test_placeholders_are_replaced_and_the_home_is_fixed():
    bench = Bench()
    await bench.run(
        CommandConfig(
            argv=("agent", "$task", "$$HOME"),
            env={"URL": "$url/v1", "KEY": "$token", "CONFIG": "$home/c"},
            files={"$home/c": "$model at $url, ${layer}"},
        )
    )
    argv, env = bench.launched
    url = f"http://127.0.0.1:{bench.gateway.port}"
    assert env == {"HOME": HOME, "URL": f"{url}/v1", "KEY": "secret", "CONFIG": f"{HOME}/c"}
    assert (argv[0], argv[4], argv[6]) == ("sh", "agent", "$HOME")
    assert argv[5].startswith("Be brief.\n\nAdd 1 and 1 for $5.\n\nUse your own tools")
    assert argv[5].endswith("Hand in the sum.")
    assert bench.box.files[f"{HOME}/c"].decode() == f"policy at {url}, /.prorl/agent"


async def test_setup_runs_before_the_program_in_bash():
    bench = Bench()
    await bench.run(CommandConfig(argv=("agent",)), setup="conda activate x")
    argv, _ = bench.launched
    assert argv[:2] == ["bash", "-c"]
    assert argv[2].startswith('conda activate x\n"$@" ')


async def test_what_a_command_line_cannot_carry_is_left_out():
    bench = Bench()
    odd = (Message(role="user", content="a\0b"), Message(role="user", content="\ud800"))
    await bench.run(CommandConfig(argv=("agent", "$task"), task="$prompt"), messages=odd, tools=())
    assert bench.launched[0][5] == "ab\n\n?"


async def test_conversation_answer_and_log_are_kept_whatever_the_exit_code():
    bench = Bench(ExecResult(3, b"", b""))
    await bench.run(CommandConfig(argv=("agent",)))
    assert bench.artifacts.messages == list(SAID)
    assert (bench.artifacts.answer, bench.artifacts.prompt_messages) == ("2", 1)
    assert bench.artifacts.log == "printed\n[The program ended with exit code 3.]"
    assert bench.gateway.serving_count == 0


@pytest.mark.parametrize(
    ("file", "keys", "answer"),
    [
        ("3", (), "3"),
        (json.dumps({"info": {"answer": "4"}}), ("info", "answer"), "4"),
        (json.dumps({"info": {"answer": 4}}), ("info", "answer"), "2"),
        ("[" * 100_000, ("info", "answer"), "2"),
        ("", (), "2"),
        (None, (), "2"),
    ],
)
async def test_an_answer_file_goes_before_the_last_text(file: str | None, keys: tuple[str, ...], answer: str):
    bench = Bench()
    if file is not None:
        bench.box.files[f"{HOME}/answer"] = file.encode()
    await bench.run(CommandConfig(argv=("agent",), answer_file="$home/answer", answer_key=keys))
    assert bench.artifacts.answer == answer
    assert (f"not of {HOME}/answer" in bench.artifacts.log) is (answer == "2")


@pytest.mark.parametrize(
    ("code", "kind"),
    [(0, FailureKind.SANDBOX_UNAVAILABLE), (1, FailureKind.SANDBOX_UNAVAILABLE), (127, FailureKind.IMAGE_BROKEN)],
)
async def test_a_program_that_never_calls_the_model_is_no_zero(code: int, kind: FailureKind):
    bench = Bench(ExecResult(code, b"", b""), messages=())
    with pytest.raises(RolloutError, match="no model call: printed") as caught:
        await bench.run(CommandConfig(argv=("agent",)))
    assert caught.value.kind is kind


@pytest.mark.parametrize(
    "why",
    [LimitReached(Limit.TURNS), EngineError(FailureKind.ENGINE_UNREACHABLE, "No engine.")],
    ids=["limit", "engine"],
)
async def test_when_the_gateway_stops_the_program_is_killed(why: Exception, monkeypatch: pytest.MonkeyPatch):
    bench, killed = Bench(), asyncio.Event()

    async def endless(argv: Sequence[str], **options: Any) -> ExecResult:
        if argv[0] == "tail":
            return ExecResult(0, b"printed", b"")
        bench.gateway.stopped.set_result(why)
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            killed.set()

    monkeypatch.setattr(bench.box, "exec", endless)
    with pytest.raises(type(why)):
        await bench.run(CommandConfig(argv=("agent",)))
    assert killed.is_set()
    assert bench.artifacts.answer == "2"
    assert bench.artifacts.log == "printed\n[The program was stopped.]"


async def test_a_program_killed_from_outside_is_nobodys_policy():
    bench = Bench(ExecResult(137, b"", b"", kill_evidence=Evidence.PROGRAM_KILLED_OUTSIDE))
    with pytest.raises(RolloutError) as caught:
        await bench.run(CommandConfig(argv=("agent",)))
    assert caught.value.evidence is Evidence.PROGRAM_KILLED_OUTSIDE


async def test_a_task_that_no_command_line_can_carry_is_refused():
    bench = Bench()
    long = (Message(role="user", content="x" * (100 << 10)),)
    with pytest.raises(RolloutError) as caught:
        await bench.run(CommandConfig(argv=("agent", "$task")), messages=long)
    assert caught.value.kind is FailureKind.PROMPT_TOO_LONG
    await bench.run(CommandConfig(argv=("agent",), files={"$home/task": "$task"}), messages=long)
    assert len(bench.box.files[f"{HOME}/task"]) > 100 << 10


async def test_an_environment_without_a_sandbox_takes_no_program():
    with pytest.raises(RolloutError) as caught:
        await Bench().run(CommandConfig(argv=("agent",)), sandbox=None)
    assert caught.value.kind is FailureKind.BAD_ROW


async def test_another_port_is_taken_where_the_usual_one_is_in_use(monkeypatch: pytest.MonkeyPatch):
    bench, asked = Bench(), []
    listen = bench.box.listen

    async def taken(port: int) -> socket:
        asked.append(port)
        if port:
            raise OSError(errno.EADDRINUSE, "in use")
        return await listen(port)

    monkeypatch.setattr(bench.box, "listen", taken)
    await bench.run(CommandConfig(argv=("agent",)))
    assert asked == [18080, 0]


@pytest.mark.parametrize("when", ["before it runs", "while it runs", "after its end"])
async def test_a_lost_sandbox_is_no_measurement(when: str, monkeypatch: pytest.MonkeyPatch):
    bench = Bench()
    execute = bench.box.exec

    async def lose(argv: Sequence[str], **options: Any) -> ExecResult:
        if when == "while it runs" or argv[0] == "tail":
            bench.box.mark_lost()
        return await execute(argv, **options)

    monkeypatch.setattr(bench.box, "exec", lose)
    if when == "before it runs":
        bench.box.mark_lost()
    with pytest.raises(RolloutError) as caught:
        await bench.run(CommandConfig(argv=("agent",)))
    assert caught.value.kind is FailureKind.SANDBOX_LOST
    assert bench.artifacts.messages == list(SAID)
