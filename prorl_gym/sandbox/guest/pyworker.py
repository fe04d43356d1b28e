"""The python session's worker: runs inside the sandbox, on the sandbox's own python3 (3.6 or newer), as text.

Requests come and answers go as one JSON line each over descriptor 3; what a cell prints goes to the worker's own
stdout and stderr, one pipe that the service reads, so that subprocesses and C code are heard as well.
"""

# ruff: noqa: E402 - first of all, no file of the working directory may stand in for a module that is imported here.
import sys

CELLS_IMPORT_FROM_HERE = sys.path[:1] == [""]
if CELLS_IMPORT_FROM_HERE:
    del sys.path[0]

import ast
import base64
import io
import json
import linecache
import os
import signal
import socket
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = "/.prorl/python"
MAX_IMAGES = 8
MAX_IMAGE_BYTES = 8 << 20


class Console:
    """Cells with the standard library alone: the value of a last expression is shown, tracebacks are the user's."""

    kind = "console"

    def __init__(self) -> None:
        import types

        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = module  # classes of cells can be pickled; nothing of ours is in reach by name
        self.names = module.__dict__
        self.count = 0

    def shown(self) -> "list[bytes]":
        """Return PNG files that the last cell displayed: this console knows text only."""
        return []

    def run(self, code: str) -> bool:
        """Run a cell; whether it ended without raising."""
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            tree = ast.parse(code, name)
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr):
                del tree.body[-1]
            exec(compile(tree, name, "exec"), self.names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), self.names)
                if value is not None:
                    self.names["_"] = value
                    print(repr(value))
            return True
        except BaseException as error:
            self.show(error)
            return False

    def show(self, error: BaseException) -> None:
        """Write a traceback without our own frames."""
        frames = traceback.extract_tb(error.__traceback__)
        while frames and not frames[0].filename.startswith("<cell"):
            frames.pop(0)
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
        sys.stdout.flush()
        sys.stderr.write("".join(lines + traceback.format_exception_only(type(error), error)))


class IPythonConsole:
    """Cells with IPython: magics, ``!commands``, top-level await, ``display``."""

    kind = "ipython"

    def __init__(self) -> None:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.xmode = "Plain"
        config.InteractiveShell.colors = "NoColor"
        config.InteractiveShell.cache_size = 3  # the least that keeps ``_``, ``__`` and ``___``
        import tempfile  # now that there is an IPython: the directory is for it

        self.shell = InteractiveShell.instance(config=config, ipython_dir=tempfile.mkdtemp(prefix=".ipython-"))
        self.shell.displayhook.write_output_prompt = lambda: None
        self.pictures: list[bytes] = []
        self.shell.enable_gui = lambda *_: None  # pyright: ignore  # for ``%matplotlib``; there is no window
        show, tell = self.shell.displayhook, self.shell.display_pub  # of a last expression, of ``display``
        show.write_format_data = self.watched(show.write_format_data)  # pyright: ignore
        tell.publish = self.watched(tell.publish)  # pyright: ignore

    def watched(self, show: "Callable[..., None]") -> "Callable[..., None]":
        """Return ``show`` so that the picture among the forms of an object is kept; its text is printed as before."""

        def shown(data: "dict[str, object]", *others: object, **named: object) -> None:
            self.keep(data)
            show(data, *others, **named)

        return shown

    def keep(self, data: "dict[str, object]") -> None:
        """Keep the picture among the forms of an object: bytes, or base64 of them."""
        picture = data.get("image/png")
        if isinstance(picture, str):
            picture = base64.b64decode(picture)
        if isinstance(picture, bytes):
            self.pictures.append(picture)

    def shown(self) -> "list[bytes]":
        """Return PNG files that the last cell displayed."""
        pictures, self.pictures = self.pictures, []
        return pictures

    def run(self, code: str) -> bool:
        """Run a cell; whether it ended without raising."""
        result = self.shell.run_cell(code, store_history=False)  # pyright: ignore[reportUnknownMemberType]
        return bool(result.success)


def make_console() -> "Console | IPythonConsole":
    """Prefer the image's IPython, then the mounted one when this python is new enough, then our own."""
    try:
        return IPythonConsole()
    except Exception:  # not there or broken in this image: try the next one
        pass
    try:
        with open(os.path.join(PACKAGES, "REQUIRES")) as file:
            needed = tuple(int(part) for part in file.read().split("."))
        if sys.version_info[:2] >= needed:
            sys.path.append(PACKAGES)
            return IPythonConsole()
    except Exception:  # not mounted, or the same
        pass
    return Console()


