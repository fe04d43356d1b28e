"""Layers of presets: directories on this host that sandboxes mount read-only, installed from public indexes.

A layer is complete or absent: it is made next to its place and moved there. What an index sent is kept in
``downloads``, so that the same layer can be rebuilt without a network.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prorl_gym.agents.command_config import CommandConfig
from prorl_gym.errors import ConfigError
from prorl_gym.harness.command import LAYER

_SECONDS = 1800.0
"""Longest time of one download or installation."""

_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
"""npm's words for machines."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An agent program with its layer."""

    name: str
    version: str
    wire: str
    """The model API that it calls."""
    layer: "NpmLayer | PythonLayer"
    command: CommandConfig
    """Names files of the layer by ``$layer``."""
    layer_of: str = ""
    """Name of the preset whose layer it shares, of the same version; empty: it has its own."""
    licence: str = ""
    """A warning before the installation of a program whose licence is not a free one."""

    def directory(self, layers: Path) -> Path:
        return layers / f"{self.layer_of or self.name}-{self.version}"

    def is_installed(self, layers: Path) -> bool:
        return self.directory(layers).is_dir()

    def mounted(self, layers: Path) -> CommandConfig:
        return self.command.model_copy(update={"mounts": {LAYER: str(self.directory(layers))}})


def install_preset(preset: Preset, layers: Path, python: str | None = None) -> Path:
    """Install a preset's layer, unless it is there, and return its directory below ``layers``.

    ``python`` is the interpreter that a Python layer brings along; by default one that fits. Raises ``ConfigError`` if
    a program or an index is missing, or the layer does not work here.
    """
    place = preset.directory(layers)
    if place.is_dir():
        return place
    downloads = layers / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{preset.name}-", dir=layers) as temporary:
        made = Path(temporary, "layer")
        made.mkdir()
        preset.layer.install(made, downloads, python)
        _make_readable(made)
        try:
            made.rename(place)
        except OSError:  # another process has installed it meanwhile
            if not place.is_dir():
                raise
    return place


@dataclass(frozen=True, slots=True)
class NpmLayer:
    """Packages of npm, unpacked: they need no other package.

    ``{arch}`` stands for npm's word for this machine (``x64``), ``{machine}`` for its own (``x86_64``).
    """

    packages: Mapping[str, str]
    """``name@version`` by the directory of the layer that it is unpacked into."""
    folders: Mapping[str, str] = field(default_factory=dict[str, str])
    """Which folder of a package that directory is, by the directory; by default all of it."""

    def install(self, directory: Path, downloads: Path, python: str | None) -> None:
        for folder, package in self.packages.items():
            name = _for_this_machine(package)
            archive = downloads / f"{name.lstrip('@').replace('/', '-').replace('@', '-')}.tgz"
            if not archive.is_file():
                with TemporaryDirectory(dir=downloads) as fresh:
                    _run(["npm", "pack", name, "--silent", "--pack-destination", fresh], "Install npm (nodejs.org).")
                    next(Path(fresh).glob("*.tgz")).rename(archive)
            place = directory / _for_this_machine(folder)
            with TemporaryDirectory(dir=downloads) as temporary:
                try:
                    with tarfile.open(archive) as packed:
                        packed.extractall(temporary, filter="data")
                    place.parent.mkdir(parents=True, exist_ok=True)
                    # In a package of npm everything is below one folder, ``package``.
                    Path(temporary, "package", _for_this_machine(self.folders.get(folder, ""))).rename(place)
                except (tarfile.TarError, OSError) as error:
                    what = f"{archive}: cannot be unpacked ({error})."
                    raise ConfigError(what, "Remove it, and install again.") from None


