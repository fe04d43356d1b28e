"""Builds a service from its configuration: the one place where all parts are put together."""

import asyncio
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

from prorl_gym.agents.command_config import HARNESS
from prorl_gym.api.config import AllowedUrls, ServiceConfig
from prorl_gym.api.policy_control import EngineRegistry
from prorl_gym.client import read_token
from prorl_gym.client.wire_models import MAX_ENGINES, FirstPrompt, FirstPromptBody
from prorl_gym.environments import registry
from prorl_gym.environments.judge import Judge
from prorl_gym.environments.protocol import Environment
from prorl_gym.errors import ConfigError, FailureKind, TaskError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.config import Encode, InferenceConfig, build_pool, pool_engine_factory
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import function_schema
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.inference.weights.weight_updater import WeightUpdater
from prorl_gym.records import Message
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.scheduling.attempt import EnvironmentLookup
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource, PolicyPool
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.trainers.responses_items import messages_from_items

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedService:
    """A running service with its engines and sandboxes."""

    service: RolloutService
    backend: SandboxBackend | None
    """``None``: attempts run on nodes."""
    pool: EnginePool
    codec: ChatCodec
    resources: AsyncExitStack
    pools: tuple[EnginePool, ...] = ()
    """``pool``, and those that requests may name."""
    weight_updaters: Mapping[str, WeightUpdater] = field(default_factory=dict[str, WeightUpdater])
    """For each of ``pools``, by the pool's name: the only way to pause them and to update their weights."""
    registries: Mapping[str, EngineRegistry] = field(default_factory=dict[str, EngineRegistry])
    """By the pool's name, of pools whose engines a trainer may change."""
    judge: Judge | None = None
    """A model for graders, on engines of its own."""
    nodes: NodeRunners | None = None
    """Where attempts run; ``None``: in this process."""

    def render_prompt(self, prompt: FirstPromptBody) -> FirstPrompt:
        """Return the first prompt of a row as the policy's tokenizer renders it. Raises ``TaskError``."""
        try:
            messages = messages_from_items(prompt.input) or [Message(role="user", content="")]
            ids = self.codec.encode_prompt(messages, [function_schema(tool) for tool in prompt.tools])
        except Exception as error:  # the row is not ours, nor is the template
            what = f"the first prompt cannot be rendered ({type(error).__name__})."
            fix = "Send 'input' and 'tools' as OpenAI's Responses API has them."
            raise TaskError(FailureKind.BAD_ROW, what, fix) from error
        return FirstPrompt(prompt_token_ids=tuple(ids), terminator_id=self.codec.terminator_id)

    async def close(self, *, drain: bool = True) -> None:
        """Stop the service (see ``RolloutService.stop``), then its engines and sandboxes. Idempotent.

        A paused policy is not drained, nor one without an engine: no request can change that any more, so running
        rollouts are left to the next start.
        """
        stuck = [f"{name} is paused" for name, updater in self.weight_updaters.items() if updater.paused]
        stuck += [pool.unavailable_reason for pool in self.pools if pool.waiting_rollouts]
        if drain and stuck:
            _LOG.warning("the next start retries running rollouts: %s", "; ".join(stuck))
        try:
            await self.service.stop(drain=drain and not stuck)
        finally:
            await self.resources.aclose()


