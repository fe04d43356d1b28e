"""verifiers 0.4's own agent (``bash`` harness, ``subprocess`` runtime) as a peer of ``bench peers``.

Run by the python of its own environment: ``_rollout_bash_harness.py ENGINE_URL QUESTION ANSWER``. Episodes are run as
``vf-eval`` runs them, in this process, without its dashboard and its files. The module is the taskset, too.
"""
# The peer's package is in its own environment, not in this one.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportUntypedFunctionDecorator=false

import asyncio
import os
import sys
from typing import Any

import verifiers.v1 as vf
from _load import answer_loads
from math_verify import parse, verify

__all__ = ["QuestionTaskset"]

QUESTION, ANSWER = sys.argv[2:4]


class QuestionTask(vf.Task[vf.TaskData]):
    """One question with a gold answer."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(verify(parse(f"\\boxed{{{ANSWER}}}"), parse(trace.last_reply)))


class QuestionTaskset(vf.Taskset[QuestionTask, vf.TasksetConfig]):
    """One task."""

    def load(self) -> list[QuestionTask]:
        return [QuestionTask(vf.TaskData(prompt=QUESTION), self.config.task)]


async def _main(url: str) -> None:
    from verifiers.v1.configs.cli.eval import EvalConfig
    from verifiers.v1.utils.loaders import load_environment

    os.environ["BENCH_ENGINE_KEY"] = "none"
    agent = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
    config: Any = EvalConfig.model_validate(
        {
            "env": {"taskset": {"id": "_rollout_bash_harness"}, "agent": agent},
            "model": "m",
            "client": {"type": "eval", "base_url": url, "api_key_var": "BENCH_ENGINE_KEY"},
            "push": False,
        }
    )
    environment: Any = load_environment(config.env)
    context = vf.ModelContext(client=config.client, model=config.model, sampling=config.sampling)
    (task,) = list(environment.taskset)

    async def rollout() -> float:
        (slot,) = environment.slots(task)
        return sum(trace.reward for trace in (await environment.run_slot(slot, context)).traces)

    async with environment.serving():
        await answer_loads(rollout)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
