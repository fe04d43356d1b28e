r"""One bash on a pty of the sandbox's own devpts (ptyprocess, wrapped), and the loop that it runs, as text.

Commands do not travel over the terminal, and their ends are not read from it. Per command, the service writes the
user's traps and the text to a memory file and a random nonce to a pipe; bash evaluates the text and answers ``nonce,
exit code, directory, exported environment``, each ended by NUL, on another pipe; the user's traps precede the nonce.
Why it looks the way it does:

* It runs as ``PROMPT_COMMAND`` of an interactive bash. SIGINT unwinds an interactive bash to its top level, which
  runs ``PROMPT_COMMAND`` again: an interrupted ``while :; do :; done`` is reported with code 130 and keeps its state.
* It is not a function, since ``declare`` inside a function makes local variables.
* Everything but the command is in the condition of the loop, and the loop is followed by itself, so that ``continue``
  and ``break`` in a command only lead back to it.
* The descriptors are closed by redirections around the loop, and the loop uses the copies that bash keeps of them to
  undo that. Those are close-on-exec: the programs that a command starts do not inherit them.
* What was typed and not read by the command before (``read -t 0`` tests whether there is any) is discarded
  before the report: what is typed after it is for the next command.
* ``builtin`` and the ``IFS= TMOUT=`` prefixes keep a user's functions and settings out of it. A function named
  ``builtin`` ends it: the nonce is then not read, and the loop must not spin.
* Between commands there are no DEBUG and ERR traps and no tracing. What is visible until they are off goes to
  /dev/null, and so does the function that brings them back: it is the first line of the evaluated text, so that line
  numbers begin at 1, a syntax error does not lose them, and the failing ``eval`` itself does not fire ERR. A function,
  since only ``return`` gives any exit code without a fork and without firing ERR.
* A bash that exits during a command reports from an EXIT trap: the same fields, with ``end`` for the exit code. That
  keeps its directory and variables; its process proves the end. An exit inside a function runs the trap
  before the redirections are undone, any other exit after it.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from ptyprocess import PtyProcess  # pyright: ignore[reportMissingTypeStubs]

from prorl_gym.sandbox.guest.fork_exec import Confine, prepare_exec, receive_report
from prorl_gym.sandbox.guest.guest_messages import ChildStartError

_BASH = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
_ROWS, _COLUMNS = 50, 200
MAX_COMMAND = 1 << 20
"""Bytes of one command, without the NUL that ends it."""
MAX_TRAPS = 16 << 10
"""Bytes of the code that sets the user's traps, likewise."""
TRAPS_MARK = "+"
"""End of a nonce for which there are traps in the memory file, before the text."""
_LOOP = r"""
while
  {
    __prorl_rc=${__prorl_rc:-$?};
    [[ -n $__prorl_nonce ]] && builtin trap -p ERR DEBUG >&@REPORT@;
    builtin trap - DEBUG ERR;
    __prorl_x=;
    [[ $- == *x* ]] && { builtin set +x; __prorl_x='builtin set -x;'; };
    [[ $- == *v* ]] && { builtin set +v; __prorl_x+='builtin set -v;'; };
    [[ $- == *T* ]] && { builtin set +T; __prorl_x+='builtin set -T;'; };
  } >/dev/null 2>&1;
  builtin jobs -ns;
  if [[ -n $__prorl_nonce ]]; then
    __prorl_last=${__prorl_rc:-0};
    [[ -t 0 ]] && builtin read -t 0 && IFS= builtin read -r -N 65536 -t 0.01 __prorl_junk;
    builtin printf '%s\0%s\0%s\0' "$__prorl_nonce" "$__prorl_last" "${PWD-}" >&@REPORT@ ||
      { __prorl_nonce=; \exit 70; };
    __prorl_nonce=;
    builtin declare -px >&@REPORT@;
    builtin printf '\0' >&@REPORT@;
  fi;
  PROMPT_COMMAND=$__prorl_prompt __prorl_rc=;
  IFS= TMOUT= builtin read -r -d '' -u @NONCE@ __prorl_nonce || builtin exit 0;
  if [[ $__prorl_nonce == *@TRAPPED@ ]]; then
    IFS= TMOUT= builtin read -r -d '' -u @TEXT@ __prorl_traps;
    __prorl_x+=$__prorl_traps;
  fi;
  IFS= TMOUT= builtin read -r -d '' -u @TEXT@ __prorl_text;
  [[ $- == *e* ]] && __prorl_last=0;
  if [[ -z $__prorl_x && $__prorl_last == 0 ]]; then
    __prorl_enter='[[ 1 ]]';
  else
    __prorl_enter=__prorl_enter;
    __prorl_enter() {
      builtin unset -f __prorl_enter;
      { builtin eval "$__prorl_x"; builtin return "$__prorl_last"; } >/dev/null 2>&1;
    };
  fi;
  [[ -n $__prorl_nonce ]] || { __prorl_loop= PROMPT_COMMAND=; \exit 70; [[ -n $__prorl_loop ]]; };
do
  builtin eval "$__prorl_enter"$'\n'"$__prorl_text";
done;
builtin eval "$__prorl_loop"
"""
_FINAL_REPORT = r"""
[[ -n $__prorl_nonce ]] &&
  builtin printf '%s\0end\0%s\0' "$__prorl_nonce" "${PWD-}" &&
  builtin declare -px &&
  builtin printf '\0'
"""
_EXIT_TRAP = r"""
{ builtin trap - DEBUG ERR; } >/dev/null 2>&1;
{ { builtin eval "$__prorl_bye"; } >&@OUTER_REPORT@ || { builtin eval "$__prorl_bye"; } >&@REPORT@; } 2>/dev/null
"""
_START = r"""
builtin export -n PROMPT_COMMAND PS1 PS2;
builtin set +H +o history;@SURVIVE@
builtin unset MAILCHECK HISTFILE;
PS1= PS2= __prorl_nonce= __prorl_rc= __prorl_x= __prorl_text= __prorl_traps= __prorl_last=0 __prorl_enter=;
__prorl_bye='@BYE@';
__prorl_loop='@LOOP@';
__prorl_prompt='{ builtin eval "$__prorl_loop"; } @OUTER_NONCE@<&- @OUTER_REPORT@>&- @OUTER_TEXT@<&-';
builtin trap -- '@EXIT@' EXIT;
builtin eval "$__prorl_prompt"
"""


