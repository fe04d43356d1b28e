"""An agent that is a program: it runs in the agent's sandbox and calls the model at a port of the sandbox's loopback.

The port is a listening socket of the sandbox that this process accepts on, so a sandbox without a network reaches the
gateway and nothing else. What the program prints, its exit code and the files in its home are for people: only the
gateway's record and the state of the sandbox are graded.
"""

import asyncio
import json
import logging
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from errno import EADDRINUSE
from signal import SIGKILL
from socket import socket
from string import Template
from typing import Annotated, Any, Protocol, cast

from pydantic import Field

from prorl_gym.agents.loop import strip_thinking
from prorl_gym.agents.protocol import AgentTask, Artifacts, Tool
from prorl_gym.agents.tools.agent_sandbox import agent_action
from prorl_gym.config import ConfigModel
from prorl_gym.errors import FailureKind, SandboxError, TaskError
from prorl_gym.records import Message
from prorl_gym.sandbox.protocol import ExecResult, Mount, Sandbox

_LOG = logging.getLogger(__name__)

HOME = "/home/agent"
"""Home of the program: the same in every rollout, since prompts of programs name it, and outside of any task."""
LAYER = "/.prorl/agent"
"""Where the layer of a preset is mounted."""
MODEL_PORT = 18080
"""Port of the gateway, on 127.0.0.1 inside: the same in every rollout, unless the task's own setup has taken it."""
MODEL = "policy"
"""Name of the model in requests. The gateway takes any."""

_OUTPUT = f"{HOME}/.agent.log"
_MAX_LOG = 16 << 10
"""Bytes kept of what the program printed: the end."""
_MAX_ANSWER = 4 << 20
"""Bytes of the largest answer file that is read; graders have narrower limits."""
_MAX_ARGUMENTS = 96 << 10
"""Bytes of arguments and environment that a sandbox starts a program with."""
_CLOSE_SECONDS = 20.0
"""For reading log and answer after the end."""
_UNSTARTABLE = (126, 127)
"""Exit codes of programs that cannot be started, as shells report them."""

_PROMPT = (
    "$prompt\n\nUse your own tools in place of the ones that are named above. Where you are told to call finish, end "
    "with a message that holds your whole answer instead: $answer"
)


class CommandConfig(ConfigModel):
    """A program that works as an agent.

    In ``argv``, ``env`` and ``files``, ``$task``, ``$url``, ``$token``, ``$model``, ``$home`` and ``$layer`` are
    replaced, and ``$$`` is a dollar sign. It runs in the task's working directory, with its input closed.
    """

    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    """Program and arguments; no shell reads them."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment variables beside ``HOME``. ``$url`` is the gateway's address, without a path; ``$token`` opens it."""
    files: dict[str, str] = Field(default_factory=dict[str, str])
    """Text of files, by their path inside the sandbox, for example ``$home/.codex/config.toml``."""
    mounts: dict[str, str] = Field(default_factory=dict[str, str])
    """Read-only directories: path on this host, by the path inside. The sandboxes' uid must be able to read them."""
    task: str = ""
    """What ``$task`` is, made of ``$prompt``, the messages of the environment, and ``$answer``, what to hand in. By
    default the messages, and that an answer is handed in as the last message."""
    answer_file: str = ""
    """File that the program leaves its answer in; without one, the last text of the main conversation is the answer."""
    answer_key: tuple[str, ...] = ()
    """Where the answer is in that file, if it is JSON: a key for each level."""

    def sandbox_mounts(self) -> tuple[Mount, ...]:
        """Return its mounts in the form that sandboxes take."""
        return tuple(Mount(source, target) for target, source in self.mounts.items())


