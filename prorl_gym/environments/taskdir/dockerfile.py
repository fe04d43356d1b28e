"""Dockerfiles of one stage, as BuildKit reads them: its line parser, here-documents and shell lexer.

What is not read the same way is refused by name. Variables, users and the working directory of the base image are
unknown here: a value that needs one is refused.
"""

import json
import re
import shlex
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from posixpath import join, normpath
from typing import Any, cast

from prorl_gym.environments.taskdir.task_dir_row import MAX_FILES, SetupRun
from prorl_gym.errors import ConfigError

_NO_EFFECT = {"CMD", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"}
_ROOT = {"root", "0", "0:0", "root:root"}
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*$")
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)(?:\s+|$)(.*)", re.DOTALL)
_FLAG = re.compile(r"\s*--([a-z-]+)(?:=(\S*))?(?=\s|$)")
_HEREDOC = re.compile(r"(?<!\S)\d*<<(-?)(['\"]?)([A-Za-z_]\w*)\2(?!\S)")
_PLATFORM = re.compile(r"(TARGET|BUILD)(PLATFORM|OS|ARCH|VARIANT)")
_REFERENCE = r"\$(?:(?P<name>[^\W\d]\w*)|\{(?P<braced>\w+)(?:(?P<operator>:?[-+])(?P<word>[^{}$\"'\\]*))?\})"
_DOLLAR = r"\$(?![\w{@*#?$!-])"
_UNQUOTED = re.compile(rf"{_REFERENCE}|'(?P<quoted>[^']*)'|\\(?P<escaped>.)|[^\s'\"\\$]+|{_DOLLAR}", re.DOTALL)
_QUOTED = re.compile(rf"{_REFERENCE}|\\(?P<escaped>[\"\\$])|(?P<quoted>[^\"\\$]+)|\\|{_DOLLAR}", re.DOTALL)
_MAX_EXPANDED = 64 << 10
"""Characters of variables in one instruction."""
_MAP_IT = "Write it in a plainer form; or build the image, and give --image-map FROM=IMAGE --run built."

Variables = Mapping[str, str | None]
"""Variables in scope; ``None``: an argument without a value."""


class UnknownVariableError(ConfigError):
    """A value depends on a variable that only the base image may set."""


