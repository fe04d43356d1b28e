"""Gym's servers with an agent or environments that are not ours, and what the engines behind them were asked.

``run_foreign`` starts them in a process of its own, which is this module as a program.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from aiohttp.typedefs import Handler

from prorl_gym.cli.demo.stack import HOST, DemoFolders, DemoStack, PolicyEndpoint, ProcessSupervisor
from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.free_ports import free_ports
from prorl_gym.gym_roots import has_environment_servers
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import KnownRow, OraclePolicy, RowIndex, example_files, load_rows
from prorl_gym.oracle.oracle_server import OracleServer, serve_oracle
from prorl_gym.sandbox.syscalls import set_child_subreaper
from prorl_gym.trainers.nemo_rl import check_result

MODEL = ("responses_api_models", "prorl_model", "policy_model")
CONFIGS = ["responses_api_models/prorl_model/configs/prorl_model.yaml"]

Server = tuple[str, str, str]
"""Type, implementation and instance of a server."""


def synonyms(row: Mapping[str, Any]) -> list[ScriptedStep]:
    """The gold turns of a row of Gym's ``example_multi_step``."""
    asked = [ScriptedStep("I look it up.", "get_synonym_value", {"synonym": one}) for one in row["expected_synonyms"]]
    found = {"synonym_values": row["expected_synonym_values"]}
    return [*asked, ScriptedStep("These are all.", "extract_synonym_values", found), ScriptedStep("Done.")]


def office(row: Mapping[str, Any]) -> list[ScriptedStep]:
    """The gold turns of a row of Gym's ``workplace_assistant``."""
    calls = [(call["name"], json.loads(call["arguments"])) for call in row["ground_truth"]]
    return [*(ScriptedStep("Next.", name, arguments) for name, arguments in calls), ScriptedStep("It is done.")]


def cards(row: Mapping[str, Any]) -> list[ScriptedStep]:
    """Turns of Gym's ``blackjack``, of which the last is not played when the cards are against it."""
    return [ScriptedStep(f"I {word}. <action>{word}</action>") for word in ("hit", "hit", "stand")]


PLANS: dict[str, Callable[[Mapping[str, Any]], list[ScriptedStep]]] = {
    "example_multi_step_simple_agent": synonyms,
    "workplace_assistant_simple_agent": office,
    "blackjack_gymnasium_agent": cards,
}


class Scripted:
    """An environment of Gym's as far as the oracle looks at one."""

    name = "gym"

    def gold_steps(self, row: Mapping[str, Any]) -> list[ScriptedStep]:
        return PLANS[row["agent_ref"]["name"]](row)

    def wrong_steps(self, row: Mapping[str, Any], seed: int) -> list[ScriptedStep]:
        return [ScriptedStep("No.")]


def known_rows(rows: Iterable[Mapping[str, Any]]) -> RowIndex:
    """Our example rows, or those of Gym's own environments."""
    gyms = [row for row in rows if row["agent_ref"]["name"] in PLANS]
    texts = [next(m["content"] for m in row["responses_create_params"]["input"] if m["role"] == "user") for row in gyms]
    known = [KnownRow(text, text, Scripted(), dict(row)) for text, row in zip(texts, gyms, strict=True)]
    return RowIndex(known) if known else load_rows(example_files())


