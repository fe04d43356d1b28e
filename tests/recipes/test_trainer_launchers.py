"""The launchers of ``recipes/trainers``: each makes its trainer's own objects out of what a service answers; and the
programs of ``docs/migration.md``.

The service is a stand-in: its records end as a test says. Each launcher runs where its trainer can be imported
(``.ci/trainers`` installs TRL, verl and verifiers; slime, SkyRL and AReaL need a checkout on ``PYTHONPATH``).
"""

import asyncio
import re
import runpy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from rollout_samples import PROMPT, failed, rollout
from trainer_samples import IDS, MASK, scored, two_segments

from prorl_gym.records import Rollout

RECIPES = Path(__file__).parents[2] / "recipes/trainers"
TASK = {"environment": "math", "task": {"question": "2+2?"}}

pytestmark = pytest.mark.timeout(300)  # importing a trainer takes many seconds


@dataclass
class Service:
    """Answers each submitted rollout with the next of some records."""

    endings: list[Rollout]
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def accept(self, request: web.Request) -> web.Response:
        bodies = await request.json()
        self.requests += bodies
        return web.json_response({"accepted": [{"rollout_id": b["rollout_id"], "duplicate": False} for b in bodies]})

    async def result(self, request: web.Request) -> web.Response:
        place = [one["rollout_id"] for one in self.requests].index(request.match_info["id"])
        identity = {key: self.requests[place].get(key) for key in ("rollout_id", "group_id")}
        record = self.endings[place].model_copy(update=identity)
        return web.json_response({"rollout_id": record.rollout_id, "rollout": record.model_dump(mode="json")})


Start = Callable[..., Service]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    service = Service([])
    app = web.Application()
    app.add_routes([web.post("/v1/rollouts", service.accept), web.get("/v1/rollouts/{id}", service.result)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("PRORL_GYM_URL", f"http://127.0.0.1:{runner.addresses[0][1]}")
    monkeypatch.setenv("PRORL_GYM_TOKEN", "secret")

    def with_endings(*endings: Rollout) -> Service:
        service.endings = list(endings)
        return service

    yield with_endings
    await runner.cleanup()


def launcher(name: str) -> dict[str, Any]:
    return runpy.run_path(str(RECIPES / f"{name}.py"))


def on_checkout(module: str) -> Any:
    return pytest.importorskip(module, reason=f"{module} cannot be imported here", exc_type=ImportError)


async def test_trl_gets_a_rollout_for_each_prompt_in_groups(start: Start):
    service = start(rollout(), failed(), scored(0.0), rollout())
    rows = {"0": TASK, "1": TASK}
    found = await asyncio.to_thread(launcher("trl_grpo")["roll_out"], rows, ["0", "0", "1", "1"], 2)
    assert [one.reward for one in found] == [1.0, None, 0.0, 1.0]
    groups = [request["group_id"] for request in service.requests]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert [request["replica"] for request in service.requests] == [0, 1, 0, 1]


@pytest.mark.verl
async def test_verls_agent_loop_returns_verls_outputs(start: Start):
    service = start(two_segments(), failed())
    loop_class = launcher("verl_agent_loop")["ProrlAgentLoop"]
    loop = object.__new__(loop_class)  # what verl's own constructor prepares is not used
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    row = {"extra_info": {**TASK, "index": 3}, "uid": "u", "raw_prompt": []}
    first, second = await loop.run(sampling, **row)
    assert (first.prompt_ids + first.response_ids, first.response_mask) == (IDS, MASK[3:])
    assert second.reward_score == 1.0
    assert service.requests[0]["settings"]["temperature"] == 0.8
    with pytest.raises(RuntimeError, match="has no reward: engine e0 is down"):
        await loop.run(sampling, **row)


@pytest.mark.verifiers
async def test_the_environment_of_verifiers_returns_its_episode(start: Start):
    start(two_segments(), failed())
    vf, task = import_module("verifiers.v1"), import_module("verifiers.v1.task")
    env_class = launcher("verifiers_env")["ProrlEnv"]
    env = object.__new__(env_class)
    env.config = SimpleNamespace(env_id="prorl")
    context = SimpleNamespace(sampling=SimpleNamespace(temperature=1.0, top_p=None))
    row = vf.Task(task.WireTaskData.model_validate({"idx": 0, "prompt": "2+2?", **TASK}))
    traces: list[Any] = []
    episode = await env.run_episode(row, context, on_trace=traces.append)
    assert [branch.token_ids for branch in episode.traces[0].branches] == [IDS, [*PROMPT, 100, 9]]
    assert (episode.ok, traces) == (True, episode.traces)
    assert not (await env.run_episode(row, context)).ok


async def test_slimes_rollout_function_returns_its_samples(start: Start):
    sample_class = on_checkout("slime.utils.types").Sample
    start(rollout(), failed(), two_segments(), scored(0.0))
    label = '{"environment": "math", "task": {"question": "2+2?"}}'
    groups = [[sample_class(label=label) for _ in range(2)] for _ in range(2)]
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "use_rollout_routing_replay": False}
    args = SimpleNamespace(rollout_temperature=1.0, rollout_top_p=1.0, num_layers=2, moe_router_topk=2, **sizes)
    source = SimpleNamespace(get_samples=lambda size: groups[:size])
    output = await asyncio.to_thread(launcher("slime_rollout")["generate_rollout"], args, 3, source)
    assert [[len(samples) for samples in group] for group in output.samples] == [[1, 1], [2, 1]]
    assert [sample.group_index for sample in output.samples[1][0]] == [1, 1]
    assert output.samples[0][1][0].remove_sample


async def test_skyrls_generator_returns_its_output(start: Start):
    base = on_checkout("skyrl.train.generators.base")
    start(rollout(), failed())
    generator = launcher("skyrl_generator")["ProrlGenerator"](2, 9)
    names = [base.TrajectoryID("7", place) for place in range(2)]
    rows = [{"extra_info": TASK}] * 2
    given = {"sampling_params": {"temperature": 1.0, "max_generate_length": 9}, "trajectory_ids": names}
    output = await generator.generate({**given, "env_extras": rows, "prompts": [], "env_classes": []})
    assert (output["rewards"], output["trajectory_ids"]) == ([1.0, 1.0], names)
    assert output["loss_masks"] == [MASK[3:], [0] * 5]


async def test_areals_workflow_returns_tensors_or_rejects(start: Start):
    on_checkout("areal.api.workflow_api")
    start(rollout(), failed(), failed(), failed())
    workflow = launcher("areal_workflow")["ProrlWorkflow"](2)
    found = await workflow.arun_episode(None, TASK)
    assert found["input_ids"].tolist() == [IDS, IDS]
    assert found["loss_mask"].tolist() == [MASK, [0] * 8]
    assert await workflow.arun_episode(None, TASK) is None


def migration_block(containing: str) -> str:
    page = (RECIPES.parents[1] / "docs/migration.md").read_text("utf-8")
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if containing in block)


async def test_the_loop_of_the_migration_page_returns_trajectories_by_group(start: Start):
    service = start(rollout(), failed(), two_segments(), rollout())
    names: dict[str, Any] = {}
    exec(migration_block("def roll_out"), names)
    found = await asyncio.to_thread(names["roll_out"], "run", 3, [TASK, TASK], 2)
    assert {group: [one[-1] for one in of_it] for group, of_it in found.items()} == {
        "run-3-0": [1.0, None],
        "run-3-1": [1.0, 1.0, 1.0],
    }
    assert found["run-3-1"][0][:2] == (IDS, MASK)
    assert [request["replica"] for request in service.requests] == [0, 1, 0, 1]