@dataclass(frozen=True, slots=True)
class CopyStep:
    """``COPY sources target``: paths of the build context, and an absolute path."""

    sources: tuple[str, ...]
    target: str
    is_directory_target: bool
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command, with the arguments and variables that are in scope for it."""

    words: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]

    def setup(self, env: Mapping[str, str]) -> SetupRun:
        """Return it for a sandbox that has the variables ``env`` from its start."""
        unset = [part for name in env if name not in self.env for part in ("-u", name)]
        given = [f"{name}={value}" for name, value in self.env.items() if env.get(name) != value]
        prefix = ["env", *unset, *given] if unset or given else []
        return SetupRun(command=shlex.join([*prefix, *self.words]), cwd=self.cwd)


@dataclass(slots=True)
class Recipe:
    """Contents of a Dockerfile."""

    image: str = ""
    steps: list[CopyStep | RunStep] = field(default_factory=list["CopyStep | RunStep"])
    env: dict[str, str] = field(default_factory=dict[str, str])
    workdir: str = ""
    """Empty: that of the base image."""
    made: list[str] = field(default_factory=list[str])
    """Instructions whose results are in the image already."""
    notes: list[str] = field(default_factory=list[str])
    """What is left out, once each."""


def read_dockerfile(text: str, where: str, *, built: bool = False) -> Recipe:
    """Read a Dockerfile. ``where`` is its path, for messages.

    With ``built`` an image holds what RUN, COPY and ADD make, and what it takes from its base. Raises ``ConfigError``:
    there are several stages, or something that a sandbox cannot do or that is not understood.
    """
    recipe = Recipe()
    globals_: dict[str, str | None] = {}
    arguments: dict[str, str | None] = {}
    shell = ("/bin/sh", "-c")
    for count, (number, name, rest) in enumerate(_instructions(text, where)):
        place = f"{where}:{number}"
        known = {**arguments, **recipe.env}
        if count >= MAX_FILES:
            raise ConfigError(f"{place}: more than {MAX_FILES} instructions.", "Build the image from fewer.")
        if name == "ARG":
            for word in _words(rest, known, place):
                argument, mark, default = word.partition("=")
                if not mark and _PLATFORM.fullmatch(argument):
                    raise ConfigError(f"{place}: ARG {argument} is that of a builder.", "Give it a value.")
                arguments[argument] = default if mark else globals_.get(argument) if recipe.image else None
        elif name == "FROM":
            if recipe.image:
                raise ConfigError(f"{place}: a second stage.", "Build the image, and map it with --image-map.")
            flags, plain = _flags(name, rest, {"platform"}, place)
            if flags.get("platform", "linux/amd64") != "linux/amd64":
                raise _not_understood(place, f"FROM --platform={flags['platform']}")
            recipe.image = next(iter(_words(plain, known, place)), "")
            globals_, arguments = arguments, {}
        elif name == "ENV":
            _set_variables(recipe, rest, known, place, built)
        elif name == "WORKDIR":
            recipe.workdir = _absolute(recipe.workdir, _expand(rest.strip(), known, place), place)
        elif name == "USER" and rest.strip() not in _ROOT:
            raise ConfigError(f"{place}: USER {rest.strip()[:40]}.", "Everything in a sandbox is root's: leave it out.")
        elif name in _NO_EFFECT or name == "USER" or (name == "ENTRYPOINT" and rest.strip() == "[]"):
            recipe.notes.append(f"{name} of the Dockerfile means nothing here")
        elif name in ("RUN", "COPY", "ADD", "SHELL") and built:
            recipe.made.append(name)
            if name != "RUN" and re.search(r"(?<![\w.-])(tests|solution)\b", rest):
                recipe.notes.append(f"{name} may show tests or a solution to the agent")
        elif name == "RUN":
            flags, plain = _flags(name, rest, {"mount"}, place)
            if "mount" in flags:
                if "type=cache" not in flags["mount"].split(","):
                    raise _not_understood(place, f"RUN --mount={flags['mount'][:60]}")
                recipe.notes.append("RUN --mount=type=cache of the Dockerfile means nothing here")
            scope = {name: value for name, value in known.items() if value is not None}
            recipe.steps.append(RunStep(_command(plain, shell, place), recipe.workdir or "/", scope))
        elif name == "COPY":
            recipe.steps.append(_copy_step(rest, known, recipe.workdir, place))
        elif name == "SHELL" and (words := _json_words(rest)):
            shell = tuple(words)
        else:
            raise _not_understood(place, name)
    if not recipe.image:
        raise ConfigError(f"{where}: has no FROM, or one without a name.", "Add FROM with the base image.")
    recipe.notes = list(dict.fromkeys(recipe.notes))
    return recipe


def _instructions(text: str, where: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, name and arguments of each instruction, continued lines and here-documents joined."""
    lines = iter(enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), 1))
    at_start = True
    for number, line in lines:
        directive = _DIRECTIVE.match(line) if at_start else None
        at_start = directive is not None
        if directive and (
            (directive[1].lower() == "escape" and directive[2] != "\\")
            or (directive[1].lower() == "syntax" and "docker/dockerfile" not in directive[2])
        ):
            raise _not_understood(f"{where}:{number}", f"# {directive[1]}={directive[2][:60]}")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts: list[str] = []
        while (cut := line.rstrip(" \t")).endswith("\\") and not cut.endswith("\\\\"):
            parts.append(cut[:-1])
            line = next((one for _, one in lines if one.strip() and not one.lstrip().startswith("#")), "")
        line = "".join([*parts, line])
        match = _INSTRUCTION.match(line)
        if match is None:
            raise _not_understood(f"{where}:{number}", repr(line.strip()[:40]))
        name, parts = match[1].upper(), [match[2]]
        if name in ("RUN", "COPY", "ADD"):
            for found in _HEREDOC.finditer(match[2]):
                end = ""
                for _, one in lines:
                    parts.append(one)
                    end = one.lstrip("\t") if found[1] else one
                    if end == found[3]:
                        break
                if end != found[3]:
                    raise ConfigError(f"{where}:{number}: '<<{found[3]}' does not end.", f"Add the line {found[3]}.")
        yield number, name, "\n".join(parts)


def _flags(name: str, rest: str, allowed: Container[str], place: str) -> tuple[dict[str, str], str]:
    """Return the flags before an instruction's arguments, and these. Each flag may be given once."""
    flags: dict[str, str] = {}
    while match := _FLAG.match(rest):
        if match[1] not in allowed or match[1] in flags or match[2] is None:
            raise _not_understood(place, f"{name} --{match[1]}")
        flags[match[1]], rest = match[2], rest[match.end() :]
    return flags, rest.strip()


def _command(plain: str, shell: tuple[str, ...], place: str) -> tuple[str, ...]:
    """Return the program and arguments of RUN: JSON, a here-document that is a script, or a line for the shell."""
    first, _, body = plain.partition("\n")
    if words := _json_words(plain):
        return tuple(words)
    if match := _HEREDOC.fullmatch(first.strip()):
        plain = body.rpartition("\n")[0]
        plain = re.sub(r"(?m)^\t+", "", plain) if match[1] else plain
        if plain.startswith("#!"):
            raise _not_understood(place, f"RUN of a script with {plain.partition(chr(10))[0][:40]!r}")
    if not plain:
        raise ConfigError(f"{place}: RUN without a command.", "Remove it.")
    return (*shell, plain)