class LoggedOracle(OracleServer):
    """Writes down each call: what was asked, and what it answered."""

    log: Path

    def build_app(self) -> web.Application:
        app = super().build_app()
        app.middlewares.append(self._write_down)
        return app

    @web.middleware
    async def _write_down(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if request.path == "/v1/completions":
            assert isinstance(answer, web.Response) and answer.text is not None
            choice = json.loads(answer.text)["choices"][0]
            call = ((await request.json())["prompt"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
            with self.log.open("a") as log:
                log.write(json.dumps(call) + "\n")
        return answer


class ForeignStack(DemoStack):
    """The programs of the demo with other servers.

    Args:
        plan: what ``run_foreign`` was given.
    """

    def __init__(self, supervisor: ProcessSupervisor, folders: DemoFolders, plan: Mapping[str, Any]) -> None:
        super().__init__(supervisor, folders)
        self._plan = plan

    def write_config(self, engines: PolicyEndpoint) -> dict[str, str]:
        head, *ports = free_ports(1 + len(self._plan["servers"]))
        self._head_url = f"http://{HOST}:{head}"
        base = {**self._base_config(engines, head), "disable_health_check": True, **self._plan["shared"]}
        config: dict[str, Any] = {"config_paths": self._plan["configs"], **base}
        for (kind, implementation, instance), port in zip(self._plan["servers"], ports, strict=True):
            keys = self._plan["keys"].get(instance, {})
            config[instance] = {kind: {implementation: {"host": HOST, "port": port, **keys}}}
        self._config.write_text(yaml.safe_dump(config), encoding="utf-8")
        path = "readyz" if has_environment_servers() else ""
        instances = [instance for _, _, instance in self._plan["servers"]]
        return {name: f"http://{HOST}:{port}/{path}" for name, port in zip(instances, ports, strict=True)}


def read_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def run_python(*arguments: object) -> str:
    """Run a program that starts Gym and ends all that it started; return what it printed.

    It is a process of its own: it adopts orphans, which a test process must not.
    """
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def run_plan(plan: Mapping[str, Any]) -> None:
    """Start engines and servers, collect the rows, and end everything."""
    set_child_subreaper()
    output, scratch, rows = Path(plan["output"]), Path(plan["scratch"]), Path(plan["rows"])
    codec, index = load_codec("small"), known_rows(read_lines(rows))
    family = ProcessSupervisor(output)
    stack = ForeignStack(family, DemoFolders(output, scratch), plan)
    async with AsyncExitStack() as engines:
        urls: list[str] = []
        for _ in range(2):
            oracle = LoggedOracle(codec, OraclePolicy(codec, index))
            oracle.log = output / "calls.jsonl"
            urls.append(await engines.enter_async_context(serve_oracle(oracle, HOST, 0)))
        try:
            await stack.start_gym(PolicyEndpoint(tuple(urls), "oracle", "small"))
            evaluation = await stack.start_eval(rows, plan["repeats"])
            await asyncio.wait_for(evaluation.process.wait(), 180)
            print(evaluation.tail() if evaluation.process.returncode else "collected")
        finally:
            print("left", await family.stop_all())


def run_foreign(
    output: Path,
    scratch: Path,
    rows: Sequence[Mapping[str, Any]],
    servers: Sequence[Server],
    *,
    configs: Sequence[str],
    keys: Mapping[str, Mapping[str, Any]] | None = None,
    repeats: int = 2,
    **shared: Any,
) -> list[dict[str, Any]]:
    """Start servers over two oracles that know the rows' solutions; return what Gym collects of every row.

    Each answer that the engines sampled is in exactly one row, with the ids that they saw; and rows only grow.

    Args:
        output: results and logs.
        scratch: an empty directory with a short path.
        rows: what is posted.
        servers: all of them but the model server and, where this Gym has such, environment servers that a
            configuration of ``configs`` brings.
        configs: Gym's configurations to include, beside that of the model server.
        keys: of servers that no configuration brings.
        repeats: rollouts of each row.
        shared: keys of Gym's configuration that all servers read.
    """
    (output / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = {
        "output": str(output),
        "scratch": str(scratch),
        "rows": str(output / "rows.jsonl"),
        "servers": [MODEL, *servers],
        "configs": [*CONFIGS, *configs],
        "keys": keys or {},
        "repeats": repeats,
        "shared": shared,
    }
    assert run_python(__file__, json.dumps(plan)) == "collected\nleft 0\n"
    results = read_lines(output / "results.jsonl")
    assert len(results) == repeats * len(rows)
    for result in results:
        check_result(result)
    items = [item for result in results for item in result["response"]["output"] if "prompt_token_ids" in item]
    fields = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    returned = Counter(json.dumps([item[field] for field in fields]) for item in items)
    assert returned == Counter(map(json.dumps, read_lines(output / "calls.jsonl")))
    return results


if __name__ == "__main__":
    asyncio.run(run_plan(json.loads(sys.argv[1])))
