"""Names of images in registries: ``docker://[HOST[:PORT]/]NAME[:TAG][@DIGEST]``, read as every registry client does."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from prorl_gym.errors import FailureKind, SandboxError

DOCKER = "docker://"
DOCKER_HUB = "docker.io"
_HUB_API = "https://registry-1.docker.io"

# The grammar of the OCI distribution specification.
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_HOST = re.compile(r"[A-Za-z0-9.-]+(?::[0-9]+)?|\[[0-9a-fA-F:]+\](?::[0-9]+)?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegistryReference:
    """One image in one registry."""

    host: str
    """As written, ``docker.io`` when nothing was."""
    repository: str
    selector: str
    """A tag, or a digest (``sha256:...``), which wins over a tag."""

    @classmethod
    def parse(cls, text: str) -> "RegistryReference":
        """Read a reference, with or without ``docker://``.

        Raises:
            SandboxError: ``IMAGE_MISSING``, it is not one.
        """
        rest, _, digest = text.removeprefix(DOCKER).partition("@")
        first, slash, remainder = rest.partition("/")
        # A first part is a host when it looks like one; otherwise it belongs to the name.
        is_host = slash and (any(mark in first for mark in ".:") or first == "localhost")
        host, name = (first, remainder) if is_host else (DOCKER_HUB, rest)
        repository, _, tag = name.partition(":")
        if host in (DOCKER_HUB, "index.docker.io"):
            host = DOCKER_HUB
            repository = repository if "/" in repository else f"library/{repository}"
        selector = digest or tag or "latest"
        if not (
            _HOST.fullmatch(host)
            and _REPOSITORY.fullmatch(repository)
            and (DIGEST.fullmatch(selector) or (not digest and _TAG.fullmatch(selector)))
        ):
            raise SandboxError(
                FailureKind.IMAGE_MISSING,
                f"image {text!r} is no name of an image in a registry.",
                "Write docker://[HOST/]NAME[:TAG] or docker://[HOST/]NAME@sha256:DIGEST, the name in lower case.",
            )
        return cls(host, repository, selector)

    def __str__(self) -> str:
        mark = "@" if self.selector.startswith("sha256:") else ":"
        return f"{DOCKER}{self.host}/{self.repository}{mark}{self.selector}"

    def api(self, mirrors: Mapping[str, str]) -> str:
        """Return the URL below which the registry's API is for this repository.

        Args:
            mirrors: host to the URL of its replacement; loopback hosts are spoken to without TLS.
        """
        base = mirrors.get(self.host)
        if base is None:
            name = self.host.rsplit(":", 1)[0]
            scheme = "http" if name in ("localhost", "127.0.0.1", "[::1]") else "https"
            base = _HUB_API if self.host == DOCKER_HUB else f"{scheme}://{self.host}"
        return f"{base.rstrip('/')}/v2/{self.repository}"
