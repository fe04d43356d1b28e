"""The formats of registries: references, manifests, indexes and configurations, read strictly and bounded.

A reference is ``docker://[HOST[:PORT]/]NAME[:TAG][@DIGEST]``, parsed as every registry client does.
"""

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.left_out import count_left_out, unknown_fields

DOCKER_SCHEME = "docker://"
DOCKER_HUB = "docker.io"
_HUB_API = "https://registry-1.docker.io"

# The grammar of the OCI distribution specification.
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_HOST = re.compile(r"[A-Za-z0-9.-]+(?::[0-9]+)?|\[[0-9a-fA-F:]+\](?::[0-9]+)?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

MAX_MANIFEST_BYTES = 4 << 20
"""The specification's own bound for manifests; also applied to configurations."""
MAX_LAYERS = 480
"""overlayfs takes 500 lower directories; task layers need some of them."""

_INDEX = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_IMAGE = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
ACCEPT = ", ".join(_IMAGE + _INDEX)

_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class RegistryReference:
    host: str
    """As written; ``docker.io`` by default."""
    repository: str
    tag_or_digest: str
    """A tag, or a digest (``sha256:...``), which wins over a tag."""

    @classmethod
    def parse(cls, text: str) -> "RegistryReference":
        """Read a reference, with or without ``docker://``; ``IMAGE_MISSING`` when it is malformed."""
        rest, _, digest = text.removeprefix(DOCKER_SCHEME).partition("@")
        first, slash, remainder = rest.partition("/")
        # A first part that does not look like a host belongs to the name.
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
            and (_DIGEST.fullmatch(selector) or (not digest and _TAG.fullmatch(selector)))
        ):
            raise SandboxError(
                FailureKind.IMAGE_MISSING,
                f"image {text!r} is not a reference to an image of a registry.",
                "Write docker://[HOST/]NAME[:TAG] or docker://[HOST/]NAME@sha256:DIGEST, the name in lower case.",
            )
        return cls(host, repository, selector)

    def __str__(self) -> str:
        mark = "@" if self.tag_or_digest.startswith("sha256:") else ":"
        return f"{DOCKER_SCHEME}{self.host}/{self.repository}{mark}{self.tag_or_digest}"

    def api_url(self, mirrors: Mapping[str, str]) -> str:
        """Return the base URL of the registry's API, or its mirror's, for this repository. Loopback has no TLS."""
        base = mirrors.get(self.host)
        if base is None:
            name = self.host.rsplit(":", 1)[0]
            scheme = "http" if name in ("localhost", "127.0.0.1", "[::1]") else "https"
            base = _HUB_API if self.host == DOCKER_HUB else f"{scheme}://{self.host}"
        return f"{base.rstrip('/')}/v2/{self.repository}"


class _RegistryModel(BaseModel):
    """What a registry answers; the fields are those of OCI's image specification 1.1 and of Docker's."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)
    unread: ClassVar[frozenset[str]] = frozenset()
    """Fields that say nothing about the files or variables of an image."""

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Return the names of fields, nested ones too, that are neither read nor known."""
        yield from unknown_fields(self.model_extra or {}, self.unread, prefix)
        for name in type(self).model_fields:
            value = getattr(self, name)
            for part in cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,)):
                if isinstance(part, _RegistryModel):
                    yield from part.unknown(f"{prefix}{name}.")


class Descriptor(_RegistryModel):
    """Digest and size of a blob."""

    unread = frozenset({"mediaType", "urls", "annotations", "data", "artifactType", "platform"})

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: Annotated[int, Field(ge=0)]


class Platform(_RegistryModel):
    unread = frozenset({"os.version", "os.features", "variant", "features"})
    os: str = ""
    architecture: str = ""


class IndexEntry(Descriptor):
    platform: Platform = Platform()


class Manifest(_RegistryModel):
    """One image: its layers, lowest first."""

    unread = frozenset({"schemaVersion", "mediaType", "artifactType", "subject", "annotations"})

    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(max_length=MAX_LAYERS)


class Index(_RegistryModel):
    """The images of several platforms under one name."""

    unread = Manifest.unread

    manifests: tuple[IndexEntry, ...]


class ContainerConfig(_RegistryModel):
    unread = frozenset(  # how a container of it is started, which a sandbox's owner decides
        {"User", "ExposedPorts", "Entrypoint", "Cmd", "Volumes", "WorkingDir", "Labels", "StopSignal", "ArgsEscaped"}
        | {"Memory", "MemorySwap", "CpuShares", "Healthcheck", "Hostname", "Domainname", "AttachStdin", "AttachStdout"}
        | {"AttachStderr", "Tty", "OpenStdin", "StdinOnce", "Image", "OnBuild", "Shell", "MacAddress", "StopTimeout"}
        | {"NetworkDisabled"}
    )
    env: tuple[str, ...] | None = Field(alias="Env", default=None)


class ImageConfig(_RegistryModel):
    unread = frozenset(
        {"created", "author", "architecture", "os", "os.version", "os.features", "variant", "rootfs", "history"}
        | {"container", "container_config", "docker_version", "id", "parent", "comment", "throwaway", "Size"}
        | {"moby.buildkit.buildinfo.v1", "moby.buildkit.cache.v0"}
    )
    config: ContainerConfig | None = None

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """Variables of the image, PATH above all; those that no program could be started with are left out."""
        lines = [line for line in (self.config.env if self.config else None) or () if "\0" not in line]
        return tuple((name, value) for name, mark, value in (line.partition("=") for line in lines) if name and mark)


class TokenResponse(_RegistryModel):
    """Answer of a registry's token service."""

    unread = frozenset({"expires_in", "issued_at", "scope", "token_type", "refresh_token"})

    token: str = ""
    access_token: str = ""


Model = TypeVar("Model", bound=_RegistryModel)


def parse_model(model: type[Model], data: bytes, where: str) -> Model:
    """Read one of the models of this module; ``IMAGE_BROKEN`` when the data does not fit."""
    try:
        read = model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "it"
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"{where}: not a {model.__name__.lower()} of an image ({key}: {first['msg']}).",
            "Only image manifests of schema 2 and OCI are supported; push the image again with a current tool.",
        ) from None
    count_left_out("registry", model.__name__.lower(), read.unknown())
    return read


def select_platform(index: Index, where: str) -> IndexEntry:
    """Return this machine's image of an index; ``IMAGE_MISSING`` when there is none."""
    wanted = _ARCHITECTURE.get(platform.machine(), platform.machine())
    for choice in index.manifests:
        if (choice.platform.os, choice.platform.architecture) == ("linux", wanted):
            return choice
    offered = ", ".join(sorted({f"{one.platform.os}/{one.platform.architecture}" for one in index.manifests}))
    raise SandboxError(
        FailureKind.IMAGE_MISSING,
        f"{where}: no image for linux/{wanted} (there are {offered or 'none'}).",
        "Name another image, or run on another machine.",
    )