async def build_service(config: ServiceConfig) -> LoadedService:
    """Load tokenizer, engines and sandboxes, then start the service, which begins what the ledger has.

    An engine that does not answer does not prevent the start: it is logged, and may come up later.

    Raises ``ConfigError``, ``EngineError`` (``TEMPLATE_UNSAFE``), ``SandboxError`` (no backend works here) and
    ``LedgerError`` (its file cannot be used).
    """
    environments = offered_environments(config.environments)
    async with AsyncExitStack() as owned:
        if config.ledger is None:
            await asyncio.to_thread(_make_private_directory, config.state, "state")
        elif config.ledger.path.parent.is_dir():  # otherwise opening the ledger reports that it is missing
            await asyncio.to_thread(_make_private_directory, config.ledger.path.parent, "ledger.path")
        ledger = await SqliteLedger.open(config.ledger_config)
        owned.push_async_callback(ledger.close)
        codec = await load_codec_of(config.inference)
        inference, options = config.inference, codec_options(codec)
        pool = await owned.enter_async_context(build_pool("policy", inference, **options))
        allowed = {
            url: await owned.enter_async_context(
                build_pool(pool_name_of(url), inference.model_copy(update={"engines": [url]}), **options)
            )
            for url in config.inference_urls
        }
        pools = (pool, *allowed.values())
        called = {one.name: one for one in pools}
        judge = None
        if config.judge is not None:  # its weights never change, and only graders use it
            judge_codec = await load_codec_of(config.judge)
            judges = build_pool("judge", config.judge, **codec_options(judge_codec))
            called["judge"] = await owned.enter_async_context(judges)
            judge = Judge(called["judge"], judge_codec)
            await _warn_of_unhealthy(called["judge"])
        # Ids of a probe are the tokenizer's: a padded model has more, which were never trained.
        probed_ids = min(codec.vocab_size, inference.vocab_size or codec.vocab_size)
        weight_updaters = {one.name: WeightUpdater(one, probed_ids) for one in pools}
        for updater in weight_updaters.values():
            owned.push_async_callback(updater.close)
        await _warn_of_unhealthy(pool)
        await _warn_of_short_calls(pool, inference.request_seconds)
        served = await ledger.policy_versions()  # engines outlive the service and keep their weights
        for one in pools:
            one.set_version(served.get(one.name, 0))
        backend = nodes = None
        if config.nodes is None:
            backend = await open_backend(config.sandbox)
            owned.push_async_callback(backend.close)
            runner = build_runner(config, environments, pool, codec, allowed, backend, judge)
        else:
            runner = nodes = NodeRunners(
                config.nodes, called, environments, lambda rollout, attempt: service.claim_attempt(rollout, attempt)
            )
            owned.push_async_callback(nodes.release)
        service = RolloutService(
            ledger,
            runner,
            config.retry,
            config.runner.shares,
            claim_seconds=None if config.nodes is None else config.nodes.lease_seconds,
        )
        owned.push_async_callback(service.stop, drain=False)  # does nothing after ``LoadedService.close``
        if nodes is not None:
            service.settlement_observers.append(nodes.on_settled)
        await service.start()
        engines = EngineRegistry(
            pool,
            {f"policy-{index}": url for index, url in enumerate(inference.engines)},
            pool_engine_factory("policy", inference, **options),
            AllowedUrls(inference.engines, config.http.engine_urls),
            max_engines=1 if inference.balance == "pass_through" else MAX_ENGINES,
        )
        return LoadedService(
            service,
            backend,
            pool,
            codec,
            owned.pop_all(),
            pools=pools,
            weight_updaters=weight_updaters,
            registries={"policy": engines},
            judge=judge,
            nodes=nodes,
        )


def offered_environments(names: Sequence[str]) -> EnvironmentLookup:
    """Return a lookup of environments with these names only (of all installed ones, if none is given).

    Raises ``ConfigError``: a name is not installed.
    """
    for name in names:
        try:
            registry.get(name)
        except TaskError as error:
            raise ConfigError(f"environments: {error.what}", error.fix) from None

    def find(name: str) -> Environment[Any]:
        known = names or registry.names()
        if name not in known:
            raise TaskError(
                FailureKind.UNKNOWN_ENVIRONMENT,
                f"This service does not offer environment '{name[:80]}'.",
                f"It offers: {', '.join(known)}.",
            )
        return registry.get(name)

    return find


async def load_codec_of(config: InferenceConfig) -> ChatCodec:
    """Load the tokenizer and the template that a pool serves."""
    # Loading a tokenizer takes seconds of computation, and other work may run on the loop.
    return await asyncio.to_thread(
        load_codec, config.tokenizer, config.chat_template, config.template_options, config.tool_format
    )


