"""verifiers 0.1's ``ToolEnv`` as a peer of ``bench peers``; run by the python of its own environment.

``_rollout_tool_env.py ENGINE_URL QUESTION ANSWER [PROGRAM ...]``: the python tool starts one process per call, with the
words of PROGRAM before it (bubblewrap and its options, or nothing). ``MathRubric`` grades in its worker process.
"""
# The peer's package is in its own environment, not in this one.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import asyncio
import os
import sys
from typing import Any

import verifiers as vf
from _load import answer_loads
from datasets import Dataset
from verifiers.clients import resolve_client
from verifiers.types import ClientConfig


async def _main(url: str, question: str, answer: str, *wrapper: str) -> None:
    async def python(code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: the code to run.
        """
        process = await asyncio.create_subprocess_exec(
            *(*wrapper, "/usr/bin/python3", "-c", code),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return output.decode("utf-8", "replace")

    row = {"prompt": [{"role": "user", "content": question}], "answer": answer}
    environment: Any = vf.ToolEnv(tools=[python], dataset=Dataset.from_list([row]), rubric=vf.MathRubric(), max_turns=4)
    os.environ["BENCH_ENGINE_KEY"] = "none"
    client = resolve_client(ClientConfig(api_key_var="BENCH_ENGINE_KEY", api_base_url=url))

    async def rollout() -> float:
        given: Any = {**row, "example_id": 0}
        return float((await environment.run_rollout(given, client, "m", {}))["reward"])

    await answer_loads(rollout)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
