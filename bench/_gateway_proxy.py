"""What ``bench gateway`` is compared with: a proxy that hands calls on and keeps what passes, as text.

And its floor: the HTTP of a gateway that sends ids, without anything else.
"""

import json
from typing import Any

import aiohttp
from aiohttp import web


class CapturingProxy:
    """Forwards chat completions, streamed, and keeps each call with its answer.

    Args:
        upstream: base URL of the server.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.captured: list[tuple[Any, str]] = []
        """Messages of each call, and the text of its answer."""

    def application(self) -> web.Application:
        """Return its route."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._forward)
        app.cleanup_ctx.append(self._client)
        return app

    async def _client(self, app: web.Application):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            yield

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        messages, stream = json.loads(body)["messages"], bytearray()
        async with self._session.post(f"{self._upstream}/v1/chat/completions", data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                stream += chunk
                await response.write(chunk)
        events = [json.loads(line[6:]) for line in bytes(stream).split(b"\n") if line.startswith(b"data: {")]
        deltas = (choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        self.captured.append((messages, "".join(deltas)))
        return response


class FloorProxy(CapturingProxy):
    """Sends as many ids as a history has, the same in every call, and answers with a prepared stream. Keeps nothing.

    Args:
        upstream: base URL of the server.
        ids: how many.
        text: of the answer.
    """

    def __init__(self, upstream: str, ids: int, text: str) -> None:
        super().__init__(upstream)
        self._body = json.dumps({"stream": True, "max_tokens": 4096, "prompt": list(range(1000, 1000 + ids))}).encode()
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        self._answer = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [choice]}).encode()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        async with self._session.post(f"{self._upstream}/v1/completions", data=self._body) as answer:
            async for _ in answer.content.iter_any():
                pass
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write_eof(self._answer)
        return response
