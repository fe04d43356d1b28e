"""Why the kernel refused a sandbox, in words that end with what to do."""

import errno
from collections.abc import Callable
from dataclasses import dataclass

_APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
_DEBIAN = "kernel.unprivileged_userns_clone"
_COUNT = "user.max_user_namespaces"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line on what is wrong, one on what to do."""

    what: str
    fix: str


def read_sysctl(name: str) -> str | None:
    """Return a kernel setting by its dotted name; ``None`` when this kernel has none of that name."""
    try:
        with open(f"/proc/sys/{name.replace('.', '/')}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def explain_user_namespaces(number: int, read: Callable[[str], str | None] | None = None) -> Diagnosis:
    """Explain why making a user namespace, or working inside a new one, was refused.

    Args:
        number: the ``errno`` of the refused call.
        read: gives kernel settings; this kernel's by default.
    """
    read = read or read_sysctl
    for name, closed, opened in ((_COUNT, "0", "65536"), (_DEBIAN, "0", "1"), (_APPARMOR, "1", "0")):
        if read(name) == closed:
            return Diagnosis(
                f"this kernel refuses user namespaces: {name} is {closed}.",
                f"As root: sysctl -w {name}={opened} (and put it into /etc/sysctl.d to keep it).",
            )
    if number in (errno.ENOSPC, errno.EUSERS):
        return Diagnosis(
            f"the kernel's limit on user namespaces is reached ({_COUNT} is {read(_COUNT)}).",
            f"As root: sysctl -w {_COUNT}=65536, or stop other containers.",
        )
    if number == errno.EPERM:
        return Diagnosis(
            "user namespaces are refused here (EPERM), as in a container with the default seccomp filter.",
            "Start that container with '--security-opt seccomp=unconfined --security-opt systempaths=unconfined'"
            f" or run outside it; otherwise check sysctl {_COUNT}.",
        )
    return Diagnosis(
        f"user namespaces cannot be made ({errno.errorcode.get(number, number)}).",
        f"The kernel needs CONFIG_USER_NS and sysctl {_COUNT} above 0.",
    )
