"""The container of a task: image, variables and starting files, from a Dockerfile or a compose file.

A Dockerfile is not built: ``FROM`` names an image that must exist, a sandbox does ``COPY``, ``ENV`` and ``WORKDIR`` by
itself, and ``RUN`` needs a decision (``ImportOptions.run``), since a sandbox has no network. Files are read with
bounds, and links are not followed: task directories come from elsewhere.
"""

import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import join, normpath
from typing import Any, Literal, cast

from prorl_gym.config import ConfigModel
from prorl_gym.environments.taskdir.task_dir_row import MAX_BYTES, MAX_FILES, SetupRun, TaskFile
from prorl_gym.errors import ConfigError

_IGNORED = {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME", "SHELL"}
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)(?:\s+|$)(.*)", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*[\"']?([A-Za-z_]\w*)[\"']?")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^{}]*))?\}|(\w+))")
_DOLLAR = "\0"
"""Placeholder of an escaped dollar sign while variables are expanded."""


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


@dataclass(slots=True)
class Container:
    """The starting state of a task's sandbox."""

    image: str
    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict[str, str])
    setup: list[TaskFile | SetupRun] = field(default_factory=list["TaskFile | SetupRun"])
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class CopyStep:
    """``COPY sources target``: paths of the build context, and an absolute path."""

    sources: tuple[str, ...]
    target: str
    is_directory_target: bool


@dataclass(slots=True)
class Recipe:
    """Contents of a Dockerfile."""

    image: str = ""
    steps: list[CopyStep | SetupRun] = field(default_factory=list["CopyStep | SetupRun"])
    env: dict[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    ignored: list[str] = field(default_factory=list[str])
    """Instructions without a meaning in a sandbox, once each."""


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
    folder: Path, prebuilt: str, hidden: Set[str], options: ImportOptions, budget: FileBudget
) -> Container:
    """Read the container of a task whose Dockerfile is in ``folder``, the context of its COPY.

    ``prebuilt`` is the image that the task itself names; the Dockerfile then only gives the working directory.
    ``hidden``: see ``_read_copied``. Raises ``ConfigError``: there is no container, it is a link or elsewhere, or a
    sandbox cannot do what it needs.
    """
    compose = folder / "docker-compose.yaml"  # Harbor and Terminal-Bench read no other name
    service = _read_service(compose) if compose.is_file() else {}
    section: Any = service.get("build")
    build = cast(dict[str, Any], section) if isinstance(section, dict) else {}
    if str(build.get("context", ".")).strip("./"):
        raise ConfigError("The compose file builds in another directory.", "Put the Dockerfile next to it.")
    file = resolve_within(folder, str(build.get("dockerfile", "Dockerfile")))
    if file.is_file():
        recipe = read_dockerfile(read_text(file), str(file))
    elif prebuilt or isinstance(service.get("image"), str):
        recipe = Recipe(image=str(service.get("image", "")), workdir="/app")
    else:
        raise ConfigError(f"{folder}: has no Dockerfile.", "Add one, or name a 'docker_image' in task.toml.")
    name = prebuilt or recipe.image
    image = options.image_map.get(name, options.image_map.get("*"))
    if image is None:
        image = name if "://" in name or name.startswith("/") else f"docker://{name}"
    container = Container(
        image="" if image == "default" else image,
        workdir="/app" if recipe.workdir == "/" else recipe.workdir,
        env={**recipe.env, **_environment(service)},
    )
    if recipe.ignored:
        container.notes.append(f"{', '.join(recipe.ignored)} of the Dockerfile mean nothing here")
    if prebuilt or options.run == "built":
        return container
    for step in recipe.steps:
        if isinstance(step, CopyStep):
            container.setup += _read_copied(step, folder, hidden, budget)
        elif options.run == "refuse":
            raise ConfigError(
                f"{file}: RUN {' '.join(step.command.split())[:60]!r}: a sandbox has no network to install from.",
                "Build the image and give --image-map FROM=IMAGE --run built, or --run setup for what needs none.",
            )
        else:
            container.setup.append(step)
    return container


