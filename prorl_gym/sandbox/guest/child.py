"""Starting a confined child: fork, wire up, confine, exec; failures come back as an ``OSError``."""

import errno
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from prorl_gym.sandbox.guest.kernel import become_subreaper
from prorl_gym.sandbox.guest.kills import hand_over, take_over

Confine = Callable[[Callable[[int], None]], None]
"""Gives up what a payload must not have. Hands over the listener of the filter of calls, if that has one."""
FD_LIMIT = 1 << 20


class StartError(OSError):
    """A child could not be started. ``stage``: ``cwd``, ``confine`` or ``exec``."""

    def __init__(self, code: int, stage: str) -> None:
        super().__init__(code, os.strerror(code))
        self.stage = stage


def fork_exec(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    descriptors: Mapping[int, int],
    confine: Confine,
) -> tuple[int, int | None]:
    """Start a program in its own session; return its pid and the listener of its filter of calls, if that has one.

    Args:
        argv: program (searched in ``env``'s PATH) and arguments.
        env: complete environment.
        cwd: working directory.
        descriptors: number in the child -> descriptor here. Nothing else is inherited.
        confine: called in the child just before exec.

    Raises:
        StartError: with the stage that failed.
    """
    report, failed = socket.socketpair()  # close-on-exec: a successful exec closes it, and we read EOF
    with report:
        with failed:
            pid = os.fork()
            if pid == 0:
                _run_child(argv, env, cwd, descriptors, confine, failed.detach())
        answer, listener = take_over(report, wait=True)
    if answer:
        if listener is not None:
            os.close(listener)
        os.waitpid(pid, 0)
        stage, _, code = answer.decode().partition(":")
        raise StartError(int(code), stage)
    return pid, listener


def _run_child(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    descriptors: Mapping[int, int],
    confine: Confine,
    failed: int,
) -> None:
    """Never returns: an exception must not unwind into the guest's own loop."""
    stage = "confine"
    code = errno.EIO
    try:
        os.setsid()
        failed = _arrange(descriptors, failed)
        stage = "cwd"
        os.chdir(cwd)
        stage = "confine"
        prepare(confine, failed)
        stage = "exec"
        _exec(argv, env)
    except OSError as error:
        code = error.errno or errno.EIO
    except ValueError:  # a NUL byte
        code = errno.EINVAL
    finally:
        try:
            os.write(failed, f"{stage}:{code}".encode())
        finally:
            os._exit(127)


def prepare(confine: Confine, line: int) -> None:
    """Last steps of every payload process: default signals, orphans stay below it, confinement.

    Args:
        confine: the last of them.
        line: a socket to the guest.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    become_subreaper()
    confine(lambda listener: hand_over(line, listener))


def _arrange(descriptors: Mapping[int, int], failed: int) -> int:
    """Give the descriptors their numbers and close all others; return the new number of ``failed``."""
    above = max(descriptors) + 1
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in descriptors.items()}
    report = fcntl.fcntl(failed, fcntl.F_DUPFD_CLOEXEC, above)
    for number, fd in high.items():
        os.dup2(fd, number)
    previous = 2
    for number in sorted({*descriptors, report} - {0, 1, 2}):
        os.closerange(previous + 1, number)
        previous = number
    os.closerange(previous + 1, FD_LIMIT)
    return report


def _exec(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Exec along PATH. The most telling error wins: a file that may not be executed over one that is not there."""
    program = argv[0]
    places = [program]
    if "/" not in program:
        places = [os.path.join(place, program) for place in env.get("PATH", "").split(":") if place]
    best = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for place in places:
        try:
            os.execve(place, list(argv), dict(env))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            best = error
    raise best
