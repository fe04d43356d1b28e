"""verifiers 0.1's ``ToolEnv`` as a peer of ``bench failures``; arguments as of ``_rollout_tool_env.py``.

Retries as by default: 10 of each call by its HTTP client, none of a rollout.
"""

import asyncio
import sys

from _failures_load import Made, answer_batches
from _failures_plan import CALL_SECONDS
from _rollout_tool_env import make_rollout


async def _main() -> None:
    make = make_rollout(*sys.argv[1:], timeout=CALL_SECONDS)

    async def rollout() -> Made:
        output = await make()
        error = output.get("error")
        return Made(reward=float(output["reward"]), mark=str(error)[:200] if error else "")

    await answer_batches(rollout)


if __name__ == "__main__":
    asyncio.run(_main())
