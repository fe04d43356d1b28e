"""Configuration of sandboxes and of their image store: the section ``sandbox`` of the service's configuration."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.sandbox.protocol import DEFAULT_IMAGE, HOST_IMAGE, SandboxLimits, SandboxSpec

_DEFAULT = SandboxLimits()

Count = Annotated[int, Field(gt=0)]


class LimitsConfig(ConfigModel):
    """Bounds of one sandbox; see ``SandboxLimits``. Sizes in bytes, times in seconds."""

    memory: Count = _DEFAULT.memory
    """Memory of each process: touched, not reserved."""
    total_memory: Count = _DEFAULT.total_memory
    """Memory of the whole sandbox."""
    processes: Count = _DEFAULT.processes
    """Processes and threads of the whole sandbox."""
    open_files: Count = _DEFAULT.open_files
    """Open files of each process."""
    file_size: Count = _DEFAULT.file_size
    """Largest file."""
    root_size: Count = _DEFAULT.root_size
    """Bytes that may be written to the whole root file system."""
    root_on: Literal["memory", "disk"] = _DEFAULT.root_on
    """Where written files are kept. ``disk``: below ``scratch``, on a local disk; for more than fits in memory."""
    shm_size: Count = _DEFAULT.shm_size
    """Size of /dev/shm, including memory files."""
    cpu_seconds: Count = _DEFAULT.cpu_seconds
    """CPU time of each process."""
    output: Count = _DEFAULT.output
    """Bytes of output that one command returns."""

    def to_limits(self) -> SandboxLimits:
        """Return the same bounds in the form that backends use."""
        return SandboxLimits(**self.model_dump())


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
        return self.directory or default_cache() / "store"

    def owner_uid(self) -> int:
        """Return the uid (and gid) that unpacked files belong to."""
        return os.geteuid() or self.uid


class SandboxConfig(ConfigModel):
    """Backend, image, directories and bounds of sandboxes."""

    backend: Literal["auto", "apptainer", "userns", "apptainer-plain", "local"] = "auto"
    """``auto``: the first that starts a sandbox here: Apptainer when it is installed and ``image`` is set, user
    namespaces, then the weaker ``apptainer-plain`` (see docs/sandboxes.md)."""
    allow_unsafe_local: bool = False
    """Allow the ``local`` backend, which isolates nothing."""
    image: str = HOST_IMAGE
    """Image of sandboxes whose environment names none: ``host``, or the path of an unpacked image directory; with
    ``images`` also a SIF file, ``docker://...``, or a name in the store."""
    scratch: Path | None = None
    """Directory of the sandboxes' small files, on a local disk; by default ``$PRORL_GYM_SCRATCH``, or
    /var/tmp/prorl-gym-<uid>."""
    uid: Annotated[int, Field(gt=0, lt=2**32 - 1)] = 61099
    """Unprivileged uid (and gid) of sandboxes when the service runs as root. It must own the images."""
    apptainer: Path | None = None
    """The Apptainer or Singularity program; searched in PATH by default."""
    images: ImagesConfig | None = None
    """The image store of this node, for SIF files, ``docker://...`` and names in it. Without it: directories only."""
    cache: Path | None = None
    """Directory that every sandbox may read, with IPython for the python tool in images that lack it, and installed
    agent programs. The sandboxes'
    uid must be able to enter it. By default below /var/cache/prorl-gym for root, else below ~/.cache/prorl-gym."""
    python_tool: Literal["session", "kernel"] = "session"
    """Runner of python cells unless the environment chooses: ``session``, a worker that needs only the image's
    python3, or ``kernel``, the image's own ipykernel."""
    cgroup: Literal["auto", "off"] | Path = "auto"
    """A cgroup v2 directory in which sandboxes get cgroups of their own. ``auto``: the service's own or one above it,
    if it was delegated to the service; without one, the bounds are those that need none (docs/sandbox-limits.md)."""
    start_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest time a sandbox may take to start."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds of sandboxes whose environment sets none."""
    warm: Annotated[int, Field(ge=0)] = 0
    """Most warm sandboxes per image and spec; 0: each is started when it is needed."""
    warm_memory: Count = 1 << 30
    """Most bytes for all warm sandboxes together, each counted as 16 MB."""
    warm_shell: bool = True
    """Start the shell of a warm sandbox beforehand, where its image has one."""

    def ipython_cache_dir(self) -> Path:
        """Return the directory of the copies of IPython."""
        if self.cache is not None:
            return self.cache / "ipython"
        shared = default_cache() / "ipython"
        if shared.exists() and not os.access(shared, os.W_OK):  # another user's, for other interpreters
            return Path.home() / ".cache" / "prorl-gym" / "ipython"
        return shared

    def agents_cache_dir(self) -> Path:
        """Return the directory of installed agent programs."""
        return (self.cache or default_cache()) / "agents"

    def apply_defaults(self, spec: SandboxSpec) -> SandboxSpec:
        """Return ``spec`` with these defaults for what it leaves open: image, python tool, each bound separately."""
        defaults, wanted = self.limits.to_limits(), asdict(spec.limits)
        chosen = {name: value for name, value in wanted.items() if value != getattr(_DEFAULT, name)}
        image = self.image if spec.image == DEFAULT_IMAGE else spec.image
        tool = spec.python_tool or self.python_tool
        return replace(spec, image=image, python_tool=tool, limits=replace(defaults, **chosen))


def default_cache() -> Path:
    """Return this user's cache directory. It is not below root's home: sandboxes run as another user and read it."""
    set_by_user = os.environ.get("PRORL_GYM_CACHE")
    if set_by_user:
        return Path(set_by_user)
    return Path("/var/cache/prorl-gym") if os.geteuid() == 0 else Path.home() / ".cache" / "prorl-gym"
