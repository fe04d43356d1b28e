"""Configuration of the sandbox room."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.sandbox.images.config import ImagesConfig, default_cache
from prorl_gym.sandbox.protocol import DEFAULT_IMAGE, HOST_USR, SandboxLimits, SandboxSpec

_DEFAULT = SandboxLimits()

Count = Annotated[int, Field(gt=0)]


class LimitsConfig(ConfigModel):
    """Bounds of one sandbox; see ``SandboxLimits``. Sizes in bytes, times in seconds."""

    memory: Count = _DEFAULT.memory
    """Memory of each process: what it has touched, not what it has reserved."""
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
    """Where they are kept. ``disk``: below ``scratch``, on a local disk; for what is larger than memory."""
    shm_size: Count = _DEFAULT.shm_size
    """Size of /dev/shm, in which memory files are, too."""
    cpu_seconds: Count = _DEFAULT.cpu_seconds
    """CPU time of each process."""
    output: Count = _DEFAULT.output
    """Bytes of output that one command returns."""

    def to_limits(self) -> SandboxLimits:
        """Return the record that backends take."""
        return SandboxLimits(**self.model_dump())


class SandboxConfig(ConfigModel):
    """Which sandboxes there are and where they keep their things."""

    backend: Literal["auto", "apptainer", "userns", "bwrap", "apptainer-plain", "local"] = "auto"
    """``auto``: the first that really starts a sandbox here: Apptainer when it is installed and ``image`` is set, user
    namespaces, then what is weaker (see docs/sandboxes.md): bubblewrap, plain Apptainer."""
    allow_unsafe_local: bool = False
    """Allow the ``local`` backend, which isolates nothing."""
    image: str = HOST_USR
    """Image of sandboxes whose environment asks for none: ``host``, or the path of an unpacked image directory; with
    ``images`` also a SIF file, ``docker://...``, or a name in the store."""
    scratch: Path | None = None
    """Directory of the sandboxes' small files, on a local disk; /var/tmp/prorl-gym-<uid> by default."""
    uid: Annotated[int, Field(gt=0, lt=2**32 - 1)] = 61099
    """Unprivileged uid (and gid) that sandboxes get when the service runs as root. Images must be owned by it."""
    apptainer: Path | None = None
    """The Apptainer or Singularity program; searched in PATH by default."""
    bwrap: Path | None = None
    """The bubblewrap program; searched in PATH by default."""
    images: ImagesConfig | None = None
    """The image store of this node: SIF files, ``docker://...`` and names it knows. Without it: directories only."""
    cache: Path | None = None
    """Directory of what every sandbox may read: IPython, for the python tool in images that lack it. The sandboxes' uid
    must be able to enter it. Below /var/cache/prorl-gym for root and below ~/.cache/prorl-gym otherwise."""
    python_tool: Literal["session", "kernel"] = "session"
    """What runs python cells where the environment does not say: ``session``, a worker that needs nothing but the
    image's python3, or ``kernel``, the ipykernel that the image brings."""
    cgroup: Literal["auto", "off"] | Path = "auto"
    """A cgroup v2 directory that may be divided up among the sandboxes. ``auto``: the service's own or one above it, if
    it was delegated to the service; without one, bounds are those that need none (docs/sandbox-limits.md)."""
    start_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest time a sandbox may take to start."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds of sandboxes whose environment sets none."""
    warm: Annotated[int, Field(ge=0)] = 0
    """Most sandboxes to hold ready per image and spec; 0: each is started when it is asked for."""
    warm_memory: Count = 1 << 30
    """Most bytes for all of them together, each reckoned at 16 MB."""
    warm_shell: bool = True
    """Start the shell of a warm sandbox beforehand, where its image has one."""

    def ipython_cache(self) -> Path:
        """Return the directory of the copies of IPython."""
        if self.cache is not None:
            return self.cache / "ipython"
        shared = default_cache() / "ipython"
        if shared.exists() and not os.access(shared, os.W_OK):  # another user's, for other interpreters than ours
            return Path.home() / ".cache" / "prorl-gym" / "ipython"
        return shared

    def complete(self, spec: SandboxSpec) -> SandboxSpec:
        """Return ``spec`` with what it leaves open filled in from here: image, python tool, each bound by itself."""
        ours, asked = self.limits.to_limits(), asdict(spec.limits)
        chosen = {name: value for name, value in asked.items() if value != getattr(_DEFAULT, name)}
        image = self.image if spec.image == DEFAULT_IMAGE else spec.image
        tool = spec.python_tool or self.python_tool
        return replace(spec, image=image, python_tool=tool, limits=replace(ours, **chosen))
