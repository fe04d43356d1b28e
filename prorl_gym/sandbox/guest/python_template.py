"""The template of python workers: the host's python3 with IPython loaded, forked into sandboxes over its ``/usr``.

    spawner --fork, exec--> template       outside, as the sandboxes' uid; single-threaded; holds nothing of any rollout
      template --fork--> entrant           enters the sandbox's namespaces, except for its own pid; waits for the worker
        entrant --fork--> worker           inside: confined as what the guest starts itself, then runs cells

Starting an interpreter and importing IPython takes ten times the CPU time of such a fork. The entrant is given its
sandbox by the guest alone, over a socket of their own (see ``fork_template``), and by then has no other
descriptor. No process of the sandbox sees the entrant or the template: they are in none of its pid namespaces. Owning
the sandbox's user namespace, the sandboxes' uid needs no privilege to enter.

A worker must be what a fresh interpreter in the sandbox would be. It refuses (``ESTALE``, and the guest's caller starts
a fresh one) when a file that was loaded, or a directory of ``sys.path``, differs from the template's. Where nothing has
run in the sandbox yet, its files are the host's, at which the template looks itself, and ends when they have changed.
Only the hash seed and the memory layout are those of the template.
"""

import builtins
import contextlib
import errno
import gc
import importlib.machinery
import importlib.util
import io
import json
import linecache
import os
import signal
import site
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest import cell_worker
from prorl_gym.sandbox.guest.confine import changed_signals, confine
from prorl_gym.sandbox.guest.fork_exec import close_all_except, enter_namespaces, prepare_exec, renumber_descriptors
from prorl_gym.sandbox.guest.guest_messages import (
    encode_packet,
    receive_descriptors,
    send_packet,
    try_receive_packet,
)
from prorl_gym.sandbox.protocol import SandboxLimits

SITE_MODULES = ("sitecustomize", "usercustomize")
"""Modules that an interpreter imports at its start where they exist. The host's are not a sandbox's: its ``/etc``
differs. The bundle, first in the template's path, has empty ones."""
_OWN_IMPORTS = ("_ctypes", "ctypes", "fcntl", "gc", "platform", "resource")
"""Modules that only the code of ours here imports, and neither a fresh worker nor IPython."""
_HIDDEN_MODULES = tuple(f"{name}." for name in ("prorl_gym", *SITE_MODULES, *_OWN_IMPORTS))
_LOOK_SECONDS = 1.0
_STANDARD_AND_CHANNEL = 4
"""Descriptors of a worker: 0 to 2, and the channel of ``cell_worker``."""


