"""What users of the package hold in their hands, without its prose: ``python tests/golden/golden.py`` writes it anew.

``test_golden`` compares each with the committed file, after the old names in that file were replaced by those that
``renames.json`` gives. A file is written anew only when something that users hold is meant to change.
"""

import asyncio
import hashlib
import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.config import ServiceConfig
from prorl_gym.cli.main import app
from prorl_gym.environments import registry
from prorl_gym.environments.row_format import read_rows
from prorl_gym.inference.config import InferenceConfig, build_pool
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy, load_rows
from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer, serve_oracle
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PROSE = {"description", "summary", "title", "example", "examples", "tags"}


def without_prose(value: Any, *, names: bool = False) -> Any:
    """Return a schema or a description of routes without texts for people; keys of ``properties`` are names."""
    if isinstance(value, dict):
        return {
            key: without_prose(inner, names=key in ("properties", "schemas", "$defs", "paths"))
            for key, inner in value.items()
            if names or key not in PROSE
        }
    if isinstance(value, list):
        return [without_prose(inner) for inner in value]
    return value


def service() -> RolloutService:
    runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    return RolloutService(MemoryLedger(), runner, RetryConfig(pause_seconds=0.001))


def routes() -> Any:
    return without_prose(create_app(AppContext(service()), "token").openapi())


def record() -> Any:
    return without_prose(Rollout.model_json_schema())


def request() -> Any:
    return without_prose(RolloutRequest.model_json_schema())


def configuration() -> Any:
    return without_prose(ServiceConfig.model_json_schema())


def commands() -> Any:
    """Return every command with its parameters."""

    def leaves(command: Any, name: str) -> dict[str, Any]:
        inner = getattr(command, "commands", None)
        if inner is not None:
            return {path: leaf for key in inner for path, leaf in leaves(inner[key], f"{name} {key}").items()}
        return {
            name: [
                {"names": one.opts + one.secondary_opts, "default": repr(one.default), "required": one.required}
                | {"values": one.nargs, "multiple": getattr(one, "multiple", False)}
                for one in command.params
            ]
        }

    return leaves(get_command(app), "prorl-gym")


def metrics() -> Any:
    """Return every family of the metrics page with the names of its labels."""
    spec = spec_from_file_location("metrics_page", ROOT / "scripts" / "metrics_page.py")
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    families = text_string_to_metric_families(asyncio.run(script.example()))
    return {
        one.name: [one.type, sorted({label for sample in one.samples for label in sample.labels})] for one in families
    }


def ledger_schema() -> Any:
    """Return what a new ledger's file is made of."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite3"

        async def make() -> None:
            await (await SqliteLedger.open(LedgerConfig(path=path))).close()

        asyncio.run(make())
        with sqlite3.connect(path) as connection:
            found = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()
            version = connection.execute("SELECT version FROM schema_version").fetchone()
    return {
        "version": version[0],
        "objects": [[kind, name, " ".join((sql or "").split())] for kind, name, sql in found],
    }


ENVIRONMENTS = ("code", "math", "stem", "swe", "taskdir")
VARYING = {"accepted_at", "begun_at", "finished_at", "stages", "cancel_seconds", "seconds"}
BY_CHANCE = {
    "swe": {"content", "token_ids", "mask", "logprobs", "policy_versions", "begin", "end", "run_c"},
    "taskdir": {"report"},
}
"""Tests print how long they took, and each grading of ``swe`` tosses its own coins."""


async def records(environment: str) -> list[Any]:
    """Return the records of an environment's example rows, right and wrong, without what a run does not repeat."""
    path = ROOT / f"environments/prorl_{environment}/data/example.jsonl"
    rows = read_rows(path)
    codec = load_codec("small")
    async with AsyncExitStack() as stack:
        backend = await open_backend(SandboxConfig(backend="userns"))
        stack.push_async_callback(backend.close)
        found: list[Any] = []
        for rate in (1.0, 0.0):
            player = OraclePolicy(codec, load_rows([path]), solve_rate=rate, seed=1)
            url = await stack.enter_async_context(
                serve_oracle(OracleServer(codec, player, OracleOptions()), "127.0.0.1", 0)
            )
            config = InferenceConfig(engines=[url], model="oracle", tokenizer="small")
            pool = await stack.enter_async_context(build_pool("policy", config, vocab_size=codec.vocab_size))
            runner = InProcessRunner(registry.get, ModelPolicySource(pool, codec), backend)
            working = RolloutService(MemoryLedger(), runner, RetryConfig())
            await working.start()
            try:
                settings = RolloutSettings(seed=5)
                asked = [
                    RolloutRequest(
                        rollout_id=f"{n}-{rate}", environment=environment, task=dict(row.task), settings=settings
                    )
                    for n, row in enumerate(rows)
                ]
                await working.submit(asked)
                found += [await working.result(one.rollout_id, wait=120) for one in asked]
            finally:
                working.begin_shutdown()
                await working.stop(drain=False)
    return [shortened(one.model_dump(mode="json"), VARYING | BY_CHANCE.get(environment, set())) for one in found]


def shortened(value: Any, left_out: set[str]) -> Any:
    """Return a record without some keys, and with digests in place of long texts and lists of numbers."""
    if isinstance(value, dict):
        return {key: shortened(inner, left_out) for key, inner in value.items() if key not in left_out}
    if isinstance(value, list) and not all(isinstance(one, int | float) for one in value):
        return [shortened(one, left_out) for one in value]
    if isinstance(value, list | str) and len(value) > 60:
        return f"{len(value)} {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]}"
    return value


DOCUMENTS: dict[str, Callable[[], Any]] = {
    "routes": routes,
    "record": record,
    "request": request,
    "configuration": configuration,
    "commands": commands,
    "metrics": metrics,
    "ledger_schema": ledger_schema,
}


def text(document: Any) -> str:
    """Return a document as JSON, with a line for each of its parts and for each part of those."""

    def lines(value: Any, depth: int) -> str:
        if depth == 0 or not isinstance(value, dict | list) or not value:
            return json.dumps(value, sort_keys=True)
        if isinstance(value, list):
            parts = [lines(one, depth - 1) for one in value]
        else:
            parts = [f"{json.dumps(key)}: {lines(value[key], depth - 1)}" for key in sorted(value)]
        begin, end = "[]" if isinstance(value, list) else "{}"
        return begin + "\n" + ",\n".join(parts) + "\n" + end

    return lines(document, 2) + "\n"


def main(names: list[str]) -> None:
    for name, make in DOCUMENTS.items():
        if not names or name in names:
            (FOLDER / f"{name}.json").write_text(text(make()), encoding="utf-8")
    for environment in ENVIRONMENTS:
        if not names or environment in names:
            (FOLDER / f"{environment}.json").write_text(text(asyncio.run(records(environment))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
