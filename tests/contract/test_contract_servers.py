"""What the servers keep: items 8, 9, 11 to 13 and 15 of the trainer's contract."""

import asyncio
import random
from collections import Counter
from importlib.metadata import version
from itertools import count
from typing import Any

import pytest

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]

import gym_needed  # noqa: E402, F401
from contract_world import World  # noqa: E402
from gym_servers import GROUP_SIZE, HAS_RELAY  # noqa: E402
from policy_server import VALIDATION, Fault, Script  # noqa: E402
from rollout_endings import ENVIRONMENTS, example, finish  # noqa: E402

from prorl_gym.environments.protocol import ScriptedStep  # noqa: E402
from prorl_gym.trainers.gym_request import row_digest  # noqa: E402
from prorl_gym.trainers.nemo_rl import check_result  # noqa: E402

RUN_SLOTS = 64
"""Agents that the service runs at a time by default."""
AT_ONCE = finish("\\boxed{0}")
NO_TOOL = ScriptedStep("I try a tool that does not exist.", "nothing", {})
"""A turn that starts no sandbox."""


def tokens(result: dict[str, Any]) -> list[Any]:
    return [
        (item["prompt_token_ids"], item["generation_token_ids"], item["generation_log_probs"])
        for item in result["response"]["output"]
        if item.get("generation_token_ids")
    ]


@pytest.mark.parametrize("sampling", [(1.0, 1.0), VALIDATION], ids=["training", "validation"])
async def test_08_sampling_is_forwarded_verbatim(sampling: tuple[float, float], world: World):
    """NeMo-RL's server asserts that temperature and top_p are the recipe's, and wants the count of log-probs."""
    row = example("math") | {"_ng_task_index": 800 + round(10 * sampling[0])}
    row["responses_create_params"] |= {"temperature": sampling[0], "top_p": sampling[1]}
    world.plan(row, Script([NO_TOOL, AT_ONCE]))
    [(_, result)] = await world.run(row)
    assert not result["mask_sample"]
    calls = world.calls(row)
    assert len(calls) == 2
    for body in (call.body for call in calls):
        assert (body["temperature"], body["top_p"], body["top_logprobs"]) == (*sampling, 0)
        assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (True, True)
        assert "top_k" not in body


async def test_09_rollout_stays_on_its_server(world: World):
    rows = [example(name) | {"_ng_task_index": 900} for name in ENVIRONMENTS]
    for row in rows:
        world.plan(row, Script([NO_TOOL, NO_TOOL, NO_TOOL, AT_ONCE]))
    for row in rows:  # one by one: a call may leave a server that others load
        [(_, result)] = await world.run(row)
        calls = world.calls(row)
        assert {call.headers["x-session-id"] for call in calls} == {result["prorl_rollout_id"]}
        assert len(calls) == 4
        assert len({call.server for call in calls}) == 1


async def test_09_fail_over_changes_the_server_and_no_token(world: World):
    steps = [NO_TOOL, NO_TOOL, NO_TOOL, AT_ONCE]
    plain = example("math") | {"_ng_task_index": 89}
    world.plan(plain, Script(steps))
    [(_, expected)] = await world.run(plain)
    for index in count(90):  # until the other server is back, which an earlier test made fail
        row = example("math") | {"_ng_task_index": index}
        world.plan(row, Script(steps, Fault.ONE_SERVER, at=2))
        [(_, failed_over)] = await world.run(row)
        assert tokens(failed_over) == tokens(expected)
        assert (failed_over["prorl_retries"], failed_over["mask_sample"]) == (0, False)
        servers = [call.server for call in world.calls(row)]
        if len(set(servers)) == 2:
            assert servers[0] == servers[1] != servers[2] == servers[3]
            return


@pytest.mark.skipif(not HAS_RELAY, reason="before NeMo Gym 0.7 the rollout of a caller that left runs to its end")
async def test_11_rows_whose_caller_left_give_their_slots_back(world: World):
    left = [example("math") | {"posted_by": f"a caller that leaves, {index}"} for index in range(2 * RUN_SLOTS)]
    for row in left:
        world.plan(row, Script([AT_ONCE], at=0, gate=asyncio.Event()))
    leaving = asyncio.create_task(world.run(*left, agent="stop"))
    await world.policy.waiting_of({row_digest(row) for row in left}, RUN_SLOTS)
    leaving.cancel()
    await asyncio.wait({leaving})
    assert {status for status, _ in await world.run(example("math") | {"posted_by": "another caller"})} == {200}


async def test_11_rows_beyond_the_slots_wait_and_none_is_refused(world: World):
    gate = asyncio.Event()
    rows = [example("math") | {"_ng_task_index": 1100 + index} for index in range(200)]
    for row in rows:
        world.plan(row, Script([AT_ONCE], at=0, gate=gate))
    posted = asyncio.create_task(world.run(*rows))
    await world.policy.waiting_of({row_digest(row) for row in rows}, RUN_SLOTS)
    assert not posted.done()
    gate.set()
    answers = await posted
    assert Counter(status for status, _ in answers) == {200: len(rows)}
    assert len({result["prorl_rollout_id"] for _, result in answers}) == len(rows)


