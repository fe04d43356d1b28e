"""The stock image of the python tool: Debian's python3 with IPython, ipykernel, numpy, sympy, matplotlib, pytest.

Built once with a network, repeatable without: the packages of the distribution are kept as debootstrap's own archive
with a lock file next to it, the wheels by name, version and contents as ``prorl_python.lock`` lists.
"""

import asyncio
import hashlib
import os
import platform
import shutil
import sys
import tarfile
import tempfile
from importlib.resources import files
from pathlib import Path

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.images.image_import import import_image, run_command
from prorl_gym.sandbox.images.locks import locked
from prorl_gym.sandbox.images.store import ImageRecord, ImageStore, file_digest

NAME = "prorl-python"
_SUITE = "bookworm"
_PYTHON = "3.11"
_DEBOOTSTRAP = ("debootstrap", "--variant=minbase", "--include=python3-minimal,python3,ca-certificates")
_SITE_PACKAGES = f"usr/local/lib/python{_PYTHON}/dist-packages"
_COMMANDS = {"ipython": "IPython", "pytest": "pytest"}
_COMMAND_SECONDS = 1800.0
# Fixed time of every file and password change, in Unix seconds: equal packages make equal layers on any day.
_BUILD_TIME = 1_700_000_000
_MTIME_OPTION = f"--mtime=@{_BUILD_TIME}"
_REMOVED_DIRECTORIES = ("var/cache/apt", "var/lib/apt/lists", "var/log", "var/cache/ldconfig", "debootstrap", "dev")
_PIP_TARGET = (
    *("--only-binary=:all:", "--no-deps", "--require-hashes", "--implementation=cp", f"--python-version={_PYTHON}"),
    *("--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64"),
)


async def build(store: ImageStore, cache: Path, name: str = NAME) -> ImageRecord:
    """Build the image and give it a name. ``cache`` keeps the packages for the next build.

    Raises ``ConfigError`` when this is not root on x86_64, a tool is missing, or a package differs from the lock files.
    """
    if os.geteuid() != 0 or platform.machine() != "x86_64":
        raise ConfigError(
            f"{name} is built by root on x86_64 (debootstrap needs it).",
            "Build it there and take it over: `prorl-gym images import` of a SIF or an archive.",
        )
    os.makedirs(cache / "wheels", exist_ok=True)
    async with locked(cache / "lock"):
        archive = await _fetch_packages(cache)
        wheels = await _fetch_wheels(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as work:
            root = Path(work, "root")
            # The directory above is closed to other users: the setuid programs below it are dropped only on import.
            await _install(root, archive, wheels)
            return await import_image(store, root, name, tar_options=[_MTIME_OPTION])


async def _fetch_packages(cache: Path) -> Path:
    """Return debootstrap's archive of packages, verified against the lock that was written with it."""
    archive, lock = cache / f"{_SUITE}.tar", cache / f"{_SUITE}.lock"
    if archive.exists() and lock.exists():
        if await asyncio.to_thread(_package_lines, archive) == lock.read_text(encoding="utf-8"):
            return archive
        raise ConfigError(f"{archive} does not match {lock.name}.", "Remove both to fetch the packages again.")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as work:
        fresh = Path(work, "packages.tar")
        await run_command([*_DEBOOTSTRAP, f"--make-tarball={fresh}", _SUITE, f"{work}/tree"], seconds=_COMMAND_SECONDS)
        lock.write_text(await asyncio.to_thread(_package_lines, fresh), encoding="utf-8")
        os.replace(fresh, archive)
    return archive


def _package_lines(archive: Path) -> str:
    """Return name with version, and digest, of every package in an archive. Blocks: run it in a thread."""
    lines: list[str] = []
    with tarfile.open(archive) as members:
        for member in members:
            file = members.extractfile(member) if member.name.endswith(".deb") else None
            if file is not None:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
                lines.append(f"{os.path.basename(member.name)} sha256:{digest}\n")
    return "".join(sorted(lines))


def locked_wheels() -> dict[str, str]:
    """Return digest to name and version of every wheel of the image."""
    text = files("prorl_gym.sandbox.images").joinpath("prorl_python.lock").read_text(encoding="utf-8")
    lines = [line.split(" --hash=") for line in text.splitlines() if line and not line.startswith("#")]
    return {digest: requirement for requirement, digest in lines}


async def _fetch_wheels(cache: Path) -> Path:
    """Return a directory that holds every wheel, fetching those that are missing."""
    place, names = cache / "wheels", locked_wheels()
    if missing := set(names) - await asyncio.to_thread(lambda: {file_digest(wheel) for wheel in place.glob("*.whl")}):
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as work:
            lock = Path(work, "lock.txt")
            lines = (f"{names[digest]} --hash={digest}\n" for digest in sorted(missing))
            await asyncio.to_thread(lock.write_text, "".join(lines), encoding="utf-8")
            await _pip("download", *_PIP_TARGET, f"--dest={work}/wheels", f"--requirement={lock}")
            for wheel in os.listdir(f"{work}/wheels"):
                os.replace(f"{work}/wheels/{wheel}", place / wheel)
    return place


async def _install(root: Path, archive: Path, wheels: Path) -> None:
    await run_command([*_DEBOOTSTRAP, f"--unpack-tarball={archive}", _SUITE, str(root)], seconds=_COMMAND_SECONDS)
    lock = files("prorl_gym.sandbox.images").joinpath("prorl_python.lock")
    where = ("--no-index", f"--find-links={wheels}", "--no-compile", f"--target={root / _SITE_PACKAGES}")
    await _pip("install", *_PIP_TARGET, *where, f"--requirement={lock}")
    _clean_root(root)
    # Compiled once here, not by every sandbox; by contents, since every file gets the same date.
    compiled = ("-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash")
    await run_command(
        ["chroot", str(root), "/usr/bin/python3", *compiled, f"/{_SITE_PACKAGES}", f"/usr/lib/python{_PYTHON}"],
        seconds=_COMMAND_SECONDS,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        allowed_exit_codes=(0, 1),  # 1: a file is no Python of this version on purpose, as in the tests of a package
    )


def _clean_root(root: Path) -> None:
    """Remove what only the installation needed, and programs that name the interpreter of this machine."""
    shutil.rmtree(root / _SITE_PACKAGES / "bin", ignore_errors=True)
    for record in (root / _SITE_PACKAGES).glob("*.dist-info/RECORD"):
        # Digests of programs differ with the path of the builder, which is in their first line.
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = (line for line in lines if not line.startswith(("../../bin/", "bin/")))
        record.write_text("".join(kept), encoding="utf-8")
    for name, module in _COMMANDS.items():
        program = root / "usr/local/bin" / name
        program.write_text(f'#!/bin/sh\nexec /usr/bin/python3 -m {module} "$@"\n', encoding="ascii")
        program.chmod(0o755)
    for name in ("shadow", "shadow-"):
        if (file := root / "etc" / name).exists():
            # A fixed day of the last password change (shadow(5)), not that of the build.
            accounts = (line.split(":") for line in file.read_text(encoding="ascii").splitlines())
            fixed = (":".join([*fields[:2], str(_BUILD_TIME // 86400), *fields[3:]]) + "\n" for fields in accounts)
            file.write_text("".join(fixed), encoding="ascii")
    for name in _REMOVED_DIRECTORIES:
        for entry in (root / name).glob("*"):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


async def _pip(*arguments: str) -> None:
    # The user's own settings may choose the index; the digests decide which files are accepted.
    await run_command(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], seconds=_COMMAND_SECONDS
    )
