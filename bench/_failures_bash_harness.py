"""verifiers 0.4's own agent as a peer of ``bench failures``; arguments as of ``_rollout_bash_harness.py``.

Retries as by default: those of the program in the harness, none of a rollout.
"""
# The peer's package is in its own environment, not in this one.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

import asyncio
import sys

from _failures_load import Made, answer_batches
from _failures_plan import CALL_SECONDS
from _rollout_bash_harness import QuestionTaskset, serving

__all__ = ["QuestionTaskset"]


async def _main(url: str) -> None:
    async with serving(url, "_failures_bash_harness", timeout={"read": CALL_SECONDS}) as episode:

        async def rollout() -> Made:
            made = await episode()
            errors = [*made.errors, *(error for trace in made.traces for error in trace.errors)]
            reward = sum(trace.reward for trace in made.traces)
            return Made(reward=float(reward), mark=f"{errors[-1].type}: {errors[-1].message}"[:200] if errors else "")

        await answer_batches(rollout)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
