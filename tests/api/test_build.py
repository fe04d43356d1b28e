"""The wiring: what a service of a configuration stands on."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.api import build
from prorl_gym.api.config import ServiceConfig
from prorl_gym.records import RolloutRequest
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend

NAMED = "named-" + hashlib.sha256(b"http://127.0.0.1:1/other").hexdigest()[:8]
"""The pool of an address that requests may name: called after the address, not after its place in the list."""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def no_sandboxes(_: object) -> EmptyBackend:
        return EmptyBackend()

    monkeypatch.setattr(build, "open_backend", no_sandboxes)
    down = "http://127.0.0.1:1"

    def make(**inference: Any) -> Any:
        return build.build_service(
            ServiceConfig.model_validate(
                {
                    "inference": {"engines": [down], "model": "m", "tokenizer": "small", **inference},
                    "inference_urls": [f"{down}/other"],
                    "state": str(tmp_path),
                }
            )
        )

    return make


async def test_each_pool_has_its_lifecycle_from_the_start(service: Any):
    built = await service()
    try:
        assert list(built.weight_updaters) == [pool.name for pool in built.pools] == ["policy", NAMED]
        await built.weight_updaters["policy"].pause("drain")
        assert [pool.snapshot().paused for pool in built.pools] == [True, False]
    finally:
        await built.close()
    assert not built.pool.snapshot().paused, "no call waits for a trainer that can no longer resume it"


@pytest.mark.parametrize(
    ("inference", "slots"),
    [({}, 256), ({"admission": "fixed"}, 64), ({"engine": "chat_prefix"}, 64), ({"balance": "pass_through"}, 64)],
)
async def test_slots_of_run_are_many_where_admission_follows_the_caches(service: Any, inference: Any, slots: int):
    built = await service(**inference)
    try:
        capacity = (await built.service.status()).capacity
    finally:
        await asyncio.wait_for(built.close(), 10)
    assert capacity.free == 64 + 2 * 8 + slots + 16


async def test_engines_keep_their_version_over_a_restart(service: Any):
    """Engines outlive the service: what they sample after its restart must not be labelled as of the first weights."""
    built = await service()
    await built.service.set_policy_version(7, NAMED)
    await built.service.set_policy_version(3)
    await built.close()
    again = await service()
    try:
        assert [pool.version for pool in again.pools] == [3, 7]
        assert again.service.groups.status("any").version == 3
    finally:
        await again.close()


async def test_a_stop_does_not_wait_for_a_paused_policy(service: Any):
    built = await service()
    await built.weight_updaters["policy"].pause("drain")
    row = {"id": "m", "question": "1+1?", "answer": "2"}
    in_hand = asyncio.Event()
    built.service.stage_observers.append(lambda event: in_hand.set() if getattr(event, "stage", "") == "init" else None)
    await built.service.submit([RolloutRequest(rollout_id="r", environment="math", task=row)])
    await asyncio.wait_for(in_hand.wait(), 10)
    await asyncio.wait_for(built.close(drain=True), 10)
    again = await service()
    try:
        assert again.service.pending == 1, "it was accepted, so the next start makes it"
    finally:
        await again.close(drain=False)
