"""The python session's worker: runs inside the sandbox, on the sandbox's own python3 (3.6 or newer), as text.

Requests come and answers go as one JSON line each over descriptor 3; what a cell prints goes to the worker's own
stdout and stderr, one pipe that the service reads, so that it includes what subprocesses and C code print.

With the argument ``kernel``, the main thread of this process is the image's ipykernel, and another thread its client.
"""

# ruff: noqa: E402 - first, so that no file of the working directory can shadow a module that is imported here.
import sys

CELLS_IMPORT_FROM_CWD = sys.path[:1] == [""]
if CELLS_IMPORT_FROM_CWD:
    del sys.path[0]

import ast
import base64
import io
import json
import linecache
import os
import signal
import socket
import time
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOUNTED_PACKAGES = "/.prorl/python"
MAX_IMAGES = 8
MAX_IMAGE_BYTES = 11 << 20
PNG = b"\x89PNG\r\n\x1a\n"
KERNEL_RETRY_SECONDS = 1.0
KERNEL_IDLE_SECONDS = 2.0  # from its reply on, until it must be idle: a kernel's publisher drops what it cannot send


class CellRunner:
    """Runs the cells of one session and collects the PNG files that they display."""

    kind = ""

    def __init__(self) -> None:
        self.pngs: list[bytes] = []

    def run_cell(self, code: str) -> bool:
        """Run a cell; whether it ended without raising."""
        raise NotImplementedError

    def pop_images(self) -> "list[bytes]":
        pictures, self.pngs = self.pngs, []
        return pictures

    def move_directories(self) -> None:
        """Make new directories, in a fork that has another root and working directory."""


