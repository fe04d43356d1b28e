"""Fetching a source distribution and the wheels that it needs from a package index, without running any of it.

``pip download`` would build the project to learn its metadata, which runs its code on this host; so the file is found
with ``unearth``, on the index that pip is configured for, and only read. Wheels run nothing when pip installs them.
"""

import ast
import hashlib
import os
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from email.parser import BytesHeaderParser
from importlib import import_module
from pathlib import Path
from typing import Any

from prorl_gym.environments.swe.sdist.source_tree import SourceFile
from prorl_gym.errors import ConfigError

_PYPI = "https://pypi.org/simple/"
_MAX_BYTES = 32 << 20
_COMPILED = (".so", ".pyd", ".dylib")
_PIP_SECONDS = 300.0


def fetch_sdist(requirement: str, cache: Path, index: str = "") -> Path:
    """Return the path of the source distribution of ``NAME==VERSION``, downloaded once.

    Blocks; run it in a thread.

    Args:
        requirement: an exact version, so that rows can be reproduced.
        cache: directory of downloaded files, made when missing.
        index: URL of a simple index; the one pip is configured for by default.

    Raises:
        ConfigError: the version is not exact, ``unearth`` is missing, or there is no such file.
    """
    name, equals, version = (part.strip() for part in requirement.partition("=="))
    if not (name and equals and version) or "*" in version:
        raise ConfigError(f"'{requirement[:80]}' is no exact version.", "Spell it NAME==VERSION.")
    kept = cache / f"{_file_name(name)}-{_file_name(version)}.tar.gz"
    if kept.is_file():
        return kept
    data = _download(f"{name}=={version}", index)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as fresh:
        fresh.write(data)
    os.replace(fresh.name, kept)
    return kept


def applicable_requirements(requirements: Sequence[str], python: str) -> list[str]:
    """Return those requirements whose markers hold in a sandbox with this Python, without their markers.

    Raises:
        ConfigError: one is malformed, or names an address instead of an index: pip would build what is there.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found: list[str] = []
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            raise ConfigError(f"'{line[:80]}' is no requirement.", "Take another release.") from None
        if requirement.url is not None:
            raise ConfigError(f"'{line[:80]}' is at an address of its own.", "Only what an index has can be used.")
        versions = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        if requirement.marker is None or requirement.marker.evaluate(versions):
            requirement.marker = None
            found.append(str(requirement))
    return found


def fetch_wheels(
    requirements: Sequence[str], python: str, index: str = "", provided: Sequence[str] = ()
) -> dict[str, SourceFile]:
    """Return the unpacked pure-Python wheels of some requirements and of what these need.

    Blocks; run it in a thread.

    Args:
        requirements: as packages spell them.
        python: version of the sandbox's Python, for example ``3.11``.
        index: see ``fetch_sdist``.
        provided: what the sandbox has (``NAME==VERSION``): chosen in this version, and left out.

    Raises:
        ConfigError: something has no pure-Python wheel for this Python, or pip failed.
    """
    wanted: list[str] = []
    missing = list(requirements)
    found: dict[str, SourceFile] = {}
    while missing:
        wanted += missing
        found = _install(wanted, python, index, provided)
        missing = [line for line in _missing_requirements(found, python) if line not in wanted]
    return _without(found, provided)


def _without(packages: Mapping[str, SourceFile], provided: Sequence[str]) -> dict[str, SourceFile]:
    """Return the files of packages without those of some distributions, as their records list them."""
    gone: set[str] = set()
    for name in provided:
        project, _, version = name.partition("==")
        record = packages.get(f"{project.replace('-', '_').lower()}-{version}.dist-info/RECORD")
        if record is not None:
            gone.update(line.split(",")[0] for line in record.data.decode().splitlines())
    return {path: file for path, file in packages.items() if path not in gone}


def _install(requirements: Sequence[str], python: str, index: str, provided: Sequence[str]) -> dict[str, SourceFile]:
    with tempfile.TemporaryDirectory(prefix="prorl-gym-wheels-") as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-input"]
        command += ["--target", folder, "--only-binary", ":all:", "--platform", "any", "--abi", "none"]
        command += ["--implementation", "py", "--python-version", python, "--disable-pip-version-check"]
        command += ["--index-url", index] if index else []
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{line}\n" for line in provided))
        command += ["--constraint", str(constraints)]
        # After `--`: a requirement from untrusted metadata must not become an option of pip.
        if why := _run_pip([*command, "--", *requirements]):
            raise ConfigError(
                f"The requirements {', '.join(requirements)[:200]} are not to be had as pure wheels: {why[:200]}",
                "Only projects whose requirements are pure Python can be used.",
            )
        constraints.unlink()
        return _read_packages(Path(folder))


def _missing_requirements(packages: Mapping[str, SourceFile], python: str) -> list[str]:
    """Return what installed packages need in a sandbox and lack: pip reads markers as if for this host's Python."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    needed: list[str] = []
    there: set[str] = set()
    for path, file in packages.items():
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", path):
            headers = BytesHeaderParser().parsebytes(file.data)
            there.add(canonicalize_name(str(headers["Name"])))
            needed += applicable_requirements([str(line) for line in headers.get_all("Requires-Dist", [])], python)
    return [line for line in dict.fromkeys(needed) if canonicalize_name(Requirement(line).name) not in there]