async def _warn_of_unhealthy(pool: EnginePool) -> None:
    for name, health in (await pool.check_health()).items():
        if not health.ok:
            _LOG.warning("engine %s is not well yet: %s", name, health.detail)


async def _warn_of_short_calls(pool: EnginePool, request_seconds: float) -> None:
    """Warn where a turn of the default length takes longer than a call may: such rollouts end without a reward."""
    tokens = resolve_settings(RolloutSettings()).max_turn_tokens
    for name, per_token in (await pool.measure_paces()).items():
        if tokens * per_token > request_seconds:
            what = "engine %s: %d tokens ('max_turn_tokens') take %.0f s at its pace, and a call %g s at most"
            _LOG.warning(
                f"{what} ('request_seconds'): raise that, or lower 'max_turn_tokens'",
                name,
                tokens,
                tokens * per_token,
                request_seconds,
            )


def build_runner(
    config: ServiceConfig,
    environments: EnvironmentLookup,
    pool: PolicyPool,
    codec: ChatCodec,
    pools_by_url: Mapping[str, PolicyPool],
    backend: SandboxBackend,
    judge: Judge | None,
) -> InProcessRunner:
    """Return the runner of a process that makes attempts: of a service without nodes, or of a node."""
    inference = config.inference
    # Whether admission can follow the engines' own metrics; without them it has only ``live_rollouts``.
    follows_caches = inference.admission == "auto" and inference.balance != "pass_through"
    source = ModelPolicySource(pool, codec, pools_by_url, thinking=inference.thinking)
    return InProcessRunner(
        environments,
        source,
        backend,
        config.runner,
        config.settings,
        config.runs,
        judge=judge,
        has_kv_admission=follows_caches and inference.engine in ("vllm", "sglang"),
        programs=import_module(HARNESS).HarnessPrograms(config.agents, config.sandbox.agents_cache_dir(), source),
    )


class CodecOptions(TypedDict):
    """What ``build_pool`` and ``pool_engine_factory`` need of a pool's codec."""

    vocab_size: int
    encode: Encode
    control_ids: Collection[int]


def codec_options(codec: ChatCodec) -> CodecOptions:
    tokenizer = codec.tokenizer
    return CodecOptions(
        vocab_size=codec.vocab_size, encode=tokenizer.encode_untrusted, control_ids=tokenizer.control_ids.values()
    )


def pool_name_of(url: str) -> str:
    """Return a name that depends on the address only: the ledger keeps policy versions by it."""
    return f"named-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def load_or_create_token(path: Path) -> str:
    """Return the bearer token in this file, readable by its owner only; make both at the first start.

    Raises ``ConfigError``: it cannot be made, is not this user's alone, or others can write to its directory.
    """
    _make_private_directory(path.parent, "state")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the token file cannot be made ({error.strerror}).", "Set 'state' to a writable directory."
        ) from None
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def _make_private_directory(directory: Path, key: str) -> None:
    """Make a directory for this user alone, or check that no other user can put files into it.

    Its content decides what the service believes. Raises ``ConfigError``, which names ``key`` of the configuration.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ConfigError(
            f"{key}: {directory} cannot be made ({error.strerror}).", f"Set '{key}' to a writable directory."
        ) from None
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{key}: every user may write to {directory}.",
            f"chmod go-w {directory}, or set '{key}' to a directory of this user's.",
        )
    # A group may consist of this user alone, and the root of a container owns none of its volumes.
    if found.st_mode & stat.S_IWGRP:
        _LOG.warning("%s: the group of %s may write to it: chmod g-w, unless you trust its members", key, directory)
    if found.st_uid not in (os.geteuid(), 0):
        _LOG.warning("%s: %s belongs to another user (%d), who can replace its files", key, directory, found.st_uid)
