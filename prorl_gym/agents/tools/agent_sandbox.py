"""The agent's sandbox, as tools use it, and the cause when it is lost."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from prorl_gym.errors import Evidence, FailureKind, SandboxError
from prorl_gym.sandbox.protocol import Sandbox

SandboxSource = Callable[[], Awaitable[Sandbox]]
"""Leases the agent's sandbox; the first call starts it, so that a rollout without tool calls starts none."""


@asynccontextmanager
async def agent_action(source: SandboxSource) -> AsyncGenerator[Sandbox]:
    """Lend the agent's sandbox for one action, and find the cause if the action ends with a lost sandbox.

    ``SANDBOX_LOST`` only means that no answer came:

    * evidence came with it: that decides.
    * the sandbox still answers: what broke is the agent's own shell or python session, beyond restarting. The
      agent did that: ``SANDBOX_BROKEN_BY_AGENT`` (cause: policy, keeps its real score).
    * the sandbox is silent: it stays ``SANDBOX_LOST``. The attempt looks up the evidence (``loss_evidence_of``).

    Other kinds (``SANDBOX_LIMIT``, ``IMAGE_BROKEN``, a start that failed) already name their cause and pass through.
    """
    sandbox = await source()
    try:
        yield sandbox
    except SandboxError as error:
        if error.kind is FailureKind.SANDBOX_LOST and error.evidence is None and await sandbox.is_alive():
            raise SandboxError.from_evidence(Evidence.PAYLOAD_BROKE_SANDBOX, error.what, error.fix) from error
        raise
