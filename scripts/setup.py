#!/usr/bin/env python3
"""Make ``.venv``: this package, NeMo Gym and the development tools. Plain standard library, any Python >= 3.8.

NeMo Gym asks for CPython >= 3.13.14. In this order:
  (a) such an interpreter on the machine, or one that ``uv python install 3.13`` can fetch;
  (b) else the newest CPython 3.13.x, where NeMo Gym is installed with --ignore-requires-python (it runs);
  (c) else one error that says what to install.
Running it again takes no time while neither pyproject.toml nor the interpreter has changed.
"""

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WANTED, SERIES = (3, 13, 14), (3, 13)
GYM = "nemo-gym>=0.5.1"
PROBE = """import sys, ensurepip, venv
print(sys.implementation.name, *sys.version_info[:3], sys.prefix == sys.base_prefix)"""
READ_TOOLS = """import json, tomllib
print(json.dumps(tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['dev']))"""
ERROR = """make setup: found no CPython 3.13 with the venv module (looked on PATH, in /usr/bin and ~/.pyenv/versions).
Install one (`uv python install 3.13`, `pyenv install 3.13`, or apt install python3.13-venv) and run it again."""


def version_of(python):
    """Return (major, minor, micro) of a usable CPython, else None. Virtual environments do not count."""
    try:
        answer = subprocess.run(
            [python, "-I", "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    words = answer.stdout.decode().split()
    return tuple(map(int, words[1:4])) if words[0] == "cpython" and words[4] == "True" else None


def candidates():
    """Return paths that may be a Python 3.13 or newer, each file once."""
    names = ("python3.13", "python3", "python3.14", "python")
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    paths = [os.path.join(folder, name) for folder in folders if folder for name in names]
    paths += glob.glob(os.path.expanduser("~/.pyenv/versions/3.1[3-9]*/bin/python3"))
    seen = set()
    for path in paths:
        real = os.path.realpath(path)
        if os.access(path, os.X_OK) and real not in seen:
            seen.add(real)
            yield path


def found(paths):
    """Return [(version, path)] of the usable interpreters of the series NeMo Gym supports, newest first."""
    versions = [(version_of(path), path) for path in paths]
    return sorted((pair for pair in versions if pair[0] and pair[0][:2] == SERIES), reverse=True)


def from_uv():
    """Return the 3.13 that uv has or fetches, as ``found`` does."""
    uv = shutil.which("uv")
    if not uv:
        return []
    try:
        subprocess.run([uv, "python", "install", "3.13"], timeout=170, check=True, stderr=subprocess.DEVNULL)
        path = subprocess.check_output([uv, "python", "find", "--managed-python", "3.13"], timeout=20).decode().strip()
    except (OSError, subprocess.SubprocessError):
        return []  # no network, or nothing for this machine: the interpreters that are here decide
    return found([path])


def choose():
    """Return (version, path), or exit with the one error."""
    here = found(candidates())
    best = here[:1]
    if not best or best[0][0] < WANTED:
        best = sorted(from_uv() + best, reverse=True)
    if not best:
        sys.exit(ERROR)
    return best[0]


def stamp_of(version, path):
    """Return what the environment depends on, as one digest."""
    digest = hashlib.sha256(repr((version, os.path.realpath(path))).encode())
    for name in ("pyproject.toml", "scripts/setup.py"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def install(venv, *arguments):
    """Install into the environment: with uv where there is one, since it is several times faster."""
    python = os.path.join(venv, "bin", "python")
    uv = shutil.which("uv")
    if uv and "--ignore-requires-python" not in arguments:
        command = [uv, "pip", "install", "--quiet", "--python", python, *arguments]
    else:
        flags = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location", "--prefer-binary"]
        command = [python, "-m", "pip", "install", *flags, *arguments]
    subprocess.run(command, cwd=ROOT, check=True)


def development_tools(venv):
    """Return the ``dev`` dependency group; read by the new interpreter, which has tomllib."""
    return json.loads(subprocess.check_output([os.path.join(venv, "bin", "python"), "-c", READ_TOOLS], cwd=ROOT))


def main():
    """Make or refresh the environment."""
    started = time.time()
    venv = os.environ.get("VENV", os.path.join(ROOT, ".venv"))
    stamp_file = os.path.join(venv, "prorl-setup.json")
    try:
        with open(stamp_file) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        stamp = {}
    known = stamp.get("version"), stamp.get("python", "")
    if os.path.exists(known[1]) and stamp.get("digest") == stamp_of(tuple(known[0]), known[1]):
        return
    version, python = choose()
    print("make setup: CPython {}.{}.{} ({}) -> {}".format(*version, python, venv), flush=True)
    subprocess.run([python, "-m", "venv", "--clear", venv], check=True)
    install(venv, "-e", ".", *development_tools(venv))
    if version < WANTED:
        print(
            "make setup: NeMo Gym asks for Python >= 3.13.14; installing it on {}.{}.{} all the same "
            "(--ignore-requires-python), where it is known to run.".format(*version),
            flush=True,
        )
        install(venv, "--ignore-requires-python", GYM)
    with open(stamp_file, "w") as file:
        json.dump({"version": version, "python": python, "digest": stamp_of(version, python)}, file)
    print(f"make setup: done in {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        command = " ".join(error.cmd[:4])
        sys.exit(f"make setup: `{command}` failed (exit {error.returncode}); its own message is above.")