class PlainCellRunner(CellRunner):
    """Cells with the standard library alone: the value of a last expression is shown, tracebacks are the user's."""

    kind = "console"

    def __init__(self) -> None:
        import types

        super().__init__()
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = module  # classes of cells can be pickled; nothing of ours is in reach by name
        self.namespace = module.__dict__
        self.cell_count = 0

    def run_cell(self, code: str) -> bool:
        self.cell_count += 1
        name = f"<cell {self.cell_count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            tree = ast.parse(code, name)
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr):
                del tree.body[-1]
            exec(compile(tree, name, "exec"), self.namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), self.namespace)
                if value is not None:
                    self.namespace["_"] = value
                    print(repr(value))
            return True
        except BaseException as error:
            self.print_traceback(error)
            return False

    def print_traceback(self, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        while frames and not frames[0].filename.startswith("<cell"):
            frames.pop(0)
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
        sys.stdout.flush()
        sys.stderr.write("".join(lines + traceback.format_exception_only(type(error), error)))


def read_tree(root: str) -> "list[tuple[str, int, bytes | None]]":
    """Return path, mode and content (``None``: a directory) of everything below a directory."""
    tree: list[tuple[str, int, bytes | None]] = []
    for directory, names, files in os.walk(root):
        for name in names + files:
            path = os.path.join(directory, name)
            content = None
            if name in files:
                with open(path, "rb") as file:
                    content = file.read()
            tree.append((path[len(root) :], os.stat(path).st_mode & 0o7777, content))
    return tree


def write_tree(root: str, tree: "list[tuple[str, int, bytes | None]]") -> None:
    for path, mode, content in tree:
        if content is None:
            os.mkdir(root + path, mode)
        else:
            with open(root + path, "wb", opener=lambda name, flags, mode=mode: os.open(name, flags, mode)) as file:
                file.write(content)


class IPythonCellRunner(CellRunner):
    """Cells with IPython: magics, ``!commands``, top-level await, ``display``."""

    kind = "ipython"

    def __init__(self) -> None:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        super().__init__()
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.xmode = "Plain"
        config.InteractiveShell.colors = "NoColor"
        config.InteractiveShell.cache_size = 3  # the least that keeps ``_``, ``__`` and ``___``
        import tempfile  # now that there is an IPython: the directory is for it

        self.shell = InteractiveShell.instance(config=config, ipython_dir=tempfile.mkdtemp(prefix=".ipython-"))
        self.directories: list[tuple[str, int, bytes | None]] = []
        self.shell.displayhook.write_output_prompt = lambda: None
        self.shell.enable_gui = lambda *_: None  # pyright: ignore  # for ``%matplotlib``; there is no window
        show_value, publisher = self.shell.displayhook, self.shell.display_pub  # of a last expression, of ``display``
        show_value.write_format_data = self.with_png_capture(show_value.write_format_data)  # pyright: ignore
        publisher.publish = self.with_png_capture(publisher.publish)  # pyright: ignore

    def make_successor(self) -> "IPythonCellRunner":
        """Return a runner for forks of this process. It knows nothing of this one, which has no further use."""
        import atexit

        atexit.unregister(self.shell.atexit_operations)  # pyright: ignore
        type(self.shell).clear_instance()
        successor = IPythonCellRunner()
        successor.directories = read_tree(successor.shell.ipython_dir)  # pyright: ignore
        return successor

    def move_directories(self) -> None:
        import tempfile

        shell: Any = self.shell
        old: str = shell.ipython_dir
        tempfile.tempdir = None
        new = tempfile.mkdtemp(prefix=".ipython-")
        write_tree(new, self.directories)
        for owner in (shell, shell.profile_dir):  # past their observers, which would make the directories once more
            paths: dict[str, Any] = owner._trait_values  # noqa: SLF001
            for name, value in paths.items():
                if isinstance(value, str) and value.startswith(old):
                    paths[name] = new + value[len(old) :]
        shell.starting_dir = os.getcwd()
        shell.history_manager.dir_hist[:] = [os.getcwd()]

    def with_png_capture(self, show: "Callable[..., None]") -> "Callable[..., None]":
        """Return ``show`` so that the picture among the forms of an object is kept; its text is printed as before."""

        def shown(data: "dict[str, object]", *others: object, **named: object) -> None:
            picture = data.get("image/png")
            if isinstance(picture, str):
                picture = base64.b64decode(picture)
            if isinstance(picture, bytes):
                self.pngs.append(picture)
            show(data, *others, **named)

        return shown

    def run_cell(self, code: str) -> bool:
        result = self.shell.run_cell(code, store_history=False)  # pyright: ignore[reportUnknownMemberType]
        return bool(result.success)


class KernelClient(CellRunner):
    """Cells in the ipykernel that runs in this process. What they display is printed; pictures are kept."""

    kind = "kernel"

    def __init__(self, name: str, key: str) -> None:
        import zmq
        from jupyter_client.session import Session

        super().__init__()
        self.session = Session(key=key.encode("ascii"), username="prorl")
        self.stdout_fd = os.dup(1)  # a cell may close or redirect its own
        context = zmq.Context()
        self.shell, self.iopub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        self.iopub.setsockopt(zmq.SUBSCRIBE, b"")
        self.poller = zmq.Poller()
        for number, channel in enumerate((self.shell, self.iopub), 1):
            channel.connect(f"ipc://{name}-{number}")
            self.poller.register(channel, zmq.POLLIN)

    def wait_ready(self) -> None:
        """Repeat a request until its answer comes on both sockets: a kernel publishes only to known subscribers."""
        while self.request("kernel_info_request", {}, KERNEL_RETRY_SECONDS) is None:
            pass

    def run_cell(self, code: str) -> bool:
        content: dict[str, Any] = {"code": code, "silent": False, "store_history": False, "user_expressions": {}}
        content.update(allow_stdin=False, stop_on_error=False)
        reply = self.request("execute_request", content)
        return reply is not None and reply.get("status") == "ok"

    def request(self, kind: str, content: "dict[str, Any]", seconds: "float | None" = None) -> "dict[str, Any] | None":
        """Send a request; return its reply once the kernel is idle again, or ``None`` after ``seconds``."""
        asked = self.session.send(self.shell, kind, content)["header"]["msg_id"]  # pyright: ignore
        reply: dict[str, Any] | None = None
        idle = False
        deadline = None if seconds is None else time.monotonic() + seconds
        while reply is None or not idle:
            left = None if deadline is None else int((deadline - time.monotonic()) * 1000)
            if left is not None and left <= 0:
                return reply if seconds is None else None
            for channel, _ in self.poller.poll(left):
                message = self.receive(channel)
                if message is None or message["parent_header"].get("msg_id") != asked:
                    continue
                if channel is self.iopub:
                    self.show(message["msg_type"], message["content"])
                    idle = idle or message["content"].get("execution_state") == "idle"
                elif reply is None:
                    reply = message["content"]
                    deadline = deadline or time.monotonic() + KERNEL_IDLE_SECONDS
                    for page in message["content"].get("payload") or ():  # what ``name?`` shows
                        self.show("display_data", page)
        return reply

    def receive(self, channel: "Any") -> "dict[str, Any] | None":
        try:
            return self.session.recv(channel)[1]  # pyright: ignore
        except Exception:  # a cell may send anything through its kernel
            return None

    def show(self, kind: str, content: "Any") -> None:
        if kind == "error":
            lines = content.get("traceback") or [f"{content.get('ename')}: {content.get('evalue')}"]
            self.print_text("\n".join(map(str, lines)).rstrip("\n") + "\n")
        elif kind == "stream":  # of code that speaks to the kernel's session itself; what is printed comes by the pipe
            self.print_text(str(content.get("text", "")))
        elif kind in ("execute_result", "display_data"):
            try:
                forms: dict[str, Any] = dict(content["data"])
            except (KeyError, TypeError, ValueError):
                return  # nothing that could be shown
            if not self.keep_png(forms.get("image/png")) and "text/plain" in forms:
                self.print_text(str(forms["text/plain"]) + "\n")

    def keep_png(self, picture: object) -> bool:
        """Keep a picture, given as base64; whether it was one, and there was room."""
        try:
            data = base64.b64decode("".join(str(picture).split()), validate=True)
        except ValueError:
            return False
        if (
            not data.startswith(PNG)
            or len(self.pngs) == MAX_IMAGES
            or sum(map(len, self.pngs), len(data)) > MAX_IMAGE_BYTES
        ):
            return False
        self.pngs.append(data)
        return True

    def print_text(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self.stdout_fd, data) :]


