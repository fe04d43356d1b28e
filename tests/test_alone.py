"""What a trainer's own environment can use: with nothing installed but pydantic and aiohttp."""

import asyncio
import json
import sys
from importlib.util import find_spec

import pytest
from aiohttp import web
from sample_records import record

from prorl_gym import Client, RolloutRequest
from prorl_gym.errors import ConflictError
from prorl_gym.trainers import gym_request, gym_result, nemo_rl


async def test_the_client_speaks_the_wire() -> None:
    """Against a server that is written from the wire, not from our service."""
    seen: list[dict[str, object]] = []

    async def accept(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        seen.extend(await request.json())
        if any(body["rollout_id"] == "taken" for body in seen):
            error = {"what": "rollout taken exists with another body.", "fix": "Use a fresh id."}
            return web.json_response({"error": error}, status=409)
        return web.json_response({"accepted": [{"rollout_id": b["rollout_id"], "duplicate": False} for b in seen]})

    async def stream(request: web.Request) -> web.StreamResponse:
        lines = [{"cursor": i, "rollout": record(f"r{i}").model_dump(mode="json")} for i in (1, 2)]
        return web.Response(text="".join(json.dumps(line) + "\n" for line in lines))

    app = web.Application()
    app.add_routes([web.post("/v1/rollouts", accept), web.get("/v1/stream", stream)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with asyncio.timeout(20), Client(f"http://127.0.0.1:{port}", token="secret", retry_seconds=0) as client:
        accepted = await client.submit(RolloutRequest(rollout_id="r1", environment="math", task={}))
        assert [one.rollout_id for one in accepted] == ["r1"]
        delivered = [(one.cursor, one.rollout.rollout_id) async for one in client.stream(follow=False)]
        assert delivered == [(1, "r1"), (2, "r2")]
        with pytest.raises(ConflictError, match="another body"):
            await client.submit(RolloutRequest(rollout_id="taken", environment="math", task={}))
    await runner.cleanup()
    assert [body["rollout_id"] for body in seen] == ["r1", "taken"]


def test_trainer_shapes_import() -> None:
    assert all(module.__doc__ for module in (gym_result, gym_request, nemo_rl))


@pytest.mark.skipif(find_spec("fastapi") is not None, reason="other packages are installed here; CI runs it alone")
def test_nothing_else_was_needed() -> None:
    foreign = {"fastapi", "transformers", "typer", "rich", "yaml", "nemo_gym", "IPython", "ptyprocess"}
    assert not foreign & set(sys.modules)