def _copy_step(rest: str, known: Variables, workdir: str, place: str) -> CopyStep:
    flags, plain = _flags("COPY", rest, {"chmod", "chown"}, place)
    if flags.get("chown", "root") not in _ROOT:
        raise ConfigError(f"{place}: COPY --chown={flags['chown'][:40]}.", "Everything in a sandbox is root's.")
    mode = flags.get("chmod", "")
    if not re.fullmatch("[0-7]{3,4}|", mode) or _HEREDOC.search(plain):
        raise _not_understood(place, f"COPY --chmod={mode[:40]}" if mode else "COPY of a here-document")
    parts = [_expand(part, known, place) for part in _json_words(plain)] or _words(plain, known, place)
    if len(parts) < 2:
        raise _not_understood(place, "COPY of one path")
    target = _absolute(workdir, parts[-1], place)
    into = parts[-1].endswith("/") or parts[-1] in (".", "..") or len(parts) > 2 or target in ("/", workdir)
    return CopyStep(tuple(parts[:-1]), target, into, int(mode, 8) if mode else None)


def _absolute(workdir: str, path: str, place: str) -> str:
    """Return a path from the working directory, which is unknown where it is empty."""
    whole = normpath(join(workdir, path))
    if not whole.startswith("/") or len(whole) > 4096:
        fix = "Set WORKDIR to an absolute path before: that of the base image is not known."
        raise ConfigError(f"{place}: '{whole[:80]}' is below the image's own directory.", fix)
    return whole


def _json_words(text: str) -> list[str]:
    """Return the words of the JSON form, or none."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    words = cast(list[Any], found) if isinstance(found, list) else []
    return words if all(isinstance(word, str) for word in words) else []


def _set_variables(recipe: Recipe, rest: str, known: Variables, place: str, built: bool) -> None:
    first, *more = rest.split(None, 1) or [""]
    try:
        if "=" in first:
            words = _words(rest, known, place)
        else:  # the old form: ENV name value
            words = [f"{first}={_expand(more[0].strip(), known, place)}"] if more else [first]
        for word in words:
            name, mark, value = word.partition("=")
            if not mark:
                raise ConfigError(f"{place}: ENV without a value.", "Write NAME=VALUE.")
            recipe.env[name] = value
    except UnknownVariableError:
        if not built:
            raise
        for name in re.findall(r"(?<!\S)(\w+)=", rest) if "=" in first else [first]:
            recipe.env.pop(name, None)
            recipe.made.append(f"ENV {name}")


def _expand(text: str, known: Variables, place: str) -> str:
    return "".join(_words(text, known, place, one=True))


def _words(text: str, known: Variables, place: str, *, one: bool = False) -> list[str]:
    """Return the words of a text, or all of it as ``one``: quotes taken off, variables filled in.

    Raises ``ConfigError`` for what is not understood, ``UnknownVariableError`` for a variable that is not known.
    """
    words: list[list[str]] = []
    position, in_word, quoted, size = 0, False, False, 0
    while position < len(text):
        letter = text[position]
        if letter.isspace() and not quoted and not one:
            position, in_word = position + 1, False
            continue
        if not in_word:
            words.append([])
            in_word = True
        if letter == '"' or (letter.isspace() and not quoted):
            quoted ^= letter == '"'
            words[-1].append("" if letter == '"' else letter)
            position += 1
            continue
        match = (_QUOTED if quoted else _UNQUOTED).match(text, position)
        if match is None:
            raise _not_understood(place, repr(text[position : position + 40]))
        if match["name"] or match["braced"]:
            words[-1].append(value := _value(match, known, place))
            if (size := size + len(value)) > _MAX_EXPANDED:
                raise _not_understood(place, f"more than {_MAX_EXPANDED >> 10} KiB out of variables")
        else:
            literal = match["quoted"] if match["quoted"] is not None else match["escaped"]
            words[-1].append(match[0] if literal is None else literal)
        position = match.end()
    if quoted:
        raise ConfigError(f"{place}: cannot be read (a quote is open).", "Check the quotes.")
    return ["".join(word) for word in words]


def _value(match: re.Match[str], known: Variables, place: str) -> str:
    name = match["name"] or match["braced"]
    if name not in known:
        fix = "Write the value out, or map the image built from this file and give --run built."
        raise UnknownVariableError(f"{place}: ${name} is not set here, and may be set in the base image.", fix)
    value, operator = known[name], match["operator"] or ""
    is_set = bool(value) if operator.startswith(":") else value is not None
    if operator.endswith("-") and not is_set:
        return match["word"]
    if operator.endswith("+"):
        return match["word"] if is_set else ""
    return value or ""


def _not_understood(place: str, what: str) -> ConfigError:
    return ConfigError(f"{place}: {what} is not understood.", _MAP_IT)
