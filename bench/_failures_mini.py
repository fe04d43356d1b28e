"""mini-swe-agent as a peer of ``bench failures``, with its own model class over HTTP; the workload in ``BENCH_WORK``.

Retries as by default: 10 attempts of each call, 4 to 60 s apart. As in its batch runner, an error that is left is the
exit status of the rollout.
"""
# The peer's package is in its own environment, not in this one.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from _failures_load import Made, answer_batches
from _failures_plan import CALL_SECONDS
from _rollout_mini import play_on_host

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices when it is imported
from minisweagent.models.litellm_model import LitellmModel

_WORKERS = ThreadPoolExecutor(64)


def _make(url: str) -> Made:
    options = {"api_base": url, "api_key": "none", "timeout": CALL_SECONDS}
    model = LitellmModel(model_name="openai/m", model_kwargs=options, cost_tracking="ignore_errors")
    try:
        reward, ended = play_on_host(model)
    except Exception as error:  # its agent saves the error's name as the exit status, and raises it
        return Made(mark=f"exit status {type(error).__name__}")
    return Made(reward=reward, mark="" if ended == "Submitted" else f"exit status {ended}")


async def _rollout() -> Made:
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, _make, sys.argv[1])


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(answer_batches(_rollout))
