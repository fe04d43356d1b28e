"""The container of a task: image, variables and starting files, from a Dockerfile or a compose file.

A Dockerfile is not built: ``FROM`` names an image that must exist, a sandbox does ``COPY``, ``ENV`` and ``WORKDIR`` by
itself, and ``RUN`` needs a decision (``ImportOptions.run``), since a sandbox has no network. Files are read with
bounds, and links are not followed: task directories come from elsewhere.
"""

import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import join
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr

from prorl_gym.config import ConfigModel
from prorl_gym.environments.taskdir.dockerfile import CopyStep, Recipe, read_dockerfile
from prorl_gym.environments.taskdir.task_dir_row import MAX_BYTES, MAX_FILES, SetupRun, TaskFile
from prorl_gym.errors import ConfigError

_LOG_MOUNT = r"^\$\{(T_BENCH_TASK|HOST)_\w*(LOGS|ARTIFACTS)_PATH\}:\$\{(T_BENCH_CONTAINER|ENV)_\w+\}$"
_HARNESS_VARIABLES = {"${T_BENCH_TEST_DIR}": "/tests", "${TEST_DIR}": ""}
"""Values that Terminal-Bench fills in, and one that Harbor's converter writes and nothing sets."""


class ImportOptions(ConfigModel):
    """Options of the import that task directories do not contain themselves."""

    image_map: Mapping[str, str] = {}
    """Image for each name that a Dockerfile's FROM or a task's ``docker_image`` has; ``*`` for all others,
    ``default`` for the service's own image. Without an entry the name is taken as one of a registry (``docker://NAME``)."""
    run: Literal["refuse", "setup", "built"] = "refuse"
    """Handling of RUN. ``refuse``: a task that has one is not imported. ``setup``: it is run before each rollout,
    without network. ``built``: the mapped image was built from this Dockerfile and holds what it makes; COPY is left
    out too."""
    keep: tuple[str, ...] = ()
    """Files and directories of the agent's end state that count; see ``TaskDirRow.keep``."""
    test_command: str = ""
    """Run instead of the task's own verifier script; its exit code is the reward."""


_MAX_TEXT = 256 << 10
"""Bytes of a file that is read as text."""
_MAX_DEPTH = 100
"""Of directories in one another."""
_REGISTRY_NAME = re.compile(
    r"(?!scratch$)(docker://)?[A-Za-z0-9][\w.-]{0,255}(:\d+)?(/[A-Za-z0-9][\w.-]{0,255}){0,9}(:[\w.-]{1,128})?"
    r"(@sha256:[0-9a-f]{64})?"
)
"""Host, path, tag and digest of an image; ``scratch`` is none that could run anything."""


@dataclass(slots=True)
class Container:
    """The starting state of a task's sandbox."""

    image: str
    workdir: str
    env: dict[str, str] = field(default_factory=dict[str, str])
    setup: list[TaskFile | SetupRun] = field(default_factory=list["TaskFile | SetupRun"])
    notes: list[str] = field(default_factory=list[str])


class FileBudget:
    """Counts the files of one task and their bytes."""

    def __init__(self) -> None:
        self.files = 0
        self.bytes = 0

    def charge(self, path: Path, size: int) -> None:
        """Count a file. Raises ``ConfigError``: it is one too many, or too large."""
        self.files += 1
        self.bytes += size
        if self.files > MAX_FILES or self.bytes > MAX_BYTES:
            raise ConfigError(
                f"{path}: the task's files are more than {MAX_FILES} or larger than {MAX_BYTES >> 20} MiB together.",
                "Put what is large into the image, and map it with --image-map.",
            )