_INNER_FDS = {"@NONCE@": 10, "@REPORT@": 11, "@TEXT@": 12}
"""Where bash keeps, close-on-exec, what the redirections of ``__prorl_prompt`` close: from 10, in this order."""
_IGNORE_SIGXFSZ = " builtin trap '' XFSZ;"
"""An interactive bash catches the signal even where it was ignored at its start, and ends by it."""


def build_prompt_command(nonce_fd: int, report_fd: int, text_fd: int, *, survives_full_disk: bool = False) -> str:
    """Return the loop for these descriptors (pipes, memory file of commands): ``PROMPT_COMMAND`` at bash's start.

    ``survives_full_disk``: writing beyond the largest file is an error, not bash's end.
    """
    whole = _START
    for name, code in (("@LOOP@", _LOOP), ("@BYE@", _FINAL_REPORT), ("@EXIT@", _EXIT_TRAP)):
        whole = whole.replace(name, code.strip().replace("'", "'\\''"))
    whole = whole.strip().replace("\n", " ").replace("@SURVIVE@", _IGNORE_SIGXFSZ if survives_full_disk else "")
    outer = {"@OUTER_NONCE@": nonce_fd, "@OUTER_REPORT@": report_fd, "@OUTER_TEXT@": text_fd}
    for name, value in {**outer, **_INNER_FDS, "@TRAPPED@": TRAPS_MARK}.items():
        whole = whole.replace(name, str(value))
    return whole


class Terminal:
    """A started bash: its pid and the service's ends. Call ``close_descriptors`` once they are sent."""

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

        def enter() -> None:
            try:
                os.chdir(cwd)
            except OSError:  # it was deleted: a shell without its directory is still a shell
                os.chdir("/")
            prepare_exec(confine, own_line.fileno())

        try:
            bash = next((path for path in _BASH if os.path.isfile(path) and os.access(path, os.X_OK)), None)
            if bash is None:
                raise ChildStartError(2, "exec")
            # High numbers: scripts like to use 3 to 9, and bash itself takes from 10.
            base = max(32, min(200, open_files - 16))
            numbers = [fcntl.fcntl(fd, fcntl.F_DUPFD, base) for fd in (nonce_out, report_in, text)]
            own += numbers
            prompt_command = build_prompt_command(*numbers, survives_full_disk=survives_full_disk)
            self._process = _spawn(
                [bash, "--noprofile", "--norc", "--noediting", "-i"],
                {**env, "PROMPT_COMMAND": prompt_command, "PS1": "", "PS2": ""},
                enter,
                sorted([*numbers, own_line.fileno()]),
            )
            _, self.listener = receive_report(line, wait=False)
            """Listener of its filter of calls, if that has one."""
        except BaseException:
            _close_all(self._service_fds)
            raise
        finally:
            _close_all(own)
            line.close()
            own_line.close()
        self.pid: int = self._process.pid
        self.descriptors = [self._process.fd, *self._service_fds]
        """Terminal master, nonces (write), reports (read), traps and command text (memory file)."""

    def close_descriptors(self) -> None:
        """Close our copies. The object must not be collected before: ptyprocess would then kill the shell."""
        self._process.fileobj.close()
        self._process.closed = True
        _close_all(self._service_fds)


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _make_command_file() -> int:
    """Return a memory file of a fixed size: a payload reaches it through /proc, and must not make it any larger."""
    text = os.memfd_create("command", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(text, MAX_TRAPS + 1 + MAX_COMMAND + 1)
    fcntl.fcntl(text, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return text


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
            raise ChildStartError(error.errno or 5, "exec") from None
        raise ChildStartError(5, "confine") from error
