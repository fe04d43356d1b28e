"""ptyprocess, wrapped: one bash on a pty of the sandbox's own devpts."""

import fcntl
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from ptyprocess import PtyProcess  # pyright: ignore[reportMissingTypeStubs]

from prorl_gym.sandbox.guest.bash_loop import MAX_COMMAND, MAX_TRAPS, build_prompt_command
from prorl_gym.sandbox.guest.fork_exec import Confine, StartError, prepare_exec
from prorl_gym.sandbox.guest.payload_kill_monitor import receive_report

_BASH = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
_ROWS, _COLUMNS = 50, 200


class Terminal:
    """A started shell: ``pid`` and the service's ends. ``close_descriptors`` them once they are sent."""

    def __init__(
        self,
        env: Mapping[str, str],
        cwd: str,
        open_files: int,
        confine: Confine,
        *,
        survives_full_disk: bool = False,
    ) -> None:
        nonce_out, nonce_in = os.pipe()
        report_out, report_in = os.pipe()
        text = _make_command_file()
        own = [nonce_out, report_in]
        line, own_line = socket.socketpair()
        self._service_fds = [nonce_in, report_out, text]
        try:
            # High numbers: scripts like to use 3 to 9, and bash itself takes from 10.
            base = max(32, min(200, open_files - 16))
            numbers = [_dup_inheritable(fd, base) for fd in (nonce_out, report_in, text)]
            own += numbers
            self._process = _spawn(
                [_find_bash(), "--noprofile", "--norc", "--noediting", "-i"],
                {
                    **env,
                    "PROMPT_COMMAND": build_prompt_command(*numbers, survives_full_disk=survives_full_disk),
                    "PS1": "",
                    "PS2": "",
                },
                lambda: _prepare_child(cwd, confine, own_line.fileno()),
                sorted([*numbers, own_line.fileno()]),
            )
            _, self.listener = receive_report(line, wait=False)
            """Of its filter of calls, if that has one."""
        except BaseException:
            self._close(self._service_fds)
            raise
        finally:
            self._close(own)
            line.close()
            own_line.close()
        self.pid: int = self._process.pid
        self.descriptors = [self._process.fd, *self._service_fds]
        """Terminal master, nonces (write), reports (read), traps and command text (memory file)."""

    def close_descriptors(self) -> None:
        """Close our copies. The object must not be collected before: ptyprocess would then kill the shell."""
        self._process.fileobj.close()
        self._process.closed = True
        self._close(self._service_fds)

    @staticmethod
    def _close(descriptors: list[int]) -> None:
        for fd in descriptors:
            os.close(fd)


def _make_command_file() -> int:
    """Return a memory file of a fixed size: a payload reaches it through /proc, and must not make it any larger."""
    text = os.memfd_create("command", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(text, MAX_TRAPS + 1 + MAX_COMMAND + 1)
    fcntl.fcntl(text, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return text


def _dup_inheritable(fd: int, least: int) -> int:
    number = fcntl.fcntl(fd, fcntl.F_DUPFD, least)
    os.set_inheritable(number, True)
    return number


def _find_bash() -> str:
    for path in _BASH:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise StartError(2, "exec")


def _prepare_child(cwd: str, confine: Confine, line: int) -> None:
    try:
        os.chdir(cwd)
    except OSError:  # it was deleted: a shell without its directory is still a shell
        os.chdir("/")
    prepare_exec(confine, line)


def _spawn(argv: list[str], env: Mapping[str, str], enter: Callable[[], None], keep: Sequence[int]) -> PtyProcess:
    guest = os.getpid()
    try:
        return PtyProcess.spawn(  # pyright: ignore[reportUnknownMemberType]
            argv, env=dict(env), echo=False, dimensions=(_ROWS, _COLUMNS), preexec_fn=enter, pass_fds=keep
        )
    except BaseException as error:
        if os.getpid() != guest:  # ptyprocess failed in the child: it must not come back as a second guest
            os._exit(127)
        if isinstance(error, OSError):
            raise StartError(error.errno or 5, "exec") from None
        raise StartError(5, "confine") from error