def make_cell_runner(packages: str = MOUNTED_PACKAGES) -> CellRunner:
    """Prefer the image's IPython, then that of ``packages`` when this python is new enough, then our own."""
    try:
        return IPythonCellRunner()
    except Exception:  # not there or broken in this image: try the next one
        pass
    try:
        with open(os.path.join(packages, "REQUIRES")) as file:
            needed = tuple(int(part) for part in file.read().split("."))
        if sys.version_info[:2] >= needed:
            sys.path.append(packages)
            return IPythonCellRunner()
    except Exception:  # not mounted, or the same
        pass
    return PlainCellRunner()


def export_figures() -> "list[bytes]":
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


def encode_images(images: "list[bytes]") -> "list[str]":
    """Encode what an answer has room for."""
    total = 0
    encoded: list[str] = []
    for image in images[:MAX_IMAGES]:
        total += len(image)
        if total > MAX_IMAGE_BYTES:
            break
        encoded.append(base64.b64encode(image).decode("ascii"))
    return encoded


def ignore_interrupt(number: int, frame: object) -> None:
    """Between cells there is nothing to interrupt. Not SIG_IGN: children would inherit that."""


class StandardStreams:
    """Descriptors 0 to 2 and what ``sys`` makes of them, as they were before the first cell."""

    def __init__(self) -> None:
        self.saved_fds = [os.dup(number) for number in range(3)]
        self.known_streams = {"stdout": sys.stdout, "stderr": sys.stderr}

    def restore(self) -> None:
        """Put back what a cell closed or redirected, with a note. Raises ``OSError`` where it closed our copies too.

        A stream that it replaced by another one is left: it may collect what later cells print.
        """
        flush_streams()
        notes: list[str] = []
        for number, kept in enumerate(self.saved_fds):
            ours = os.fstat(kept)
            try:
                same = os.path.samestat(os.fstat(number), ours)
            except OSError:
                same = False
            if not same:
                os.dup2(kept, number)
                notes.append(f"[The cell closed or redirected descriptor {number}: it was put back.]")
        for number, name in ((1, "stdout"), (2, "stderr")):
            if not is_writable(getattr(sys, f"__{name}__")):
                setattr(sys, f"__{name}__", open(number, "w", buffering=1, errors="replace", closefd=False))
            if not is_writable(getattr(sys, name)):
                setattr(sys, name, getattr(sys, f"__{name}__"))
                notes.append(f"[The cell left a sys.{name} that cannot be written to: it was put back.]")
            elif all(
                getattr(sys, name) is not known for known in (self.known_streams[name], getattr(sys, f"__{name}__"))
            ):
                notes.append(f"[The cell replaced sys.{name}. This undoes it: sys.{name} = sys.__{name}__]")
            self.known_streams[name] = getattr(sys, name)
        flush_streams()
        if notes:
            os.write(1, "".join(f"{note}\n" for note in notes).encode("ascii"))


def is_writable(stream: object) -> bool:
    return callable(getattr(stream, "write", None)) and not getattr(stream, "closed", False)


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except Exception:  # the cell closed or replaced it: then there is nothing to flush
            continue


def leave_if_forked(pid: int, *, ok: bool) -> None:
    """End a process that a cell forked and that comes back from it: only the worker, of this pid, goes on."""
    if os.getpid() != pid:
        flush_streams()
        os._exit(0 if ok else 1)


