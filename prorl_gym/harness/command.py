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
from contextlib import suppress
from errno import EADDRINUSE
from signal import SIGKILL, SIGTERM
from socket import socket
from string import Template
from typing import Any, cast

from prorl_gym.agents.command_config import CommandConfig
from prorl_gym.agents.protocol import Artifacts, Episode
from prorl_gym.agents.tools.agent_sandbox import agent_action
from prorl_gym.errors import FailureKind, SandboxError, TaskError
from prorl_gym.harness.rollout_gateway import MODEL, RolloutGateway
from prorl_gym.sandbox.protocol import ExecResult, Sandbox
from prorl_gym.thoughts import split_thinking

_LOG = logging.getLogger(__name__)

HOME = "/home/agent"
"""Home of the program: the same in every rollout, since prompts of programs name it, and outside of any task."""
LAYER = "/.prorl/agent"
"""Where the layer of a preset is mounted."""
MODEL_PORT = 18080
"""Port of the gateway, on 127.0.0.1 inside: the same in every rollout, unless the task's own setup has taken it."""

_PLACES = {"home": HOME, "layer": LAYER}
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


class CommandAgent:
    """Implements ``Agent``."""

    def __init__(self, command: CommandConfig, gateway: RolloutGateway) -> None:
        self._command = command
        self._gateway = gateway

    async def run(self, task: Episode, artifacts: Artifacts) -> None:
        """Run the program until it ends, or until the gateway answers no more calls."""
        if task.sandbox is None:
            what = "The environment lends no sandbox to an agent program."
            raise TaskError(FailureKind.BAD_ROW, what, "Leave the setting 'agent' empty, or set Episode.sandbox.")
        async with agent_action(task.sandbox) as sandbox:
            passed_over: tuple[type[Exception], ...] = (SandboxError,)  # of a program that was stopped
            try:
                await self._run_in(sandbox, task, artifacts)
                passed_over = ()
            finally:
                artifacts.messages[:], artifacts.prompt_messages = self._gateway.conversation()
                sampled = artifacts.messages[artifacts.prompt_messages :]
                said = [one.content for one in sampled if one.role == "assistant" and one.content.strip()]
                artifacts.answer = split_thinking(said[-1])[1] if said else None
                with suppress(*passed_over):
                    await self._collect(sandbox, artifacts)
            self._require_calls(artifacts)

    async def _run_in(self, sandbox: Sandbox, task: Episode, artifacts: Artifacts) -> None:
        listener = await _listen(sandbox)
        # As one text that a program can be given: without zero bytes and half surrogate pairs.
        prompt = "\n\n".join(message.content.strip() for message in task.messages if message.content.strip())
        prompt = prompt.replace("\0", "").encode("utf-8", "replace").decode()
        finish = (tool.spec.description for tool in task.tools if tool.spec.name == "finish")
        answer = next(finish, "Say in short what you did.")
        names = {
            "task": _fill(self._command.task or _PROMPT, {"prompt": prompt, "answer": answer}),
            "url": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "token": self._gateway.token,
            "model": MODEL,
            **_PLACES,
        }
        start = '"$@" > "$0" 2>&1; exit $?'  # no exec: an exit code that the program chose is then no end of ours
        shell = ["bash", "-c", f"{task.setup}\n{start}"] if task.setup else ["sh", "-c", start]
        argv = [*shell, _OUTPUT, *(_fill(argument, names) for argument in self._command.argv)]
        env = {"HOME": HOME, **{name: _fill(value, names) for name, value in self._command.env.items()}}
        async with self._gateway.serving(listener):
            size = sum(len(text.encode(errors="replace")) + 1 for text in (*argv, *env, *env.values()))
            if size > _MAX_ARGUMENTS:
                what = f"The task is too long for the arguments of an agent program: {size} of {_MAX_ARGUMENTS} bytes."
                raise TaskError(FailureKind.PROMPT_TOO_LONG, what, "Give it '$task' in one of its 'files'.")
            await _write(sandbox, _OUTPUT, "")
            for path, text in self._command.files.items():
                await _write(sandbox, _fill(path, names), _fill(text, names))
            artifacts.log = "[The program was stopped.]"
            ended = await self._watch(sandbox, argv, env)
        artifacts.log = f"[The program ended with exit code {ended.exit_code}.]"
        if ended.exit_code in (128 + SIGKILL, 128 + SIGTERM) and ended.kill_evidence is not None:
            raise SandboxError.from_evidence(ended.kill_evidence, "The agent program was killed from outside.")

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
        """Read log and answer file. Raises ``SandboxError``: the sandbox is gone, or does not answer."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                printed = (await sandbox.exec(["tail", "-c", str(_MAX_LOG), _OUTPUT], timeout=_CLOSE_SECONDS)).stdout
                artifacts.log = f"{printed[-_MAX_LOG:].decode('utf-8', 'replace')}\n{artifacts.log}".strip()
                if self._command.answer_file:
                    await self._read_answer(sandbox, artifacts, _fill(self._command.answer_file, _PLACES))
        except TimeoutError:
            what = f"The agent's sandbox did not answer within {_CLOSE_SECONDS:g} s of the program's end."
            raise SandboxError(FailureKind.SANDBOX_LOST, what) from None

    async def _read_answer(self, sandbox: Sandbox, artifacts: Artifacts, path: str) -> None:
        """Take the answer out of the program's file; without one the last text stays it, and the log says so."""
        try:
            data = await sandbox.read_file(path, limit=_MAX_ANSWER)
        except OSError as error:
            text, why = "", error.strerror
        else:
            text, why = _value_at(data.decode("utf-8", "replace"), self._command.answer_key), "it holds no answer"
        if text:
            artifacts.answer = text
        else:
            artifacts.log += f"\n[The answer is the last text, and not of {path}: {why}.]"

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


def _value_at(text: str, keys: Sequence[str]) -> str:
    """Return the text at a place of a JSON document, or the whole text without keys; empty when there is none."""
    if not keys:
        return text
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    for key in keys:
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