class ModelGateway(Protocol):
    """The model API of one rollout, as a program in its sandbox reaches it."""

    @property
    def token(self) -> str:
        """Bearer token, which opens this rollout only."""
        ...

    def serving(self, listener: socket) -> AbstractAsyncContextManager[object]:
        """Serve what connects to a listening socket, which it owns, for the block; cut all connections at its end."""
        ...

    async def wait_stopped(self) -> Exception:
        """Wait until no call is answered any more, and return why: ``LimitReached`` or ``RolloutError``."""
        ...

    def conversation(self) -> tuple[Sequence[Message], int]:
        """Return the main conversation so far, and how many of its messages came before the first sampled turn.

        Without sub-agents and side calls; empty before the first call.
        """
        ...


class CommandAgent:
    """Implements ``Agent``.

    Args:
        command: the program.
        gateway: the model API of this rollout.
    """

    def __init__(self, command: CommandConfig, gateway: ModelGateway) -> None:
        self._command = command
        self._gateway = gateway

    async def run(self, task: AgentTask, artifacts: Artifacts) -> None:
        """Run the program until it ends, or until the gateway answers no more calls. See ``Agent.run``.

        Raises:
            TaskError: ``BAD_ROW``, the environment has no sandbox for it; ``PROMPT_TOO_LONG``; ``IMAGE_BROKEN``, the
                image cannot start it.
            SandboxError: the sandbox is lost; ``SANDBOX_UNAVAILABLE``, the program ended without a call of the model.
        """
        if task.sandbox is None:
            what = "The environment lends no sandbox to an agent program."
            raise TaskError(FailureKind.BAD_ROW, what, "Leave the setting 'agent' empty, or set Episode.sandbox.")
        async with agent_action(task.sandbox) as sandbox:
            try:
                await self._run_in(sandbox, task, artifacts)
            finally:
                _record_conversation(*self._gateway.conversation(), artifacts)
                await self._collect(sandbox, artifacts)
            self._require_calls(artifacts)

    async def _run_in(self, sandbox: Sandbox, task: AgentTask, artifacts: Artifacts) -> None:
        listener = await _listen(sandbox)
        names = {
            "task": _fill(
                self._command.task or _PROMPT, {"prompt": _prompt_text(task), "answer": _what_to_hand_in(task.tools)}
            ),
            "url": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "token": self._gateway.token,
            "model": MODEL,
            "home": HOME,
            "layer": LAYER,
        }
        argv = _launch([_fill(argument, names) for argument in self._command.argv], task.setup)
        env = {"HOME": HOME, **{name: _fill(value, names) for name, value in self._command.env.items()}}
        async with self._gateway.serving(listener):
            _check_size(argv, env)
            await _write(sandbox, _OUTPUT, "")
            for path, text in self._command.files.items():
                await _write(sandbox, _fill(path, names), _fill(text, names))
            artifacts.log = "[The program was stopped.]"
            ended = await self._watch(sandbox, argv, env)
        artifacts.log = f"[The program ended with exit code {ended.exit_code}.]"
        if ended.exit_code == 128 + SIGKILL and ended.sigkill_evidence is not None:
            raise SandboxError.from_evidence(ended.sigkill_evidence, "The agent program was killed from outside.")

    async def _watch(self, sandbox: Sandbox, argv: Sequence[str], env: Mapping[str, str]) -> ExecResult:
        """Return how the program ended; raise why the gateway stopped, and kill the program then."""
        # The stage's deadline ends it, which stops while the engines let it wait.
        program = asyncio.ensure_future(sandbox.exec(argv, timeout=float("inf"), env=env))
        stopped = asyncio.ensure_future(self._gateway.wait_stopped())
        try:
            await asyncio.wait({program, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                raise stopped.result()
            return program.result()
        finally:
            stopped.cancel()
            program.cancel()  # which kills what still runs, with everything below it
            await asyncio.wait({program, stopped})

    async def _collect(self, sandbox: Sandbox, artifacts: Artifacts) -> None:
        """Read log and answer file. A sandbox that is gone or does not answer only costs these."""
        with suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                printed = (await sandbox.exec(["tail", "-c", str(_MAX_LOG), _OUTPUT], timeout=_CLOSE_SECONDS)).stdout
                artifacts.log = f"{printed[-_MAX_LOG:].decode('utf-8', 'replace')}\n{artifacts.log}".strip()
                if answer := await self._read_answer(sandbox):
                    artifacts.answer = answer

    async def _read_answer(self, sandbox: Sandbox) -> str:
        if not self._command.answer_file:
            return ""
        try:
            text = (await sandbox.read_file(self._command.answer_file, limit=_MAX_ANSWER)).decode("utf-8", "replace")
        except OSError:  # it wrote none
            return ""
        return _value_at(text, self._command.answer_key) if self._command.answer_key else text

    def _require_calls(self, artifacts: Artifacts) -> None:
        """Raise if the model was never called: the policy has done nothing that a reward could measure."""
        if artifacts.messages:
            return
        _LOG.warning("an agent program made no model call:\n%s", artifacts.log)
        said = artifacts.log.splitlines()[-2:]
        what = f"The agent program {self._command.argv[0]} made no model call: {' '.join(said)[-300:]}"
        if any(f"exit code {code}." in said[-1] for code in _UNSTARTABLE if said):
            raise TaskError(FailureKind.IMAGE_BROKEN, what, "Check that the sandbox's image can run it.")
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Run it by hand in a sandbox of this image.")


def _fill(text: str, names: Mapping[str, str]) -> str:
    return Template(text).safe_substitute(names)


def _prompt_text(task: AgentTask) -> str:
    """Return the messages as one text that a program can be given: without zero bytes and half surrogate pairs."""
    text = "\n\n".join(message.content.strip() for message in task.messages if message.content.strip())
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _what_to_hand_in(tools: Sequence[Tool]) -> str:
    """Return what the tool ``finish`` says about the answer."""
    return next((tool.spec.description for tool in tools if tool.spec.name == "finish"), "Say in short what you did.")


def _launch(argv: Sequence[str], setup: str) -> list[str]:
    """Return the command that runs a program with its output in a file, after the environment's setup."""
    start = 'exec "$@" > "$0" 2>&1'
    return [*(["bash", "-c", f"{setup}\n{start}"] if setup else ["sh", "-c", start]), _OUTPUT, *argv]


def _check_size(argv: Sequence[str], env: Mapping[str, str]) -> None:
    size = sum(len(text.encode(errors="replace")) + 1 for text in (*argv, *env, *env.values()))
    if size > _MAX_ARGUMENTS:
        what = f"The task is too long for the arguments of an agent program: {size} of {_MAX_ARGUMENTS} bytes."
        raise TaskError(FailureKind.PROMPT_TOO_LONG, what, "Give it '$task' in one of its 'files'.")


async def _listen(sandbox: Sandbox) -> socket:
    try:
        return await sandbox.listen(MODEL_PORT)
    except OSError as error:
        if error.errno != EADDRINUSE:
            raise
    return await sandbox.listen(0)


async def _write(sandbox: Sandbox, path: str, text: str) -> None:
    try:
        await sandbox.write_file(path, text.encode("utf-8", "replace"))
    except OSError as error:
        what = f"The agent's file {posixpath.join('/', path)} cannot be written: {error.strerror}."
        raise TaskError(FailureKind.IMAGE_BROKEN, what, "Check the path, and what the image has there.") from None


def _record_conversation(messages: Sequence[Message], prompt_messages: int, artifacts: Artifacts) -> None:
    """Keep the conversation; the last text that was sampled is the answer."""
    artifacts.messages[:], artifacts.prompt_messages = messages, prompt_messages
    turns = [one.content for one in messages[prompt_messages:] if one.role == "assistant"]
    said = next((text for text in reversed(turns) if text.strip()), "")
    artifacts.answer = strip_thinking(said) if said else None


def _value_at(text: str, keys: Sequence[str]) -> str:
    """Return the text at a place of a JSON document; empty when there is none."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    for key in keys:
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
