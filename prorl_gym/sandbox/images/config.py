"""Configuration of the image store."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from prorl_gym.config import ConfigModel

Count = Annotated[int, Field(gt=0)]


class ImagesConfig(ConfigModel):
    """Where unpacked images are kept on this node and how much they may take. Sizes in bytes, times in seconds."""

    directory: Path | None = None
    """The store, on a local disk that keeps extended attributes (not NFS); below /var/cache/prorl-gym for root and
    below ~/.cache/prorl-gym otherwise."""
    uid: Annotated[int, Field(gt=0, lt=2**32 - 1)] = 61099
    """Owner of unpacked files when the service runs as root: the sandboxes' uid."""
    max_bytes: Count = 200 << 30
    """Most bytes of the store; beyond it the least recently used layers are removed."""
    max_inodes: Count = 20_000_000
    """Most files and directories of the store; beyond it the least recently used layers are removed."""
    jobs: Count = 4
    """Downloads and unpackings at a time, over all processes of this node."""
    mirrors: dict[str, str] = Field(default_factory=dict[str, str])
    """URL of a mirror (``http://127.0.0.1:5000``) by registry host (``docker.io``)."""
    login_host: str = "docker.io"
    """Registry of ``APPTAINER_DOCKER_USERNAME`` and ``APPTAINER_DOCKER_PASSWORD``, which name none. The entries of
    ``~/.docker/config.json`` and ``~/.apptainer/docker-config.json`` name theirs."""
    layer_bytes: Count = 64 << 30
    """Largest layer, unpacked."""
    layer_entries: Count = 2_000_000
    """Most files and directories of one layer."""
    unpack_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """Longest time that unpacking one layer may take."""

    durable: bool = True
    """Sync a layer to the disk before it is used; otherwise a crash of the machine may leave incomplete layers."""

    def store_directory(self) -> Path:
        """Return the directory of the store."""
        return self.directory or default_cache() / "store"

    def owner_uid(self) -> int:
        """Return the uid (and gid) that unpacked files belong to."""
        return os.geteuid() or self.uid


def default_cache() -> Path:
    """Return this user's cache directory. It is not below root's home: sandboxes run as another user and read it."""
    set_by_user = os.environ.get("PRORL_GYM_CACHE")
    if set_by_user:
        return Path(set_by_user)
    return Path("/var/cache/prorl-gym") if os.geteuid() == 0 else Path.home() / ".cache" / "prorl-gym"