class CellWorker:
    """Reads cells, runs them, answers."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.request_lines = channel.makefile("rb")

    def send_answer(self, message: "dict[str, object]") -> None:
        self.channel.sendall(json.dumps(message).encode("ascii") + b"\n")

    def serve(self, console: CellRunner) -> None:
        self.send_answer({"ready": console.kind, "version": f"{sys.version_info[0]}.{sys.version_info[1]}"})
        for line in self.request_lines:
            request = json.loads(line.decode("ascii"))
            ok, images = self.run_cell(console, request["code"])
            self.send_answer({"cell": request["cell"], "ok": ok, "images": images})

    def run_cell(self, console: CellRunner, code: str) -> "tuple[bool, list[str]]":
        """Run one cell. Raises ``OSError`` when the session cannot go on."""
        return console.run_cell(code), encode_images(console.pop_images())


class MainThreadWorker(CellWorker):
    """Runs cells in its own thread, the main one, where they can be interrupted; looks after the standard streams."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(channel)
        self.pid = os.getpid()
        self.streams = StandardStreams()
        signal.signal(signal.SIGINT, ignore_interrupt)

    def run_cell(self, console: CellRunner, code: str) -> "tuple[bool, list[str]]":
        ok, images = False, []
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                ok = console.run_cell(code)
                leave_if_forked(self.pid, ok=ok)
                images = encode_images(console.pop_images() + export_figures())
            finally:
                signal.signal(signal.SIGINT, ignore_interrupt)
        except KeyboardInterrupt:  # it came when the cell was all but done
            leave_if_forked(self.pid, ok=False)
            ok = False
        except Exception as error:  # a figure that cannot be drawn
            ok = False
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        self.streams.restore()
        return ok, images


def refuse_input(*prompt: object) -> str:
    """Raise what reading from /dev/null raises."""
    raise EOFError("EOF when reading a line")


def make_kernel(name: str, key: str) -> "Any":
    """Return the image's kernel, whose five sockets are bound: ``NAME-1`` (shell) to ``NAME-5``."""
    import tempfile

    os.environ["IPYTHONDIR"] = tempfile.mkdtemp(prefix=".ipython-")
    from ipykernel.kernelapp import IPKernelApp  # pyright: ignore - the image's, not a dependency of ours
    from traitlets.config import Config

    config = Config()
    config.IPKernelApp.log_level = 50
    config.IPKernelApp.outstream_class = None  # what cells print stays on this process's own stdout and stderr
    config.HistoryManager.enabled = False
    config.InteractiveShell.xmode = "Plain"
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.cache_size = 0
    ports = {f"{what}_port": number for number, what in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)}
    fields: dict[str, object] = {"transport": "ipc", "ip": name, "key": key, "signature_scheme": "hmac-sha256"}
    fields.update(ports)
    with tempfile.NamedTemporaryFile("w", prefix=".kernel-", suffix=".json") as file:
        json.dump(fields, file)
        file.flush()
        app = IPKernelApp.instance(config=config)  # pyright: ignore
        app.initialize(["-f", file.name])  # pyright: ignore
    app.kernel.raw_input = refuse_input  # pyright: ignore
    return app  # pyright: ignore


def serve_kernel(channel: socket.socket) -> None:
    """Serve cells with the image's kernel. It has the main thread, since only that one can be interrupted."""
    import threading

    name, key = "@prorl-kernel-" + os.urandom(16).hex(), os.urandom(32).hex()  # abstract sockets: no path, no link
    app = make_kernel(name, key)
    pid = os.getpid()

    def leave(result: "Any") -> None:
        leave_if_forked(pid, ok=result.success)

    app.shell.events.register("post_run_cell", leave)
    if CELLS_IMPORT_FROM_CWD:
        sys.path[:] = ["", *filter(None, sys.path)]
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect("\0" + name[1:] + "-1")

    def serve() -> None:
        try:
            client = KernelClient(name, key)
            client.wait_ready()
            CellWorker(channel).serve(client)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    threading.Thread(target=serve, daemon=True).start()
    app.start()


def open_channel() -> socket.socket:
    """Return the connection to the service; make the streams flush at each line and forgive what has no encoding."""
    channel = socket.socket(fileno=3)
    os.set_inheritable(3, False)
    sys.argv = [""]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and sys.version_info >= (3, 7):
            stream.reconfigure(line_buffering=True, errors="replace")
    return channel


def serve_cells(console: CellRunner, channel: "socket.socket") -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    if CELLS_IMPORT_FROM_CWD:
        sys.path.insert(0, "")
    MainThreadWorker(channel).serve(console)


def serve_forked(console: CellRunner) -> None:
    """Serve cells in a fork of a process in which the console was made."""
    channel = open_channel()
    console.move_directories()
    serve_cells(console, channel)


def main(*, with_kernel: bool) -> None:
    channel = open_channel()
    if with_kernel:
        return serve_kernel(channel)
    serve_cells(make_cell_runner(), channel)


if __name__ == "__main__":
    main(with_kernel=sys.argv[1:] == ["kernel"])
