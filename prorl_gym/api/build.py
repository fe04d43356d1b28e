"""Building a service from its configuration: the one place where the rooms are wired together."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prorl_gym.api.allowed import AllowedUrls
from prorl_gym.api.config import ServiceConfig
from prorl_gym.api.fleet import Fleet
from prorl_gym.api.opening import Opened, open_service
from prorl_gym.api.schema import MAX_ENGINES
from prorl_gym.api.serving import Decode
from prorl_gym.environments.judge import EngineJudge, Judge
from prorl_gym.inference.chat import Codec, load_codec
from prorl_gym.inference.config import InferenceConfig, build_pool, maker
from prorl_gym.inference.lifecycle import PolicyLifecycle
from prorl_gym.inference.pool import EnginePool
from prorl_gym.rollout.attempt import Environments
from prorl_gym.rollout.model_source import ModelPolicySource
from prorl_gym.rollout.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.choose import open_backend
from prorl_gym.sandbox.protocol import SandboxBackend

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """A service that runs, and what it stands on."""

    service: RolloutService
    backend: SandboxBackend
    pool: EnginePool
    codec: Codec
    environments: Environments
    owned: AsyncExitStack
    pools: tuple[EnginePool, ...] = ()
    """``pool``, and those that requests may name."""
    lifecycles: Mapping[str, PolicyLifecycle] = field(default_factory=dict[str, PolicyLifecycle])
    """Of each of ``pools``, by the pool's name: through it alone are they paused and given new weights."""
    fleets: Mapping[str, Fleet] = field(default_factory=dict[str, Fleet])
    """By the pool's name, of those whose engines a trainer may change."""
    decode: Decode | None = None
    """Token ids to text, control tokens shown."""
    judge: Judge | None = None
    """What graders may ask, on engines of its own."""

    async def close(self, *, drain: bool = True) -> None:
        """Stop the service (see ``RolloutService.stop``), then what it stands on. Idempotent.

        A paused policy is not drained, nor one that no engine has: no request can change that any more, so what is in
        hand is left to the next start.
        """
        stuck = [f"{name} is paused" for name, lifecycle in self.lifecycles.items() if lifecycle.paused]
        stuck += [pool.lacking for pool in self.pools if pool.unserved]
        if drain and stuck:
            _LOG.warning("what is in hand is made again by the next start: %s", "; ".join(stuck))
        try:
            await self.service.stop(drain=drain and not stuck)
        finally:
            await self.owned.aclose()


async def build_service(config: ServiceConfig) -> Built:
    """Build and start a service.

    An engine that does not answer is no reason not to start: it may come up later, and the log tells.

    Raises:
        ConfigError: an unknown environment, a tokenizer that cannot be loaded, a missing variable.
        EngineError: ``TEMPLATE_UNSAFE``.
        SandboxError: no sandbox backend works here.
        LedgerError: the ledger's file cannot be used.
    """
    opened = await open_service(config)
    try:
        return await load(opened)
    except BaseException:
        await opened.service.stop(drain=False)
        raise


async def load(opened: Opened) -> Built:
    """Load tokenizer, engines and sandboxes, then begin what was accepted: the other part of ``build_service``.

    Raises:
        ConfigError, EngineError, SandboxError: see ``build_service``. Nothing was begun; the service is to be stopped.
    """
    config, service = opened.config, opened.service
    codec = await _load_codec(config.inference)
    async with AsyncExitStack() as owned:
        pool = await owned.enter_async_context(_build("policy", config.inference, codec))
        allowed = {
            url: await owned.enter_async_context(_pool_of(_name_of(url), url, config, codec))
            for url in config.inference_urls
        }
        judge = None if config.judge is None else await owned.enter_async_context(_judge(config.judge))
        lifecycles = {
            one.name: await owned.enter_async_context(_lifecycle(one, config.inference, codec))
            for one in (pool, *allowed.values())
        }
        for name, health in (await pool.check()).items():
            if not health.ok:
                _LOG.warning("engine %s is not well yet: %s", name, health.detail)
        backend = await open_backend(config.sandbox)
        owned.push_async_callback(backend.close)
        served = await opened.ledger.versions()  # engines outlive this service, and keep their weights
        for one in (pool, *allowed.values()):
            one.set_version(served.get(one.name, 0))
        policies = ModelPolicySource(pool, codec, allowed, thinking=config.inference.thinking)
        runner = InProcessRunner(
            opened.environments,
            policies,
            backend,
            config.runner,
            config.settings,
            config.runs,
            judge=judge,
            follows=_follows_caches(config.inference),
        )
        await service.begin(runner)
        return Built(
            service,
            backend,
            pool,
            codec,
            opened.environments,
            owned.pop_all(),
            pools=(pool, *allowed.values()),
            lifecycles=lifecycles,
            fleets={pool.name: _fleet(pool, config, codec)},
            decode=codec.decode,
            judge=judge,
        )


async def _load_codec(config: InferenceConfig) -> Codec:
    # Loading a tokenizer takes seconds of pure computation: the loop may have other tenants.
    return await asyncio.to_thread(
        load_codec, config.tokenizer, config.chat_template, config.template_options, config.tool_format
    )


@asynccontextmanager
async def _judge(config: InferenceConfig) -> AsyncGenerator[EngineJudge]:
    """Open the pool ``judge``: its weights stay as they are, so nothing but graders ever sees it."""
    codec = await _load_codec(config)
    async with _build("judge", config, codec) as pool:
        for name, health in (await pool.check()).items():
            if not health.ok:
                _LOG.warning("engine %s is not well yet: %s", name, health.detail)
        yield EngineJudge(pool, codec)


def _follows_caches(config: InferenceConfig) -> bool:
    """Tell whether admission can follow what engines tell; with those that never do it has only ``live_rollouts``."""
    return config.admission == "auto" and config.balance != "pass_through" and config.engine in ("vllm", "sglang")


@asynccontextmanager
async def _lifecycle(pool: EnginePool, config: InferenceConfig, codec: Codec) -> AsyncGenerator[PolicyLifecycle]:
    # Ids of a probe are the tokenizer's: a padded model knows more, which nobody ever trained.
    lifecycle = PolicyLifecycle(pool, min(codec.vocab_size, config.vocab_size or codec.vocab_size))
    try:
        yield lifecycle
    finally:
        await lifecycle.close()


def _fleet(pool: EnginePool, config: ServiceConfig, codec: Codec) -> Fleet:
    """Return who belongs to the pool of the policy, and who may join."""
    inference = config.inference
    return Fleet(
        pool,
        {f"{pool.name}-{index}": url for index, url in enumerate(inference.engines)},
        maker(
            pool.name,
            inference,
            vocab_size=codec.vocab_size,
            encode=codec.tokenizer.encode_plain,
            control_ids=codec.tokenizer.control_ids.values(),
        ),
        AllowedUrls(inference.engines, config.http.engine_urls),
        largest=1 if inference.balance == "pass_through" else MAX_ENGINES,
    )


def _name_of(url: str) -> str:
    """Return a name that stays with the address, whatever else the configuration lists: versions are kept by it."""
    return f"named-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _pool_of(name: str, url: str, config: ServiceConfig, codec: Codec) -> EnginePool:
    """Return a pool of one engine, for requests that name it."""
    return _build(name, config.inference.model_copy(update={"engines": [url]}), codec)


def _build(name: str, config: InferenceConfig, codec: Codec) -> EnginePool:
    return build_pool(
        name,
        config,
        vocab_size=codec.vocab_size,
        encode=codec.tokenizer.encode_plain,
        control_ids=codec.tokenizer.control_ids.values(),
    )
