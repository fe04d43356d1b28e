"""Graders of STEM answers without worker processes, for tests of verdicts."""

from typing import Any

from prorl_gym.environments.math import answer_equality
from prorl_gym.environments.math.environment import MathGrader
from prorl_gym.environments.stem import quantity
from prorl_gym.environments.stem.environment import StemEnvironment, StemGrader, StemRow
from prorl_gym.sandbox.protocol import Sandbox, SandboxSpec
from tests.environments.worker_support import InlineWorkers


class Nothing:
    """Leases of an agent that used nothing."""

    def __init__(self, judge: Any = None) -> None:
        self._judge = judge

    async def get_agent_sandbox(self, spec: SandboxSpec) -> Sandbox:
        raise AssertionError("a sandbox is asked for")

    def get_judge(self) -> Any:
        return self._judge


GRADER = StemGrader(InlineWorkers(quantity.grade), MathGrader(InlineWorkers(answer_equality.grade)))
ENVIRONMENT = StemEnvironment(GRADER)


def numeric(answer: str, **fields: Any) -> StemRow:
    return StemRow.model_validate({"question": "How much is it?", "kind": "numeric", "answer": answer, **fields})


def compare(gold: str, answer: str, question: str = "How much is it?", **rules: Any) -> str:
    """Return the verdict on a quantity."""
    known = {"tolerance": 0.01, "absolute_tolerance": 0.0, "unit_optional": False, **rules}
    return quantity.grade({"gold": gold, "answer": answer, "question": question, **known})["verdict"]