async def groups(world: World, rows: list[dict[str, Any]]) -> list[str | None]:
    """Post rows whose rollouts end at once; return the group of each rollout, as the service has it."""
    for row in rows:
        world.plan(row, Script([AT_ONCE]))
    answers = await world.run(*rows)
    assert {status for status, _ in answers} == {200}
    async with world.client() as client:
        listed = await client.rollouts("masking_agent", limit=1000)
    known = {rollout.rollout_id: rollout.group_id for rollout in listed.rollouts}
    return [known[result["prorl_rollout_id"]] for _, result in answers]


REPLICAS = range(GROUP_SIZE)
SYNCHRONOUS = [
    [example(task) | {"_rowidx": place * GROUP_SIZE + replica} for replica in REPLICAS]
    for place, task in enumerate(("math", "stem"))
]
"""Indices run over the whole batch, and nothing else tells the groups apart but the task."""
ASYNCHRONOUS = [
    [example("math") | {"_ng_task_index": 1200 + epoch, "_rowidx": replica} for replica in REPLICAS]
    for epoch in range(2)
]
"""The trainer numbers the groups: the same task has a group in each epoch."""
SINGLE_CONTROLLER = [[example("code") | {"_rowidx": replica} for replica in REPLICAS]] * 2
"""One call posts one group, numbered from 0: a call for the same prompt is another group."""


@pytest.mark.parametrize(
    ("posted", "calls"), [(SYNCHRONOUS, 1), (ASYNCHRONOUS, 1), (SINGLE_CONTROLLER, 2)], ids=["sync", "async", "single"]
)
async def test_12_rows_of_a_prompt_are_a_group(posted: list[list[dict[str, Any]]], calls: int, world: World):
    batches = [[*posted[0], *posted[1]]] if calls == 1 else posted
    found = [group for batch in batches for group in await groups(world, batch)]
    first, second = set(found[:GROUP_SIZE]), set(found[GROUP_SIZE:])
    assert (len(first), len(second), len(first | second)) == (1, 1, 2)
    assert None not in found


async def test_12_row_without_indices_has_no_group(world: World):
    assert await groups(world, [example("math")]) == [None]


async def test_13_runs_at_this_version_of_gym(world: World):
    """By the way of this version: from 0.7 on through an environment server, before that to the agent."""
    release = tuple(map(int, version("nemo-gym").split(".")[:2]))
    assert ((0, 7) <= release) == HAS_RELAY
    rows = [example(name) | {"_ng_task_index": 13} for name in ENVIRONMENTS]
    answers = await world.run(*rows, agent="relay" if HAS_RELAY else "mask")
    for status, result in answers:
        check_result(result)
        assert (status, result["reward"], result["mask_sample"]) == (200, 1.0, False)


@pytest.mark.skipif(not HAS_RELAY, reason="needs NeMo Gym 0.7 or newer")
async def test_15_rows_of_a_killed_agent_meet_their_rollouts(world: World):
    """Gym's client posts a row again, without end, when the connection to the agent drops before an answer begins."""
    gate = asyncio.Event()
    rows = [example("math") | {"_ng_task_index": 1600 + index} for index in range(8)]
    for row in rows:
        world.plan(row, Script([AT_ONCE], at=0, gate=gate))
    posted = asyncio.create_task(world.run(*rows, agent="relay"))
    held = await world.policy.waiting_of({row_digest(row) for row in rows})
    world.servers.kill("mask")
    await world.servers.start("mask")
    gate.set()
    answers = await posted
    assert Counter(status for status, _ in answers) == {200: len(rows)}
    assert sorted(result["prorl_rollout_id"] for _, result in answers) == sorted(held), "none was made again"


async def test_15_rows_of_a_killed_service_have_one_answer_each(world: World):
    gate = asyncio.Event()
    rows = [example("math") | {"_ng_task_index": 1500 + index} for index in range(60)]
    for index, row in enumerate(rows):
        world.plan(row, Script([NO_TOOL, AT_ONCE], gate=gate if index % 2 else None))
    digests = {row_digest(row) for row in rows}
    posted = asyncio.create_task(world.run(*rows))
    held = await world.policy.waiting_of(digests, 30)
    cancelled = random.Random(15).sample(held, 10)
    async with world.client() as client:
        assert sorted(await client.cancel(cancelled)) == sorted(cancelled)
        world.servers.kill("rollouts")
        gate.set()
        await world.servers.start("rollouts")
        answers = await posted
        assert Counter(status for status, _ in answers) == {200: len(rows)}
        ids = [result["prorl_rollout_id"] for _, result in answers]
        assert len(set(ids)) == len(rows)
        listed = (await client.rollouts("masking_agent", limit=1000)).rollouts
        found = Counter(rollout.rollout_id for rollout in listed if rollout.rollout_id.partition("-")[0] in digests)
        assert found == dict.fromkeys(ids, 1)
        ends = {result["prorl_rollout_id"]: result["prorl_outcome"] for _, result in answers}
        assert {name for name, end in ends.items() if end == "cancelled"} == set(cancelled)
        assert set(ends.values()) == {"cancelled", "completed"}
