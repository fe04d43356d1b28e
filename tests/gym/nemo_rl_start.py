"""A recipe of ``recipes/nemo_rl`` on NeMo Gym, started as NeMo-RL starts it, over engines that behave as its servers.

Run as a program it writes the answers to a file, for ``recipes/nemo_rl/check.py``:
``nemo_rl_start.py dapo math answers.jsonl [PYTHON]``, ``PYTHON`` being an interpreter with the NeMo Gym to use.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/recipes", "tests/inference/engines")]

from aiohttp import web  # noqa: E402
from fake_nemo_rl import FakeNemoRl, renderer  # noqa: E402
from nemo_rl_recipes import MAKE, composed  # noqa: E402

from prorl_gym.cli.demo.stack import ProcessSupervisor  # noqa: E402
from prorl_gym.cli.installation import link_venvs  # noqa: E402
from prorl_gym.free_ports import free_ports  # noqa: E402
from prorl_gym.inference.tokens.template_check import load_codec  # noqa: E402
from prorl_gym.oracle.oracle_policy import (  # noqa: E402
    OraclePolicy,
    example_files,
    load_rows,
)
from prorl_gym.sandbox.syscalls import set_child_subreaper  # noqa: E402

HOST = "127.0.0.1"
SAMPLES = 8


@dataclass
class ScriptedNemoRl(FakeNemoRl):
    """NeMo-RL's server with the oracle as its model."""

    policy: OraclePolicy = field(kw_only=True)
    broken: str = ""
    """Every other rollout with this text in a message gets no answer but 500."""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        session = request.headers["X-Session-ID"]
        if self.broken and any(self.broken in str(message["content"]) for message in body["messages"]):
            if crc32(session.encode()) % 2:
                return self.refuse(500)
        return await super()._chat(request)

    def prompt(self, body: dict[str, Any]) -> list[int]:
        prompt = super().prompt(body)
        self.ids = self.policy.complete_turn(prompt, seed=None, session=self.headers[-1]["x-session-id"])
        return prompt


def example_rows(name: str, count: int) -> list[dict[str, Any]]:
    """The first example rows of an environment."""
    file = ROOT / f"environments/prorl_{name}/data/example.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:count]]


def failing_rows(name: str) -> tuple[list[dict[str, Any]], str]:
    """Rows of which one is cut short, one is not of the environment, and one has text on which engines are to fail."""
    cut, bad, lost, *_ = example_rows(name, 5)[2:]
    cut["prorl"] = {"settings": {"max_turns": 1}}
    bad["task"] = {"id": "no such task"}
    return [cut, bad, lost], lost["responses_create_params"]["input"][1]["content"]


def stamped(prompts: Sequence[Mapping[str, Any]], most_tokens: int) -> list[dict[str, Any]]:
    """The rows of a synchronous step as NeMo-RL posts them: each prompt repeated, sampling and place written in."""
    rows = [json.loads(json.dumps(prompt)) for prompt in prompts for _ in range(SAMPLES)]
    for index, row in enumerate(rows):
        params = row["responses_create_params"]
        params["temperature"], params["top_p"] = 1.0, 1.0
        params["max_output_tokens"] = min(params.get("max_output_tokens") or most_tokens, most_tokens)
        row["_rowidx"] = index
    return rows


async def run_recipe(
    combination: tuple[str, str, str],
    prompts: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    python: str,
    broken: str,
) -> list[dict[str, Any]]:
    """Start the servers of a recipe, post a step of rows, and return the answers.

    Args:
        combination: names of algorithm, domain and size.
        prompts: rows, each of which is sampled ``SAMPLES`` times.
        folder: for files; Ray's sockets lie below, so its path must be short.
        python: an interpreter in an environment with NeMo Gym and prorl-gym.
        broken: text in the prompts of which the engines fail every other rollout.
    """
    config = composed(combination)
    codec = load_codec("small")
    policy = OraclePolicy(codec, load_rows(example_files()), solve_rate=0.5, seed=3)
    length = config["policy"]["max_total_sequence_length"]
    options = {"render": renderer(codec), "eos": codec.terminator_id, "max_model_len": length}
    async with AsyncExitStack() as stack:
        servers = [ScriptedNemoRl(policy=policy, broken=broken, **options) for _ in range(2)]
        urls = [(await stack.enter_async_context(server)).url for server in servers]
        section = {key: value for key, value in config["env"]["nemo_gym"].items() if key != "is_trajectory_collection"}
        (head,) = free_ports(1)
        link_venvs(folder / "venvs", Path(python).parent.parent)
        section |= {  # what NeMo-RL injects; the tokenizer is the one thing that is not the model's
            "policy_base_url": urls,
            "policy_model_name": "policy",
            "policy_api_key": "dummy_key",
            "default_host": HOST,
            "use_absolute_ip": False,
            "global_aiohttp_connector_limit_per_host": 16_384,
            "global_aiohttp_connector_limit": 65_536,
            "head_server": {"host": HOST, "port": head},
            "uv_venv_dir": str(folder / "venvs"),
            "prorl_tokenizer": "small",
        }
        (folder / "config.json").write_text(json.dumps(section))
        rows = stamped(prompts, config["policy"]["generation"]["max_new_tokens"])
        if config["grpo"]["async_grpo"] and config["grpo"]["async_grpo"]["enabled"]:
            rows = [row | {"_ng_task_index": row["_rowidx"] // SAMPLES} for row in rows]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        await _drive(folder, python)
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


async def _drive(folder: Path, python: str) -> None:
    (folder / "tmp").mkdir()
    root = await asyncio.create_subprocess_exec(python, "-m", "prorl_gym", "root", stdout=asyncio.subprocess.PIPE)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")} | {
        "NEMO_GYM_EXTRA_ROOTS": (await root.communicate())[0].decode().strip(),
        "TMPDIR": str(folder / "tmp"),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_enable_worker_prestart": "0",
        "PYTHONUNBUFFERED": "1",
    }
    supervisor = ProcessSupervisor(folder)
    files = [str(folder / name) for name in ("config.json", "rows.jsonl", "answers.jsonl")]
    try:
        command = [python, str(Path(__file__).with_name("nemo_rl_driver.py")), *files]
        child = await supervisor.start_child("driver", command, env, folder)
        code = await child.process.wait()
        if code:
            raise AssertionError(f"the driver ended with code {code}:\n{child.tail(60)}")
    finally:
        await supervisor.stop_all()


def main(algorithm: str, domain: str, output: str, python: str = sys.executable) -> None:
    """Write what a recipe answers to two example rows of each environment, and to rows of the first that fail."""
    set_child_subreaper()
    names = MAKE.DOMAINS[domain].environments
    failing, broken = failing_rows(names[0])
    prompts = [*(row for name in names for row in example_rows(name, 2)), *failing]
    folder = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))
    try:
        answers = asyncio.run(run_recipe((algorithm, domain, "4b"), prompts, folder, python=python, broken=broken))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    Path(output).write_text("".join(json.dumps(answer) + "\n" for answer in answers), encoding="utf-8")
    print(f"{len(answers)} answers")


if __name__ == "__main__":
    main(*sys.argv[1:])