def read_container(
    folder: Path,
    options: ImportOptions,
    budget: FileBudget,
    *,
    prebuilt: str = "",
    workdir: str = "",
    env: Mapping[str, str] = MappingProxyType({}),
    service: str = "",
    hidden: Set[str] = frozenset(),
) -> Container:
    """Read the container of a task whose Dockerfile is in ``folder``, the context of its COPY.

    ``prebuilt``, ``workdir`` and ``env`` are the task's own image, directory and variables: with an image, its
    Dockerfile is taken to be built. ``service`` is the only service that the compose file may have; empty: any.
    ``hidden``: see ``_read_copied``. Raises ``ConfigError``: there is no container, it is a link or elsewhere, or a
    sandbox cannot do what it needs.
    """
    compose = folder / "docker-compose.yaml"  # Harbor and Terminal-Bench read no other name
    notes: list[str] = []
    run = _read_service(compose, service, notes) if compose.is_file() else _Service()
    file = resolve_within(folder, run.build.dockerfile)
    recipe = Recipe()
    if file.is_file():
        recipe = read_dockerfile(read_text(file), str(file), built=bool(prebuilt) or options.run == "built")
    elif not prebuilt and (not run.image or "$" in run.image):
        raise ConfigError(f"{folder}: has no Dockerfile.", "Add one, or name a 'docker_image' in task.toml.")
    workdir = workdir or run.working_dir or recipe.workdir
    if not workdir:
        fix = "Add WORKDIR to the Dockerfile, or 'workdir' to task.toml: that of an image is not known."
        raise ConfigError(f"{folder}: names no working directory.", fix)
    name = prebuilt or recipe.image or run.image
    image = options.image_map.get(name, options.image_map.get("*"))
    if image is None:
        if recipe.made and not prebuilt:
            fix = f"Give --image-map {name}=IMAGE, an image built from this Dockerfile."
            raise ConfigError(f"{file}: {recipe.made[0]}, but no built image stands for its FROM.", fix)
        if not _REGISTRY_NAME.fullmatch(name):  # a path or an address of this host is no image of a task's
            raise ConfigError(f"{file}: '{name[:80]}' is no image of a registry.", "Give --image-map NAME=IMAGE.")
        image = f"docker://{name.removeprefix('docker://')}"
    notes += recipe.notes
    if recipe.made:
        notes.append(f"{', '.join(dict.fromkeys(recipe.made))} of the Dockerfile are taken to be in the image")
        if hidden:
            notes.append("the image may show tests or a solution to the agent: they are next to its Dockerfile")
    container = Container(
        image="" if image == "default" else image,
        workdir=workdir,
        env={**recipe.env, **run.variables(compose), **env},
        notes=notes,
    )
    if prebuilt and folder.is_dir() and not file.is_file() and not compose.is_file():
        container.setup += read_tree(folder, workdir, budget)  # Harbor uploads it
    for step in recipe.steps:
        if isinstance(step, CopyStep):
            container.setup += _read_copied(step, folder, hidden, budget, notes)
        elif options.run == "refuse":
            raise ConfigError(
                f"{file}: RUN {' '.join(step.words[-1].split())[:60]!r}: a sandbox has no network to install from.",
                "Build the image and give --image-map FROM=IMAGE --run built, or --run setup for what needs none.",
            )
        else:
            container.setup.append(step.setup(container.env))
    return container


class _Part(BaseModel):
    """A part of a compose file: what Compose and the harnesses give a meaning that a sandbox can honour."""

    model_config = ConfigDict(extra="forbid")


class _Build(_Part):
    context: Literal[".", "./", "${CONTEXT_DIR}"] = "."
    dockerfile: str = "Dockerfile"


class _Service(_Part):
    build: Annotated[_Build, BeforeValidator(lambda given: {"context": given} if isinstance(given, str) else given)] = (
        _Build()
    )
    image: str = ""
    working_dir: Annotated[str, Field(pattern=r"^(/[^$]*)?$")] = ""
    environment: dict[str, StrictStr | StrictInt] | list[Annotated[str, Field(pattern="=")]] = []
    privileged: Literal[False] = False
    user: Literal["root", "0", 0, "0:0"] = "root"
    command: Annotated[
        str,
        BeforeValidator(lambda given: " ".join(map(str, cast(list[Any], given))) if isinstance(given, list) else given),
        Field(pattern=r"^((/bin/)?(ba)?sh -c )?['\"]?sleep infinity['\"]?$"),
    ] = "sleep infinity"
    volumes: list[Annotated[str, Field(pattern=_LOG_MOUNT)]] = []
    deploy: dict[Literal["resources"], dict[Literal["limits"], dict[Literal["cpus", "memory", "pids"], Any]]] = {}
    container_name: Any = None
    init: Any = None
    labels: Any = None
    pull_policy: Any = None
    restart: Any = None
    stdin_open: Any = None
    tty: Any = None

    def variables(self, file: Path) -> dict[str, str]:
        """Return the variables of the service. Raises ``ConfigError``: one is that of the harness's host."""
        given = self.environment
        pairs = [entry.partition("=")[::2] for entry in given] if isinstance(given, list) else given.items()
        found = {name: _HARNESS_VARIABLES.get(str(value), str(value)) for name, value in pairs}
        for name, value in found.items():
            if "$" in value:
                raise ConfigError(f"{file}: {name} is '{value[:60]}', a variable of the host.", "Write its value out.")
        return found


class _Compose(_Part):
    services: Annotated[dict[str, _Service], Field(min_length=1)]
    version: Any = None
    name: Any = None
    networks: Any = None
    volumes: Any = None


def _read_service(file: Path, only: str, notes: list[str]) -> _Service:
    import yaml

    try:
        compose = _Compose.model_validate(yaml.safe_load(read_text(file)))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML ({error}).", "Check indentation and quotes there.") from None
    names = ", ".join(compose.services)
    if len(compose.services) > 1 or only not in ("", names):
        raise ConfigError(f"{file}: several containers ({names}).", "A task has one sandbox: it cannot be imported.")
    service = compose.services[names]
    if service.image and "$" not in service.image and "build" not in service.model_fields_set:
        if (file.parent / "Dockerfile").exists():
            raise ConfigError(f"{file}: has both an image and a Dockerfile.", "Add 'build', or remove one of them.")
    used = {"build", "image", "working_dir", "environment", "privileged", "user"}
    notes += [f"'{key}' of the compose file is left out" for key in sorted(service.model_fields_set - used)]
    return service


