"""Who is to blame when no patch can be taken in time: the agent, or the node."""

from collections.abc import Sequence
from typing import Any

import pytest

from prorl_gym.environments.swe.repository import (
    EXTRACT_SECONDS,
    BaseState,
    NoPatchError,
    PlacedRepository,
    extract_patch,
)
from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox, SandboxSpec
from prorl_gym.testing.sandbox.fake_sandbox import FakeSandbox
from tests.environments.swe.mini import archived

SLOW = ExecResult(124, b"", b"", timed_out=True, seconds=EXTRACT_SECONDS)
PLACED = PlacedRepository(BaseState("0" * 40, frozenset(), (), frozenset()), b"index")


class Answering(FakeSandbox):
    """Places and packs in no time; what it says to the diff is given."""

    def __init__(self, diff: ExecResult) -> None:
        super().__init__()
        self._diff = diff
        self.files["/tmp/base.pack"] = b"pack"

    async def exec(self, argv: Sequence[str], **_: Any) -> ExecResult:
        if "extract" in argv:
            return self._diff
        return ExecResult(0, b"\0\0\0" + b"0" * 40 + b"\0", b"")


class Lending:
    def __init__(self, *diffs: ExecResult) -> None:
        self.lent = [Answering(diff) for diff in diffs]
        self._next = iter(self.lent)

    async def start_clean_sandbox(self, spec: SandboxSpec) -> Sandbox:
        return next(self._next)

    async def get_agent_sandbox(self, spec: SandboxSpec) -> Sandbox:
        raise AssertionError


async def taken(*clean: ExecResult) -> bytes:
    lending, agents = Lending(SLOW, *clean), Answering(SLOW)
    try:
        return await extract_patch(archived(), PLACED, agents, lending)
    finally:
        assert [each.closed for each in lending.lent] == [True] * (1 + len(clean))
        assert agents.closed, "what the agent left running would slow the control"


async def test_agent_whose_sandbox_alone_is_slow_has_no_patch():
    with pytest.raises(NoPatchError, match=r"within 120 s, which takes 2 s where no agent has been"):
        await taken(ExecResult(0, b"", b"", seconds=2.0))


@pytest.mark.parametrize(
    "control",
    [SLOW, ExecResult(0, b"", b"", seconds=EXTRACT_SECONDS / 2), ExecResult(1, b"", b"", seconds=1.0)],
    ids=["too slow", "not much faster", "broken"],
)
async def test_slow_node_is_no_fault_of_the_policy(control: ExecResult):
    with pytest.raises(SandboxError, match="twice"):
        await taken(control)