def figures() -> "list[bytes]":
    """Return open matplotlib figures as PNG, and close them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    images: list[bytes] = []
    for number in pyplot.get_fignums()[:MAX_IMAGES]:
        data = io.BytesIO()
        pyplot.figure(number).savefig(data, format="png", bbox_inches="tight")
        images.append(data.getvalue())
    pyplot.close("all")
    return images


def encode(images: "list[bytes]") -> "list[str]":
    """Return what an answer has room for."""
    total = 0
    encoded: list[str] = []
    for image in images[:MAX_IMAGES]:
        total += len(image)
        if total > MAX_IMAGE_BYTES:
            break
        encoded.append(base64.b64encode(image).decode("ascii"))
    return encoded


def ignore(number: int, frame: object) -> None:
    """Between cells there is nothing to interrupt. Not SIG_IGN: children would inherit that."""


class StandardStreams:
    """Descriptors 0 to 2 and what ``sys`` makes of them, as they were before the first cell."""

    def __init__(self) -> None:
        self.kept = [os.dup(number) for number in range(3)]
        self.seen = {"stdout": sys.stdout, "stderr": sys.stderr}

    def restore(self) -> None:
        """Put back what a cell closed or led elsewhere, and say it.

        A stream that it replaced by another one is left: it may collect what later cells print.

        Raises:
            OSError: the cell closed our copies too.
        """
        flush()
        notes: list[str] = []
        for number, kept in enumerate(self.kept):
            ours = os.fstat(kept)
            try:
                same = os.path.samestat(os.fstat(number), ours)
            except OSError:
                same = False
            if not same:
                os.dup2(kept, number)
                notes.append(f"[The cell closed or redirected descriptor {number}: it was put back.]")
        for number, name in ((1, "stdout"), (2, "stderr")):
            if not writable(getattr(sys, f"__{name}__")):
                setattr(sys, f"__{name}__", open(number, "w", buffering=1, errors="replace", closefd=False))
            if not writable(getattr(sys, name)):
                setattr(sys, name, getattr(sys, f"__{name}__"))
                notes.append(f"[The cell left a sys.{name} that cannot be written to: it was put back.]")
            elif all(getattr(sys, name) is not known for known in (self.seen[name], getattr(sys, f"__{name}__"))):
                notes.append(f"[The cell replaced sys.{name}. This undoes it: sys.{name} = sys.__{name}__]")
            self.seen[name] = getattr(sys, name)
        flush()
        if notes:
            os.write(1, "".join(f"{note}\n" for note in notes).encode("ascii"))


def writable(stream: object) -> bool:
    """Whether a cell that prints would not fail."""
    return callable(getattr(stream, "write", None)) and not getattr(stream, "closed", False)


def flush() -> None:
    """Write what streams still hold."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except Exception:  # the cell closed or replaced it: then there is nothing to flush
            continue


class Worker:
    """Reads cells, runs them, answers."""

    def __init__(self, channel: socket.socket) -> None:
        self.standard = StandardStreams()
        self.channel = channel
        self.lines = channel.makefile("rb")
        signal.signal(signal.SIGINT, ignore)

    def send(self, message: "dict[str, object]") -> None:
        """Answer the service."""
        self.channel.sendall(json.dumps(message).encode("ascii") + b"\n")

    def serve(self, console: "Console | IPythonConsole") -> None:
        """Say hello, then run what comes."""
        self.send({"ready": console.kind, "version": f"{sys.version_info[0]}.{sys.version_info[1]}"})
        for line in self.lines:
            request = json.loads(line.decode("ascii"))
            ok, images = self.cell(console, request["code"])
            self.send({"cell": request["cell"], "ok": ok, "images": images})

    def cell(self, console: "Console | IPythonConsole", code: str) -> "tuple[bool, list[str]]":
        """Run one cell.

        Raises:
            OSError: the session cannot go on.
        """
        ok, images = False, []
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                ok = console.run(code)
                images = encode(console.shown() + figures())
            finally:
                signal.signal(signal.SIGINT, ignore)
        except KeyboardInterrupt:  # it came when the cell was all but done
            ok = False
        except Exception as error:  # a figure that cannot be drawn
            ok = False
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        self.standard.restore()
        return ok, images


def main() -> None:
    """Serve cells until the service closes the channel."""
    channel = socket.socket(fileno=3)
    os.set_inheritable(3, False)
    sys.argv = [""]
    os.environ.setdefault("MPLBACKEND", "Agg")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and sys.version_info >= (3, 7):
            stream.reconfigure(line_buffering=True, errors="replace")
    console = make_console()
    if CELLS_IMPORT_FROM_HERE:
        sys.path.insert(0, "")
    Worker(channel).serve(console)


if __name__ == "__main__":
    main()
