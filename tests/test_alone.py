"""What a trainer's own environment can use: with nothing installed but pydantic and aiohttp."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sample_records import record

from prorl_gym import Client, RolloutRequest
from prorl_gym.errors import ConflictError


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
    async with TestServer(app) as server, Client(str(server.make_url("")), token="secret", retry_seconds=0) as client:
        accepted = await client.submit(RolloutRequest(rollout_id="r1", environment="math", task={}))
        assert [one.rollout_id for one in accepted] == ["r1"]
        delivered = [(one.cursor, one.rollout.rollout_id) async for one in client.stream(follow=False)]
        assert delivered == [(1, "r1"), (2, "r2")]
        with pytest.raises(ConflictError, match="another body"):
            await client.submit(RolloutRequest(rollout_id="taken", environment="math", task={}))
    assert [body["rollout_id"] for body in seen] == ["r1", "taken"]
