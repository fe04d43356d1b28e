"""``bench failures``: what counts as what, which calls fail, and how the engine fails. Systems are not run here."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prorl_gym.cli.demo.stack import free_ports
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.row_index import load_rows

BENCH = Path(__file__).parent.parent / "bench"


pytestmark = pytest.mark.usefixtures("bench_scripts")


def load(name: str) -> Any:
    return import_module(name)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_each_rollout_is_counted_once() -> None:
    loads, counts = load("_failures_load"), load("_failures_count")
    made = [
        loads.Made(reward=1.0),
        loads.Made(reward=0.0),
        loads.Made(reward=0.0, mark="mask_sample: True"),
        loads.Made(reward=1.0, mark="mask_sample: True"),
        loads.Made(mark="engine_timeout"),
        loads.Made(lost="HTTP 500"),
        loads.Made(lost="no answer", is_answered=False),
    ]
    cell = counts.count("ours", "program", "f", loads.Batch(made, 2.0), {}, has_died=False)
    assert (cell.solved, cell.silent, cell.marked, cell.lost) == (1, 1, 3, 2)
    assert (cell.marked_zeros, cell.unanswered, cell.kept_tokens) == (1, 1, 0)
    assert cell.reasons == ["HTTP 500", "engine_timeout", "mask_sample: True"]


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "exact", "right"),
    [
        ([5, 6, 2], [-1.0, -2.0, -3.0], [0, 0, 0], 1, 1),
        ([5, 6, 2], [-1.0, -2.0, -3.0], [0, 0, 1], 1, 0),
        ([5, 7, 8, 2], [-1.0, -4.0, -5.0, -6.0], [0, 0, 1, 1], 1, 1),
        ([5, 6, 3], [-1.0, -2.0, -3.0], None, 0, 0),
        ([5, 6], [-1.0, -2.0], None, 0, 0),
        ([5, 6, 2], [-1.0, -2.0], None, 0, 0),
        ([5, 6, 2], [float("nan"), -2.0, -3.0], None, 0, 0),
    ],
    ids=["as sampled", "another version", "two answers on end", "another id", "cut", "a log-prob too few", "NaN"],
)
def test_tokens_are_those_that_the_engine_sampled(
    ids: list[int], logprobs: list[float], versions: list[int] | None, exact: int, right: int
) -> None:
    loads, counts = load("_failures_load"), load("_failures_count")
    log = {
        (1, 9): [counts.Sampled([5, 7], [-1.0, -4.0], 0), counts.Sampled([5, 6, 2], [-1.0, -2.0, -3.0], 0)],
        (1, 9, 5, 7): [counts.Sampled([8, 2], [-5.0, -6.0], 1)],
    }
    made = loads.Made(reward=1.0, calls=[loads.Call([1, 9], ids, logprobs, versions)])
    cell = counts.count("ours", "program", "f", loads.Batch([made], 2.0), log, has_died=False)
    assert (cell.kept_tokens, cell.exact_tokens, cell.right_versions) == (1, exact, right)
    assert cell.kept_versions == (versions is not None)


async def test_what_raises_or_is_late_is_lost() -> None:
    loads = load("_failures_load")
    number = iter(range(3))

    async def rollout() -> Any:
        match next(number):
            case 0:
                return loads.Made(reward=1.0)
            case 1:
                raise ConnectionError("gone")
            case _:
                await asyncio.Event().wait()

    batch = await loads.make_batch(3, 0.05, rollout)
    assert [(made.reward, made.lost, made.is_answered) for made in batch.made] == [
        (1.0, "", True),
        (None, "ConnectionError: gone", True),
        (None, "no answer in 0.05 s", False),
    ]


def test_an_answer_of_gym_is_read_with_its_marks() -> None:
    read = load("_failures_systems").made_of_gym_answer
    item = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    answer = {"reward": 0.5, "response": {"output": [{}, item]}, "failure_kind": None, "mask_sample": False}
    assert read(answer).mark == "" and read(answer).calls[0].ids == [2]
    assert read({**answer, "instance_config": {"mask_sample": True}}).mark == "mask_sample: True"
    assert read({**answer, "failure_kind": "timeout"}).mark == "failure: timeout"


def test_the_program_is_gyms_row_too() -> None:
    systems, engine = load("_failures_systems"), load("_failures_engine")
    row = systems.code_gen_row()
    tests = row["verifier_metadata"]["unit_tests"]
    assert tests["inputs"][0] == "aaab\n" and tests["outputs"][0] == "3a1b\n"
    step = engine.next_step(row["responses_create_params"]["input"], [])
    assert step.text.startswith("```python\nfrom itertools") and step.tool is None


# --- the engine -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def engine(tmp_path: Path, kind: str, **changes: Any) -> AsyncGenerator[Any]:
    """Serve the engine under a fault that hits every call, unless it is an outage; yields a function that asks it."""
    engines, plan, systems = load("_failures_engine"), load("_failures_plan"), load("_rollout_systems")
    fault = plan.BY_KIND[kind]
    plan.BY_KIND[plan.Kind(kind)] = plan.Fault(fault.kind, fault.words, share=float(bool(fault.share)), **changes)
    port, control = free_ports(2)
    rows = load_rows([systems.write_rows(tmp_path)])
    served = engines.FailingEngine(engines.VersionedPolicy(load_codec("small"), rows), port, control)
    await served.listen()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        orders = f"http://127.0.0.1:{control}"
        await session.post(f"{orders}/fault", json={"kind": kind})

        async def ask(path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
            method = "GET" if body is None else "POST"
            root = f"http://127.0.0.1:{port}" if path.startswith("v1") or path == "tokenize" else orders
            async with session.request(method, f"{root}/{path}", json=body) as response:
                return response.status, await response.text()

        try:
            yield ask
        finally:
            await served.close()


CHAT = {
    "model": "m",
    "logprobs": True,
    "messages": [{"role": "user", "content": "What is 12345 * 6789?"}],
    "tools": [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}],
}
COMPLETION = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 64, "logprobs": 0, "return_token_ids": True}


async def test_a_healthy_engine_plays_the_row_and_logs_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "none") as ask:
        _, answer = await ask("v1/chat/completions", CHAT)
        choice = json.loads(answer)["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "python"
        _, tokenized = await ask("tokenize", CHAT)
        _, logged = await ask("log")
        (sampled,) = json.loads(logged)["sampled"]
        assert sampled["prompt"] == json.loads(tokenized)["tokens"]
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in sampled["ids"]]
        assert [entry["logprob"] for entry in entries] == sampled["logprobs"]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), [("v1/chat/completions", CHAT), ("v1/completions", COMPLETION)])
async def test_how_answers_are_spoilt(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async def answered(kind: str) -> tuple[int, str]:
        async with engine(tmp_path, kind) as ask:
            return await ask(path, body)

    def values(text: str) -> list[float]:
        given = json.loads(text)["choices"][0]["logprobs"]
        return given.get("token_logprobs") or [entry["logprob"] for entry in given["content"]]

    whole = (await answered("none"))[1]
    assert (await answered("error"))[0] == 500
    status, half = await answered("truncated")
    assert status == 200 and len(half) == len(whole) // 2
    assert "choices" not in json.loads((await answered("foreign"))[1])
    assert len(values((await answered("short_logprobs"))[1])) == len(values(whole)) - 1
    assert isnan(values((await answered("nan_logprobs"))[1])[0])
    cut = (await answered("abort"))[1]
    assert json.loads(cut)["choices"][0]["finish_reason"] == "abort"
    assert values(cut) == values(whole)[: len(values(whole)) // 2]
    with pytest.raises(aiohttp.ClientOSError):
        await answered("reset")


async def test_a_hung_call_ends_with_the_fault(tmp_path: Path) -> None:
    async with engine(tmp_path, "hang") as ask:
        call = asyncio.create_task(ask("v1/chat/completions", CHAT))
        await ask("reached?calls=1")
        assert not call.done()
        await ask("fault", {"kind": "none"})
        with pytest.raises(aiohttp.ClientOSError):
            await call


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refused", "unavailable"])
async def test_an_outage_begins_with_a_call_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(load("_failures_engine"), "OUTAGE_SECONDS", 0.3)
    monkeypatch.setattr(load("_failures_engine"), "OUTAGE_CALL", 1)

    async def is_answered(ask: Any) -> bool:
        try:
            return (await ask("v1/chat/completions", CHAT))[0] == 200
        except aiohttp.ClientOSError:
            return False

    async with engine(tmp_path, kind, is_outage=True) as ask:
        assert [await is_answered(ask) for _ in range(3)] == [True, False, False]
        assert (await ask("log"))[0] == 200
        async with asyncio.timeout(20):
            while not await is_answered(ask):  # noqa: ASYNC110 - the outage ends by the clock, and says so to nobody
                await asyncio.sleep(0.02)


async def test_other_weights_have_other_log_probs(tmp_path: Path) -> None:
    async with engine(tmp_path, "weights") as ask:
        await ask("v1/chat/completions", CHAT)
        await ask("weights", {"version": 1})
        await ask("v1/chat/completions", CHAT)
        first, second = json.loads((await ask("log"))[1])["sampled"]
    assert (first["version"], second["version"]) == (0, 1)
    assert first["ids"] == second["ids"] and first["logprobs"] != second["logprobs"]


# --- the servers of Gym -----------------------------------------------------------------------------------------------


@pytest.mark.gym
@pytest.mark.parametrize("module", ["_rollout_gym", "_failures_gym"])
def test_gyms_servers_are_those_of_the_bench(tmp_path: Path, module: str) -> None:
    """The demo's own servers would be started if its way to write the file had another name."""
    from prorl_gym.cli.demo.process_supervisor import ProcessSupervisor
    from prorl_gym.cli.demo.stack import DemoFolders, PolicyEndpoint

    scripts = load(module)
    stack_class = scripts.FailuresStack if module == "_failures_gym" else scripts.BenchStack
    stack = stack_class(ProcessSupervisor(tmp_path), DemoFolders(tmp_path, tmp_path))
    ready = stack.write_config(PolicyEndpoint(("http://127.0.0.1:1/v1",), "m", "small"))
    assert list(ready) == list(stack.servers) == list(stack.addresses)
    assert "math_with_code" in (tmp_path / "demo.yaml").read_text()