def resolve_within(folder: Path, name: str | Path) -> Path:
    """Return a path in a folder. The folder's own path may be a link.

    Raises ``ConfigError``: the path leads outside, or a part of it is a link.
    """
    root = folder.resolve()
    plain = Path(os.path.normpath(root / name))
    if not plain.is_relative_to(root) or (root / name).resolve() != plain:
        raise ConfigError(
            f"{folder / name}: is a link or leads outside.", "Task directories hold plain files and directories."
        )
    return folder / name


def read_text(path: Path) -> str:
    """Return a small text file. Raises ``ConfigError``: it is not there, no regular file, too large, or not UTF-8."""
    data = _read(path, FileBudget())
    if len(data) > _MAX_TEXT:
        raise ConfigError(f"{path}: is larger than {_MAX_TEXT >> 10} KiB.", "Put what is large into files of its own.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8.", "Save it as UTF-8.") from None


def read_tree(folder: Path, target: str, budget: FileBudget) -> list[TaskFile]:
    """Return every file below a folder (see ``resolve_within``), in a fixed order, with its place below ``target``.

    Raises ``ConfigError``: something in it is neither file nor directory, or it is too much.
    """
    return [
        TaskFile(
            path=join(target, path.relative_to(folder).as_posix()),
            data=_read(path, budget),
            executable=bool(path.stat().st_mode & stat.S_IXUSR),
        )
        for path in _walk(folder)
    ]


def _read_copied(
    step: CopyStep, context: Path, hidden: Set[str], budget: FileBudget, notes: list[str]
) -> list[TaskFile | SetupRun]:
    """Return the files that a ``COPY`` places: of a directory its content, of a pattern what it matches.

    ``hidden`` are names at the top of ``context`` that must not reach the agent's sandbox (tests, solution); ``COPY .``
    skips them, which is noted. Raises ``ConfigError``: a source is missing, hidden, a link or outside the context, its
    mode has no meaning here, or it is too much.
    """
    if ignored := sorted(context.glob("*.dockerignore")):
        raise ConfigError(f"{ignored[0]}: is not understood.", "Copy what the image needs by name, without it.")
    if re.match(r"/(tests|logs|solution)(/|$)", step.target):
        fix = "The agent would see it, and it is removed before the tests are placed: put it elsewhere."
        raise ConfigError(f"{context}: COPY to '{step.target[:80]}'.", fix)
    found: list[TaskFile | SetupRun] = []
    for source in step.sources:
        for path in _sources(source, context):
            place = path.relative_to(context)
            if place.parts and place.parts[0] in hidden:
                fix = "Leave it out: the verifier's files are placed when the agent has stopped."
                raise ConfigError(f"{context}: COPY of '{place}' would show it to the agent.", fix)
            if path.is_dir():
                skipped = {path / name for name in hidden if (path / name).exists()} if path == context else set[Path]()
                notes += [f"'{entry.name}' is not copied to the agent" for entry in sorted(skipped)]
                files = [(one, join(step.target, one.relative_to(path).as_posix())) for one in _walk(path, skipped)]
            else:
                files = [(path, join(step.target, path.name) if step.is_directory_target else step.target)]
            for one, target in files:
                # Everything is root's, so who may write has no meaning; it follows the umask of the checkout.
                mode = one.stat().st_mode & 0o755 | 0o200 if step.mode is None else step.mode
                found.append(TaskFile(path=target, data=_read(one, budget), executable=bool(mode & stat.S_IXUSR)))
                if mode not in (0o644, 0o755):
                    found.append(SetupRun(command=f"chmod {mode:o} {shlex.quote(target)}"))
    return found


def _sources(source: str, context: Path) -> list[Path]:
    relative = source.lstrip("/") or "."
    if ".." in Path(relative).parts:
        raise ConfigError(f"{context}: COPY of '{source[:80]}' leads outside.", "Keep it next to the Dockerfile.")
    if "**" in relative or "[" in relative or "\\" in relative:
        raise ConfigError(f"{context}: COPY of the pattern '{source[:80]}' is not understood.", "Name the files.")
    found = sorted(context.glob(relative)) if any(letter in relative for letter in "*?") else [context / relative]
    found = [resolve_within(context, path.relative_to(context)) for path in found if path.exists() or path.is_symlink()]
    if not found:
        raise ConfigError(f"{context}: has no '{source[:80]}', which the Dockerfile copies.", "Put it there.")
    return found


def _walk(folder: Path, skipped: Set[Path] = frozenset(), depth: int = 0) -> Iterator[Path]:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{str(folder)[:200]}: more than {_MAX_DEPTH} directories deep.", "Flatten it.")
    entries = sorted(os.scandir(folder), key=lambda one: one.name)
    if not entries:
        raise ConfigError(f"{folder}: is an empty directory.", "Make it by a command where it is needed.")
    for entry in entries:
        if Path(entry.path) in skipped:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), depth=depth + 1)
        else:
            yield Path(entry.path)


def _read(path: Path, budget: FileBudget) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link" if path.is_symlink() else error.strerror
        raise ConfigError(f"{path}: cannot be read ({why}).", "Task directories hold plain files.") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: is no regular file.", "Task directories hold plain files and directories.")
        budget.charge(path, status.st_size)
        return file.read(MAX_BYTES)