def _read_service(file: Path) -> dict[str, Any]:
    import yaml

    try:
        read: Any = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML ({error}).", "Check indentation and quotes there.") from None
    found: Any = cast(dict[str, Any], read).get("services") if isinstance(read, dict) else None
    services = cast(dict[str, Any], found) if isinstance(found, dict) else {}
    if not services:
        raise ConfigError(f"{file}: names no services.", "A task has one container.")
    if len(services) > 1:
        names = ", ".join(map(str, services))
        raise ConfigError(f"{file}: several containers ({names}).", "A task has one sandbox: it cannot be imported.")
    service: Any = next(iter(services.values()))
    if not isinstance(service, dict) or cast(dict[str, Any], service).get("privileged"):
        raise ConfigError(f"{file}: the container is privileged or none.", "A sandbox has no such rights.")
    return cast(dict[str, Any], service)


def _environment(service: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a compose service; those that a harness fills in (``${...}``) are left out."""
    given: Any = service.get("environment") or {}
    if isinstance(given, list):
        pairs = [str(entry).partition("=")[::2] for entry in cast(list[Any], given)]
    else:
        pairs = [(str(name), str(value)) for name, value in cast(dict[str, Any], given).items()]
    return {name: value for name, value in pairs if re.fullmatch(r"[A-Za-z_]\w*", name) and "$" not in value}


def read_dockerfile(text: str, where: str) -> Recipe:
    """Read a Dockerfile of one stage. ``where`` is its path, for messages.

    Raises ``ConfigError``: it has several stages, or an instruction that cannot be done in a sandbox.
    """
    recipe = Recipe()
    arguments: dict[str, str] = {}
    for number, name, rest in _instructions(text):
        place = f"{where}:{number}"
        if name == "RUN":
            plain = _without_flags(rest)
            first, _, body = plain.partition("\n")
            if words := _json_words(plain):
                command = shlex.join(words)
            elif _HEREDOC.fullmatch(first.strip()):  # RUN <<EOF: the document is the script
                command = body.rpartition("\n")[0]
            else:
                command = plain.strip()
            if not command:
                raise ConfigError(f"{place}: RUN without a command.", "Remove it.")
            recipe.steps.append(SetupRun(command=command, cwd=recipe.workdir))
            continue
        known = {**arguments, **recipe.env}
        if name == "FROM":
            if recipe.image:
                raise ConfigError(f"{place}: a second stage.", "Build the image, and map it with --image-map.")
            recipe.image = _expand_variables(next(iter(_words(_without_flags(rest), place)), ""), known)
        elif name == "ARG":
            argument, _, default = rest.strip().partition("=")
            arguments[argument.strip()] = _expand_variables(" ".join(_words(default, place)), known)
        elif name == "ENV":
            words = _words(rest, place)
            if words and "=" not in words[0]:  # the old form: ENV name value
                recipe.env[words[0]] = _expand_variables(rest.strip().partition(" ")[2].strip(), known)
            else:
                pairs = [word.partition("=") for word in words]
                recipe.env.update((name, _expand_variables(value, known)) for name, _, value in pairs)
        elif name == "WORKDIR":
            recipe.workdir = normpath(join(recipe.workdir, _expand_variables(" ".join(_words(rest, place)), known)))
        elif name in ("COPY", "ADD"):
            recipe.steps.append(_copy_step(name, rest, known, recipe.workdir, place))
        elif name == "USER" and rest.strip() not in ("root", "0", "0:0", "root:root"):
            raise ConfigError(f"{place}: USER {rest.strip()[:40]}.", "Everything in a sandbox is root's: leave it out.")
        elif name in _IGNORED or name == "USER":
            if name not in recipe.ignored:
                recipe.ignored.append(name)
        else:
            raise ConfigError(f"{place}: {name} is not understood.", "Build the image, and map it with --image-map.")
    if not recipe.image:
        raise ConfigError(f"{where}: has no FROM.", "Add FROM with the base image.")
    return recipe


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, name and arguments of each instruction, continued lines and here-documents joined."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        while line.rstrip().endswith("\\"):
            line = line.rstrip()[:-1]
            following = next(((n, one) for n, one in lines if not one.lstrip().startswith("#")), None)
            if following is None:
                break
            line += "\n" + following[1] if _HEREDOC.search(line) else " " + following[1].strip()
        match = _INSTRUCTION.match(line)
        if match is None:
            yield number, line.strip()[:40], ""
            continue
        name, rest = match[1].upper(), match[2]
        if name in ("RUN", "COPY", "ADD"):
            for ending in _HEREDOC.findall(rest):
                for _, one in lines:
                    rest += "\n" + one
                    if one.strip() == ending:
                        break
        yield number, name, rest


def _copy_step(name: str, rest: str, known: Mapping[str, str], workdir: str, place: str) -> CopyStep:
    flags = re.findall(r"--(\w+)", rest.split("\n")[0])
    if "from" in flags or "<<" in rest:
        raise ConfigError(f"{place}: {name} from elsewhere.", "Only files next to the Dockerfile can be placed.")
    plain = _without_flags(rest)
    parts = [_expand_variables(part, known) for part in _json_words(plain) or _words(plain, place)]
    if len(parts) < 2 or any("://" in part for part in parts[:-1]):
        raise ConfigError(f"{place}: {name} of this form is not understood.", "Give files next to the Dockerfile.")
    into = parts[-1].endswith("/") or parts[-1] in (".", "..") or len(parts) > 2
    return CopyStep(tuple(parts[:-1]), normpath(join(workdir, parts[-1])), into)


def _json_words(text: str) -> list[str]:
    """Return the words of the JSON form, or none."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [str(one) for one in cast(list[Any], found)] if isinstance(found, list) else []


def _without_flags(rest: str) -> str:
    return re.sub(r"^(\s*--[a-z]+(=\S+)?\s+)+", "", rest)


def _expand_variables(text: str, known: Mapping[str, str]) -> str:
    expanded = _VARIABLE.sub(lambda found: known.get(found[1] or found[3], found[2] or ""), text)
    return expanded.replace(_DOLLAR, "$")


def _words(text: str, place: str) -> list[str]:
    """Return the words of a line, quotes taken off."""
    try:
        return shlex.split(text.replace("\\$", _DOLLAR))
    except ValueError as error:
        raise ConfigError(f"{place}: cannot be read ({error}).", "Check the quotes.") from None


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
    try:
        return _read(path, FileBudget()).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8.", "Save it as UTF-8.") from None


def read_tree(folder: Path, target: str, budget: FileBudget, skipped: Set[Path] = frozenset()) -> list[TaskFile]:
    """Return every file below a folder (see ``resolve_within``), in a fixed order, with its place below ``target``.

    Entries of the folder in ``skipped`` are left out. Raises ``ConfigError``: something in it is neither file nor
    directory, or it is too much.
    """
    files = _walk(folder, skipped)
    return [_file(path, join(target, path.relative_to(folder).as_posix()), budget) for path in files]


def _read_copied(step: CopyStep, context: Path, hidden: Set[str], budget: FileBudget) -> list[TaskFile]:
    """Return the files that a ``COPY`` places: of a directory its content, of a pattern what it matches.

    ``hidden`` are names at the top of ``context`` that must not reach the agent's sandbox (tests, solution); ``COPY .``
    skips them. Raises ``ConfigError``: a source is missing, hidden, a link or outside the context, or it is too much.
    """
    found: list[TaskFile] = []
    for source in step.sources:
        for path in _sources(source, context):
            place = path.relative_to(context)
            if place.parts and place.parts[0] in hidden:
                fix = "Leave it out: the verifier's files are placed when the agent has stopped."
                raise ConfigError(f"{context}: COPY of '{place}' would show it to the agent.", fix)
            if path.is_dir():
                skipped = {path / name for name in hidden} if path == context else set[Path]()
                found += read_tree(path, step.target, budget, skipped)
            else:
                target = join(step.target, path.name) if step.is_directory_target else step.target
                found.append(_file(path, target, budget))
    return found


def _sources(source: str, context: Path) -> list[Path]:
    relative = source.lstrip("/") or "."
    if ".." in Path(relative).parts:
        raise ConfigError(f"{context}: COPY of '{source[:80]}' leads outside.", "Keep it next to the Dockerfile.")
    found = sorted(context.glob(relative)) if any(letter in relative for letter in "*?[") else [context / relative]
    found = [resolve_within(context, path.relative_to(context)) for path in found if path.exists() or path.is_symlink()]
    if not found:
        raise ConfigError(f"{context}: has no '{source[:80]}', which the Dockerfile copies.", "Put it there.")
    return found


def _walk(folder: Path, skipped: Set[Path] = frozenset()) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        if Path(entry.path) in skipped:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def _file(path: Path, target: str, budget: FileBudget) -> TaskFile:
    data = _read(path, budget)
    return TaskFile(path=target, data=data, executable=bool(path.stat().st_mode & stat.S_IXUSR))


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
