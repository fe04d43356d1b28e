"""An engine for ``bench resume`` and ``bench nodes``: plays the gold turns of its rows at a fixed speed.

A call takes as long as its tokens do (``--tokens-per-second``), or a fixed time (``--call-seconds``). ``/sampled``
counts the tokens, of calls that a dead service has left behind, too.
"""

import argparse
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


class PacedServer(OracleServer):
    """Counts what it samples, of cut calls too."""

    call_seconds: float | None = None

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
        if self.call_seconds is not None:
            await asyncio.sleep(self.call_seconds)
            self._count += len(ids)
            return ids, finish
        began = monotonic()
        try:
            return await super()._simulate_sampling(name, ids, finish)
        finally:
            self._count += min(len(ids), (monotonic() - began) * self._options.tokens_per_second)


async def _serve(options: argparse.Namespace) -> None:
    codec = load_codec("small")
    oracle = OracleOptions(MODEL, tokens_per_second=options.tokens_per_second)
    server = PacedServer(codec, OraclePolicy(codec, load_rows([options.rows])), oracle)
    server.call_seconds = options.call_seconds
    async with serve_oracle(server, "127.0.0.1", 0) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the bench closes it


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tokens-per-second", type=float, default=0.0)
    parser.add_argument("--call-seconds", type=float)
    asyncio.run(_serve(parser.parse_args()))
