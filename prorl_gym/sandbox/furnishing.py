"""What every root must have, whatever its image brings. Runs inside, as part of the guest's bundle, too."""

import os

_DIRECTORIES = (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/run", 0o755), ("/root", 0o700))
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n"


def prepare_files(workdir: str, *, keep_etc: bool) -> None:
    """Make the usual directories, the working directory and, unless kept, the files of a machine without a network.

    Args:
        workdir: of the sandbox.
        keep_etc: ``/etc`` is of our own making already.
    """
    for name, mode in _DIRECTORIES:
        if not os.path.isdir(name):
            os.makedirs(name)
            os.chmod(name, mode)
    os.makedirs(os.path.join("/", workdir), exist_ok=True)
    if not keep_etc:
        _replace("/etc/resolv.conf", "")
        _replace("/etc/hosts", _HOSTS)


def _replace(path: str, text: str) -> None:
    """Write a file anew; an image may have a symbolic link there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "x", encoding="ascii") as file:
        file.write(text)
