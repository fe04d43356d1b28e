"""The configuration of a service, composed of the models of its parts: what ``prorl-gym serve --config`` reads."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from prorl_gym.agents.command_config import CommandConfig, require_known_agent
from prorl_gym.client import default_state_dir
from prorl_gym.config import ConfigModel
from prorl_gym.errors import TaskError
from prorl_gym.inference.config import InferenceConfig, normalize_url
from prorl_gym.logs import LogFormat
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.nodes.node_runners import NodesConfig
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import RunnerConfig
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.settings import RolloutSettings

_LABEL = r"[a-z0-9_-]+"

_IPV4_LIKE = re.compile(r"[0-9*]+(?:\.[0-9*]+){3}")


class HttpConfig(ConfigModel):
    """The HTTP side of the service."""

    host: str = "127.0.0.1"
    """Address to listen on. With any other, other machines can connect; they need the token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8770
    """0: any free one, which the log names."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 64 << 20
    """Largest body of a request."""
    max_pending: Annotated[int, Field(gt=0)] = 100_000
    """Most rollouts without a record; beyond it submissions are refused with 429."""
    engine_urls: tuple[str, ...] = ()
    """Engines that a trainer may register over HTTP besides ``inference.engines``: addresses whose host and port may
    contain ``*``, for example ``http://10.0.0.*:8000/v1``. No other address is ever called."""
    history_seconds: Annotated[float, Field(ge=1, le=3600)] = 5.0
    """Seconds between two points of the dashboard's curves; 720 points are kept."""
    stop_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a stop waits for running rollouts; a second signal stops at once. The next start redoes the rest."""

    @field_validator("engine_urls")
    @classmethod
    def _check_patterns(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        AllowedUrls((), urls)  # raises for what is no pattern
        return urls


class LogConfig(ConfigModel):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: LogFormat = "auto"
    """``json`` for machines, ``plain`` for people; ``auto``: plain on a terminal, otherwise JSON."""


class ServiceConfig(ConfigModel):
    """The whole configuration of a service."""

    inference: InferenceConfig
    inference_urls: tuple[str, ...] = ()
    """Further engine addresses that a request may name as its ``inference_url``."""
    judge: InferenceConfig | None = None
    """A pool of engines for graders that use a model, with its own model and tokenizer; none by default. Its calls
    never queue behind the policy's."""
    sandbox: SandboxConfig = SandboxConfig()
    runner: RunnerConfig = RunnerConfig()
    nodes: NodesConfig | None = None
    """Run attempts on nodes, which join over HTTP (docs/clusters.md). By default, the service runs them itself."""
    retry: RetryConfig = RetryConfig()
    environments: tuple[str, ...] = ()
    """Names of the environments to offer; all installed ones by default."""
    agents: dict[str, CommandConfig] = Field(default_factory=dict[str, CommandConfig])
    """Agent programs of your own, by the name that the setting ``agent`` uses, in addition to the installed presets
    (docs/harnesses.md)."""
    settings: RolloutSettings = RolloutSettings()
    """Sampling and limits of the service; requests, environments and runs override them."""
    runs: dict[str, RolloutSettings] = Field(default_factory=dict[str, RolloutSettings])
    """Sampling and limits of single runs, by run id."""
    state: Path = Field(default_factory=default_state_dir)
    """Directory of the token and, unless ``ledger.path`` is set, of the ledger. Created when missing."""
    ledger: LedgerConfig | None = None
    """Where rollouts are stored; ``ledger.sqlite`` in ``state`` by default."""
    http: HttpConfig = HttpConfig()
    log: LogConfig = LogConfig()

    @field_validator("inference_urls")
    @classmethod
    def _normalize_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(normalize_url(url) for url in urls)

    @field_validator("settings", "runs")
    @classmethod
    def _require_known_agents(
        cls, levels: RolloutSettings | dict[str, RolloutSettings], info: ValidationInfo
    ) -> RolloutSettings | dict[str, RolloutSettings]:
        for settings in [levels] if isinstance(levels, RolloutSettings) else levels.values():
            if settings.agent:
                try:
                    require_known_agent(settings.agent, info.data.get("agents", ()))
                except TaskError as error:
                    raise ValueError(f"{error.what.rstrip('.')} ({error.fix.rstrip('.')})") from None
        return levels

    @property
    def ledger_config(self) -> LedgerConfig:
        """The ledger's configuration, the default filled in."""
        return self.ledger or LedgerConfig(path=self.state / "ledger.sqlite")

    @property
    def token_file(self) -> Path:
        """Where the bearer token is."""
        return self.state / "token"


NODE_FIELDS = {
    *("inference", "inference_urls", "judge", "sandbox", "runner", "nodes"),
    *("environments", "agents", "settings", "runs", "log"),
}
"""What of the configuration concerns nodes."""


class AllowedUrls:
    """Engine addresses that a trainer may register: no other one is ever called. ``urls`` are normalized."""

    def __init__(self, urls: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        self._urls = frozenset(urls)
        self._patterns = [UrlPattern.parse(text) for text in patterns]

    def __contains__(self, url: str) -> bool:
        return url in self._urls or any(pattern.matches(url) for pattern in self._patterns)


@dataclass(frozen=True, slots=True)
class UrlPattern:
    """A parsed pattern: an address whose host and port may hold ``*``, such as ``http://10.0.0.*:8000/v1``.

    It is compared part by part, so that a star never matches a separator: in a name it matches one label, in an IPv4
    pattern digits, as a port any. A name that only looks like an address (``10.0.0.evil``) matches no IPv4 pattern.
    """

    scheme: str
    host: re.Pattern[str]
    port: str
    """``*`` for any."""
    path: str

    @classmethod
    def parse(cls, text: str) -> "UrlPattern":
        """Read a pattern. Raises ``ValueError``."""
        port_example = text.strip().replace(":*", ":65535")
        parts = urlsplit(normalize_url(port_example))
        host = (parts.hostname or "").lower()
        if "*" in parts.path or "*" in parts.scheme:
            raise ValueError("a star is allowed in the host and as the port only, as in http://10.0.0.*:8000/v1")
        if not host.replace("*", "").strip("."):
            raise ValueError("a host of nothing but stars would let the service call anything")
        star = r"[0-9]+" if _IPV4_LIKE.fullmatch(host) else _LABEL
        pattern = re.compile(re.escape(host).replace(r"\*", star))
        port = "*" if port_example != text.strip() else _port(parts.scheme, parts.port)
        return cls(parts.scheme, pattern, port, parts.path)

    def matches(self, url: str) -> bool:
        """Return whether this normalized address fits."""
        parts = urlsplit(url)
        return (
            parts.scheme == self.scheme
            and self.host.fullmatch((parts.hostname or "").lower()) is not None
            and self.port in ("*", _port(parts.scheme, parts.port))
            and parts.path == self.path
        )


def _port(scheme: str, port: int | None) -> str:
    return str(port or (443 if scheme == "https" else 80))