@dataclass(frozen=True, slots=True)
class PythonLayer:
    """Packages of PyPI, with a copy of an interpreter: so the sandbox's image needs none that fits."""

    requirements: tuple[str, ...]
    lock: str
    """File next to this module with the version of every package."""
    pythons: tuple[str, ...]
    """Versions of Python that it runs on, such as ``3.12``."""
    check: str
    """Module that must be importable from the layer."""

    def install(self, directory: Path, downloads: Path, python: str | None) -> None:
        interpreter = find_interpreter(self.pythons, python)
        lock = Path(__file__).parent / self.lock
        pip = [interpreter.program, "-m", "pip", "--disable-pip-version-check"]
        wheels = downloads / f"{lock.stem}-{interpreter.version}"
        if not wheels.is_dir():
            with TemporaryDirectory(dir=downloads) as fresh:
                made = Path(fresh, "wheels")
                # Packages without a wheel are built here, so that the installation needs no build tools.
                fetch = [*pip, "wheel", "-q", "--prefer-binary", "-c", str(lock), "-w", str(made)]
                _run([*fetch, *self.requirements], "Give --python an interpreter with pip, and reach PyPI.")
                made.rename(wheels)
        packages = directory / "packages"
        install = [*pip, "install", "-q", "--no-index", "--find-links", str(wheels), "-c", str(lock)]
        _run([*install, "--no-compile", "--target", str(packages), *self.requirements], f"Remove {wheels}, try again.")
        interpreter.copy_to(directory / "python")
        (directory / "run.py").write_text(_RUN_MODULE, encoding="utf-8")
        program = [str(directory / "python" / "bin" / "python3"), "-I", str(directory / "run.py")]
        # The layer is read-only in sandboxes. Some packages hold files that are templates: those stay as they are.
        compiling = [program[0], "-I", "-m", "compileall", "-q", "-j", "0", str(directory)]
        subprocess.run(compiling, capture_output=True, timeout=_SECONDS, check=False)
        _run(
            [*program, "--check", self.check], "Give --python an interpreter that can be moved, such as uv's.", cwd="/"
        )


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter of this host."""

    program: str
    version: str
    """Such as ``3.12``."""
    binary: str
    """The real program, links resolved."""
    stdlib: str
    library: str
    """Shared library of the interpreter; empty if it has none."""

    def copy_to(self, directory: Path) -> None:
        """Copy interpreter and standard library; the copy finds its library by its own place."""
        name = f"python{self.version}"
        (directory / "bin").mkdir(parents=True)
        shutil.copy2(self.binary, directory / "bin" / "python3")
        shutil.copytree(self.stdlib, directory / "lib" / name, symlinks=False, ignore=_UNUSED)
        if self.library:
            shutil.copy2(self.library, directory / "lib" / os.path.basename(self.library))
            # It searches its own ``lib`` instead of the directory that it names: same bytes, in place. A program that
            # names none, or one that is too short, stays as it is; the check of the layer finds out.
            named, own = os.path.dirname(self.library).encode(), b"$ORIGIN/../lib"
            if len(named) >= len(own):
                program = directory / "bin" / "python3"
                data = program.read_bytes()
                program.write_bytes(data.replace(b"\0" + named + b"\0", b"\0" + own.ljust(len(named), b"\0") + b"\0"))


_UNUSED = shutil.ignore_patterns(
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo"),
    *("__pycache__", "config-3.*", "_sysconfigdata__*.pyc"),
)

_ABOUT = """
import json, os, sys, sysconfig
library = os.path.join(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "binary": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "stdlib": sysconfig.get_path("stdlib"),
    "library": library if sysconfig.get_config_var("Py_ENABLE_SHARED") and os.path.isfile(library) else "",
}))
"""

_RUN_MODULE = '''"""Run a module of this layer with its arguments, or check that one can be imported."""

import os
import runpy
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "packages"))
sys.dont_write_bytecode = True
if sys.argv[1] == "--check":
    __import__(sys.argv[2])
    with open("/proc/self/maps") as maps:
        foreign = [line for line in maps if "/libpython" in line and os.path.dirname(sys.prefix) not in line]
    assert not foreign, f"it loads {foreign[0].split()[-1]}"
else:
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
'''


def find_interpreter(versions: Sequence[str], program: str | None = None) -> Interpreter:
    """Return an interpreter of one of these versions: the given one, the running one, or one in ``PATH``.

    Raises ``ConfigError`` if there is none.
    """
    candidates = [program] if program else [sys.executable, *(f"python{version}" for version in reversed(versions))]
    for candidate in candidates:
        try:
            command = [candidate, "-c", _ABOUT]
            printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
            about: dict[str, Any] = json.loads(printed)
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
        if about["version"] in versions:
            return Interpreter(candidate, **about)
    wanted = f"Python {' or '.join(versions)}"
    what = f"{program} is no {wanted} that runs." if program else f"No {wanted} was found."
    raise ConfigError(what, "Name one with --python; it needs pip.")


def _for_this_machine(text: str) -> str:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise ConfigError(f"There are no builds of agent programs for {machine}.", "Use x86_64 or aarch64.")
    return text.format(arch=_ARCHITECTURES[machine], machine=machine)


def _run(command: Sequence[str], fix: str, cwd: str | None = None) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True, cwd=cwd)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed.", fix) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{' '.join(command[:3])} took longer than {_SECONDS:g} s.", fix) from None
    except subprocess.CalledProcessError as error:
        said = [line for line in (error.stderr or error.stdout or "").splitlines() if line.strip()]
        raise ConfigError(f"{' '.join(command[:4])} failed: {(said or ['no message'])[-1][:300]}", fix) from None


def _make_readable(directory: Path) -> None:
    """Let every user read the layer, and run its programs: sandboxes run as another one, and npm packs some as data."""
    for folder, _, names in os.walk(directory):
        os.chmod(folder, 0o755)
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                with open(path, "rb") as file:
                    is_program = os.fstat(file.fileno()).st_mode & 0o111 or file.read(4) == b"\x7fELF"
                os.chmod(path, 0o755 if is_program else 0o644)