def _run_pip(command: Sequence[str]) -> str:
    """Return what went wrong, or an empty text."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"pip took more than {_PIP_SECONDS:g} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    # pip warns about conflicts with the packages installed here, which this installation elsewhere cannot affect.
    return (errors or [done.stderr[-200:]])[-1] if done.returncode else ""


def _read_packages(folder: Path) -> dict[str, SourceFile]:
    found: dict[str, SourceFile] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in _COMPILED:
            raise ConfigError(f"The wheel with {name} is compiled.", "Only pure-Python requirements can be used.")
        if path.is_file() and not path.is_symlink() and not name.startswith("bin/") and path.suffix != ".pyc":
            found[name] = SourceFile(path.read_bytes())
    return found


def _download(requirement: str, index: str) -> bytes:
    try:
        unearth: Any = import_module("unearth")
        fetchers: Any = import_module("unearth.fetchers")
    except ImportError:
        raise ConfigError(
            "Fetching source distributions needs unearth.", "Install it: pip install 'prorl-gym[data]'."
        ) from None
    configured = _pip_configuration()
    indexes = [index] if index else [configured.get("index-url", _PYPI), *configured.get("extra-index-url", "").split()]
    with fetchers.PyPIClient(verify=ssl.create_default_context(cafile=configured.get("cert"))) as session:
        finder = unearth.PackageFinder(
            session=session, index_urls=indexes, no_binary=[":all:"], ignore_compatibility=True
        )
        try:
            best = finder.find_best_match(requirement, allow_yanked=True).best
            if best is None or not best.link.filename.endswith(".tar.gz"):
                raise ConfigError(f"{requirement} has no .tar.gz on the index.", "Check name and version.")
            return _verify_hash(requirement, _read(session, best.link), best.link.hash_option or {})
        except ConfigError:
            raise
        except Exception as error:  # a foreign library's own, and its HTTP client's
            raise ConfigError(
                f"{requirement} cannot be fetched: {type(error).__name__}: {str(error)[:200]}",
                "Check name, version, and the index that pip is configured for (or --index).",
            ) from None


def _read(session: Any, link: Any) -> bytes:
    data = bytearray()
    with session.get_stream(link.url_without_fragment) as response:
        response.raise_for_status()
        for part in response.iter_bytes(1 << 16):
            data += part
            if len(data) > _MAX_BYTES:
                raise ConfigError(f"{link.filename} is larger than {_MAX_BYTES >> 20} MiB.", "Take a smaller project.")
    return bytes(data)


def _verify_hash(requirement: str, data: bytes, hashes: Mapping[str, Sequence[str]]) -> bytes:
    for name, stated in hashes.items():
        if hashlib.new(name, data).hexdigest() not in stated:
            raise ConfigError(f"{requirement}: the file is not what the index states.", "Try again, or another index.")
    return data


def _pip_configuration() -> dict[str, str]:
    """Return pip's configuration from its files and the environment, which wins; empty without pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    found: dict[str, str] = {}
    for prefix in ("global.", "install.", ":env:."):
        for line in lines:
            key, _, value = line.partition("=")
            if key.startswith(prefix) and value[:1] in "'\"":
                found[key.removeprefix(prefix)] = str(ast.literal_eval(value))
    return found


def _file_name(text: str) -> str:
    return "".join(character if character.isalnum() or character in ".+" else "_" for character in text)
