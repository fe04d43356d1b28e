"""A node's process: built from the head's configuration, it works until a signal, or until its lease expires."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from prorl_gym.api.build import build_runner, codec_options, load_codec_of, offered_environments, pool_name_of
from prorl_gym.api.config import ServiceConfig
from prorl_gym.api.service_process import StopSignals
from prorl_gym.client.service_credentials import read_token, service_url, token_source
from prorl_gym.client.transport import RetryableError, ServiceError, Transport
from prorl_gym.client.wire_models import IgnoredResponse
from prorl_gym.environments.judge import Judge
from prorl_gym.inference.config import InferenceConfig, pool_engine_factory
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.logs import configure_logging, register_secret
from prorl_gym.rollout.nodes.node import HeadAwayError, Node
from prorl_gym.rollout.nodes.node_runners import NodesConfig
from prorl_gym.rollout.nodes.remote_pool import RemotePool
from prorl_gym.rollout.nodes.wire import ExchangeAnswer, JoinBody, JoinResponse, LeaveBody, Outbox
from prorl_gym.sandbox.backend_selection import open_backend

_LOG = logging.getLogger(__name__)

_START_SECONDS = 600.0
"""Longest wait for a head that is not up yet."""

_JOIN_SECONDS = 10.0
"""For the answers to ``join`` and ``leave``."""

ResponseT = TypeVar("ResponseT", bound=BaseModel)


async def run_node(head: str | None, name: str, token_file: Path | None, run_slots: int | None) -> None:
    """Run a node. The first SIGINT or SIGTERM drains it; the second one leaves at once.

    ``run_slots`` replaces ``runner.run`` of the service's configuration. Raises ``LeaseExpiredError`` when the head was
    not reached for too long, and ``ProrlError`` when it refuses the node.
    """
    signals = StopSignals()
    token = await asyncio.to_thread(read_token, token_file)
    register_secret(token)
    source = token_source() if token_file is None else str(token_file)
    transport = Transport(service_url(head), token, source, _START_SECONDS, 0.2)
    async with AsyncExitStack() as owned:
        owned.push_async_callback(transport.close)
        config = await transport.call("GET", "/v1/nodes/config", ServiceConfig)
        if run_slots is not None:
            runner = config.runner.model_copy(update={"run": run_slots})
            config = config.model_copy(update={"runner": runner})
        configure_logging(config.log.level, config.log.format)
        node = await owned.enter_async_context(_open_node(config, HttpHead(transport, name)))
        await _work_until_signal(node, signals)


async def _work_until_signal(node: Node, signals: StopSignals) -> None:
    working = asyncio.create_task(node.run())
    draining = asyncio.create_task(signals.drain_requested.wait())
    aborting = asyncio.create_task(signals.abort_requested.wait())
    try:
        await asyncio.wait({working, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            _LOG.info("draining: running attempts are finished; signal again to leave them to other nodes")
            node.drain()
            await asyncio.wait({working, aborting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        else:
            await node.leave()
    finally:
        for task in (working, draining, aborting):
            task.cancel()
        await asyncio.wait({working})


@asynccontextmanager
async def _open_node(config: ServiceConfig, head: "HttpHead") -> AsyncGenerator[Node]:
    """Build the parts of a service that make attempts; see ``build.build_service``."""
    outbox = Outbox()
    codec = await load_codec_of(config.inference)

    def remote_pool(name: str, config: InferenceConfig, codec: ChatCodec) -> RemotePool:
        return RemotePool(name, pool_engine_factory(name, config, **codec_options(codec)), outbox.send)

    policy = remote_pool("policy", config.inference, codec)
    named = {url: remote_pool(pool_name_of(url), config.inference, codec) for url in config.inference_urls}
    pools = {pool.name: pool for pool in (policy, *named.values())}
    judge = None
    if config.judge is not None:
        judge_codec = await load_codec_of(config.judge)
        pools["judge"] = remote_pool("judge", config.judge, judge_codec)
        judge = Judge(pools["judge"], judge_codec)
    async with AsyncExitStack() as owned:
        for pool in pools.values():
            owned.push_async_callback(pool.close)
        backend = await open_backend(config.sandbox)
        owned.push_async_callback(backend.close)
        environments = offered_environments(config.environments)
        runner = build_runner(config, environments, policy, codec, named, backend, judge)
        owned.push_async_callback(runner.close)
        yield Node(
            head,
            runner,
            outbox,
            pools,
            lease_seconds=(config.nodes or NodesConfig()).lease_seconds,
            slots=runner.pools.by_name["jobs"].size,
            init_slots=config.runner.init,
        )


class HttpHead:
    def __init__(self, transport: Transport, name: str) -> None:
        self._transport = transport
        self._path = f"/v1/nodes/{name}"

    async def join(self, body: JoinBody) -> JoinResponse:
        return await self._post("join", body.model_dump_json(), JoinResponse, _JOIN_SECONDS)

    async def exchange(self, body: str, seconds: float) -> ExchangeAnswer:
        return await self._post("exchange", body, ExchangeAnswer, seconds)

    async def leave(self, body: LeaveBody) -> None:
        try:
            await self._post("leave", body.model_dump_json(), IgnoredResponse, _JOIN_SECONDS)
        except (HeadAwayError, ServiceError) as error:
            _LOG.warning("the head does not know that this node leaves: %s", error.what)

    async def _post(self, verb: str, body: str, model: type[ResponseT], seconds: float) -> ResponseT:
        try:
            async with (
                asyncio.timeout(seconds),
                self._transport.send("POST", f"{self._path}/{verb}", body=body.encode()) as response,
            ):
                return self._transport.parse(model, await response.read())
        except RetryableError as error:
            raise HeadAwayError(error.error.what) from None
        except TimeoutError:
            raise HeadAwayError(f"no answer within {seconds:g} s.") from None
