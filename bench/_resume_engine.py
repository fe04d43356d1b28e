"""The engine of ``bench resume``: plays the gold turns of its rows at a fixed speed. ``/sampled`` counts its tokens.

Tokens of calls that a dead service has left behind count, too.
"""

import asyncio
import sys
from pathlib import Path
from time import monotonic
from typing import Literal

from aiohttp import web

from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy
from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer, serve_oracle
from prorl_gym.oracle.row_index import load_rows

MODEL = "m"
TOKENS_PER_SECOND = 150.0


class CountingServer(OracleServer):
    """Counts what it samples, of cut calls too."""

    def build_app(self) -> web.Application:
        """Return the routes."""
        self._count = 0.0

        async def sampled(request: web.Request) -> web.Response:
            return web.json_response({"tokens": self._count})

        app = super().build_app()
        app.router.add_get("/sampled", sampled)
        return app

    async def _simulate_sampling(
        self, name: str, ids: list[int], finish: Literal["stop", "length"]
    ) -> tuple[list[int], Literal["stop", "length", "abort"]]:
        began = monotonic()
        try:
            return await super()._simulate_sampling(name, ids, finish)
        finally:
            self._count += min(len(ids), (monotonic() - began) * TOKENS_PER_SECOND)


async def _serve(rows: Path) -> None:
    codec = load_codec("small")
    options = OracleOptions(MODEL, tokens_per_second=TOKENS_PER_SECOND)
    server = CountingServer(codec, OraclePolicy(codec, load_rows([rows])), options)
    async with serve_oracle(server, "127.0.0.1", 0) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the bench closes it


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