def main(arguments: Sequence[str]) -> None:
    """Serve until the spawner is gone. Arguments: descriptor of its socket, directory of IPython or "", bundle's path.

    Each request is a packet with the guest's socket, and a directory of the cgroup that the worker belongs to, if any.
    Once, before them, ``{"runner": "ipython" or "console"}`` is sent.
    """
    syscalls.set_parent_death_signal(signal.SIGKILL)
    syscalls.set_command_line("python3")
    syscalls.set_dumpable(False)
    spawner = socket.socket(fileno=int(arguments[0]))
    template = _Template(arguments[1], arguments[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps entrants, and workers that lose theirs
    syscalls.set_child_subreaper()
    changed_signals()  # found once; every worker resets them
    send_packet(spawner, encode_packet({"runner": template.console.kind}))
    while (received := try_receive_packet(spawner)) is not None:
        line, *cgroup = received[1]
        if template.is_outdated():
            return  # the next one loads what is there now
        try:
            pid = syscalls.fork_without_hooks(cgroup[0] if cgroup else None)
        except OSError:
            pid = -1  # the guest sees its socket close
        if pid == 0:
            _run_entrant(template, socket.socket(fileno=line))
        for descriptor in (line, *cgroup):
            os.close(descriptor)


class _Template:
    """The start of every worker: a console, and the state of the files that it was loaded from.

    ``packages``: directory that sandboxes are shown as ``cell_worker.MOUNTED_PACKAGES``, or "". ``bundle``: path from
    which our own modules come.
    """

    def __init__(self, packages: str, bundle: str) -> None:
        sys.path.remove(bundle)
        mounted = _MountedPackages(packages)
        mounted.install()
        console = cell_worker.make_cell_runner(packages)
        if isinstance(console, cell_worker.IPythonCellRunner):  # which imports much only for a first cell
            with contextlib.redirect_stdout(io.StringIO()):
                console.run_cell("0")
            linecache.clearcache()
            console = console.make_successor()
        self.console = console
        mounted.uninstall()
        for name in [name for name in sys.modules if f"{name}.".startswith(_HIDDEN_MODULES)]:
            del sys.modules[name]  # what is loaded of ours works without, and cells find none of it
        sys.path_importer_cache.clear()
        specs = [getattr(module, "__spec__", None) for module in sys.modules.values()]
        origins = [str(getattr(spec, "origin", None) or "") for spec in specs]
        own = [path for path in origins if path.startswith("/") and not path.startswith(cell_worker.MOUNTED_PACKAGES)]
        self._files = {path: _file_state(path) for path in (os.path.realpath(sys.executable), *own)}
        directories = [path for path in sys.path if path not in ("", cell_worker.MOUNTED_PACKAGES)]
        self._listings = {path: _listing(path) for path in (*directories, site.getusersitepackages())}
        self._next_look = 0.0
        gc.collect()
        gc.freeze()

    def is_outdated(self) -> bool:
        """Whether the host's files have changed, as seen now or within the last second."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_SECONDS
        return self._has_changed()

    def is_stale(self) -> bool:
        """Whether a fresh interpreter in the present root could load something else."""
        customisations = (f"{path}/{name}.py" for path in self._listings for name in SITE_MODULES)
        return self._has_changed() or any(map(os.path.exists, customisations))

    def _has_changed(self) -> bool:
        if any(_listing(path) != names for path, names in self._listings.items()):
            return True
        return any(_file_state(path) != state for path, state in self._files.items())


def _file_state(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _listing(path: str) -> frozenset[str] | None:
    try:
        return frozenset(os.listdir(path))
    except OSError:
        return None


class _MountedPackages:
    """Finds modules of the mounted packages on the host as if they lay where sandboxes see them.

    Their paths (``__file__`` and what they make of it) are thus those of a sandbox from the start. ``source``: where
    the host keeps them; "": there are none.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._target = cell_worker.MOUNTED_PACKAGES
        self._open = builtins.open
        self._stat = os.stat

    def install(self) -> None:
        """Make the files that are mounted in sandboxes readable here, by their names there."""
        if self._source:
            sys.meta_path.append(self)
            sys.path_importer_cache[self._source] = None  # metadata is read there, modules are not

            builtins.open = io.open = self._with_host_paths(self._open)
            os.stat = self._with_host_paths(self._stat)

    def uninstall(self) -> None:
        """Undo it; leave ``sys.path`` as a worker has it, with the packages' place only where they are used."""
        if self._source:
            sys.meta_path.remove(self)
            sys.path[:] = [self._target if path == self._source else path for path in sys.path]
            replaced = {id(builtins.open): self._open, id(os.stat): self._stat}
            for module in list(sys.modules.values()):  # some have imported the functions by name
                for name, value in list(vars(module).items()):
                    if id(value) in replaced:
                        setattr(module, name, replaced[id(value)])

    def _with_host_paths(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a path so that a path below the packages' place means the file on this host."""

        @wraps(function)
        def here(path: Any, *others: Any, **named: Any) -> Any:
            text = str(path) if isinstance(path, str) or hasattr(path, "__fspath__") else ""
            if text.startswith(self._target):
                path = self._source + text[len(self._target) :]
            return function(path, *others, **named)

        return here

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._source not in sys.path:
            return None  # the host's own IPython is tried first
        parents = [self._target] if path is None else [place for place in path if place.startswith(self._target)]
        for parent in parents:
            name = f"{parent}/{fullname.rpartition('.')[2]}"
            for file, is_package in ((f"{name}/__init__.py", True), (f"{name}.py", False)):
                if os.path.isfile(self._source + file[len(self._target) :]):
                    return importlib.util.spec_from_file_location(
                        fullname,
                        file,
                        loader=_MountedLoader(fullname, file),
                        submodule_search_locations=[name] if is_package else None,
                    )
        return None


class _MountedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module with what Python code may be put in front of, where the import system's own calls go past it."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        found = os.stat(path)
        return {"mtime": found.st_mtime, "size": found.st_size}

    def get_data(self, path: str) -> bytes:  # type: ignore[override]
        with open(path, "rb") as file:
            return file.read()


def _run_entrant(template: _Template, line: socket.socket) -> None:
    """In the template's child: enter the guest's sandbox, fork the worker, report its end. Never returns.

    Whatever memory this process writes to is copied for it, and again for the worker: it leaves all it can to that one.
    """
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all_except(0, 1, 2, line.fileno())
        packet, descriptors, _ = receive_descriptors(line)
        if not packet:
            return
        report, *standard = descriptors[: _STANDARD_AND_CHANNEL + 1]
        os.setsid()
        enter_namespaces(descriptors[_STANDARD_AND_CHANNEL + 1 :])
        worker = os.fork()
        if worker == 0:
            _run_worker(template, packet, line, report, standard)
        for descriptor in (report, *standard):
            os.close(descriptor)
        ended = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        if ended is not None:
            status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            send_packet(line, encode_packet({"status": status}))
            line.recv(1)  # until the guest has read what /proc shows of the worker: its number is not reused before
        os.waitpid(worker, 0)  # the sandbox's first process cannot end before
    except OSError:
        pass  # the guest sees the sockets close
    finally:
        os._exit(0)


def _run_worker(template: _Template, packet: bytes, line: socket.socket, report: int, standard: Sequence[int]) -> None:
    """In the sandbox: become confined, then a worker. Never returns."""
    code, stage = errno.EIO, "template"
    try:
        syscalls.set_parent_death_signal(signal.SIGKILL)
        line.send(b"+")  # the kernel adds the pid that the guest sees
        os.setsid()
        settings = json.loads(packet)
        if not settings["is_untouched"] and template.is_stale():
            raise OSError(errno.ESTALE, "")
        renumber_descriptors(dict(enumerate([*standard, report])))
        report = len(standard)
        close_all_except(*range(report + 1))
        stage = "cwd"
        os.chdir(settings["cwd"])
        stage = "confine"
        limits, allow_system_v = SandboxLimits(**settings["limits"]), settings["allow_system_v"]
        prepare_exec(partial(confine, limits, allow_system_v=allow_system_v), report)
        syscalls.set_dumpable(True)  # as after an exec
        os.close(report)
    except BaseException as error:
        if isinstance(error, OSError):
            code = error.errno or errno.EIO
        os.write(report, f"{stage}:{code}".encode())
        os._exit(127)
    try:
        _become_python(settings["env"])
        cell_worker.serve_forked(template.console)
    except BaseException:
        traceback.print_exc()
    finally:
        cell_worker.flush_streams()
        os._exit(1)


def _become_python(env: Mapping[str, str]) -> None:
    """Take on the state that an interpreter has after its start."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    gc.unfreeze()


if __name__ == "__main__":
    main(sys.argv[1:])
