"""Write ``docs/cli.md`` out of the commands: ``python scripts/cli_page.py``.

The page is committed; a test compares it with what this prints.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from prorl_gym.cli.main import app, example_line, iter_commands

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"

HEAD = """# The command line

Written by `scripts/cli_page.py`; `prorl-gym COMMAND --help` says more (alone of `bench`, `demo` and `engine oracle`).
The examples, without `prorl-gym`, show the arguments. A value in brackets is an option's default, *required* marks one
without. A switch that is on is turned off by `--no-NAME`.

**The service.** Its address is `--url` of each command, `$PRORL_GYM_URL`, or `http://127.0.0.1:8770`. The token is
`$PRORL_GYM_TOKEN`, the content of `$PRORL_GYM_TOKEN_FILE`, or of `~/.local/state/prorl-gym/token`. A command tries
for 6 seconds; one that waits (`watch`, `submit --wait`, `export`) survives a restart of up to 10 minutes.

**Exit codes.** 0: done. 1: done, with a negative result. 2: not done; standard error names the cause and the fix.
130: Ctrl-C.

**Formats of `export`.** `jsonl`: a record per line. `sft`: chats with a mark on each message. `tokens`: a line per
segment with `token_ids`, `mask`, `logprobs` and `policy_versions`. The latter two leave out rollouts without a reward
and, without `--overlong`, truncated ones. To continue, give the printed `--cursor` and another `--out`.

**Shared options.** `--json`: print one JSON object. `--force`: replace an existing file. `--backend` (`auto`) and
`--allow-unsafe-local`: sandboxes of a command that starts its own. `--directory`: of `agents`, the layers (by default
`agents` in `sandbox.cache`); of `init`, the project (`./NAME`). `images`: `--store`, its directory on a local disk;
`--uid`, owner of unpacked files for root; `--mirror URL` instead of docker.io, or `HOST=URL`; `--max-bytes`,
`--max-inodes`, bounds.
"""

SHARED = tuple(
    f"`--{name}`"
    for name in (
        "json",
        "force",
        "store",
        "uid",
        "mirror",
        "max-bytes",
        "max-inodes",
        "url",
        "directory",
        "backend",
        "allow-unsafe-local",
    )
)
"""Beginnings of the lines of options that the head explains once."""
HELPERS = ("bench", "demo", "engine oracle")
"""Commands for trying out and measuring; their options are in their help alone."""


def page() -> str:
    """Return the whole page."""
    sections = ("\n".join(_section(name, one.callback)) for name, one in iter_commands(app) if one.callback)
    return "\n".join([HEAD, *sections]).rstrip() + "\n"


def _section(name: str, callback: Callable[..., Any]) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"`{example_line(name).removeprefix('prorl-gym ')}`: {_about(callback.__doc__ or '')}\n"
    hints = get_type_hints(callback, include_extras=True)
    parameters = inspect.signature(callback).parameters.values()
    lines = [_row(one, hints[one.name]) for one in parameters]
    told: dict[str, list[str]] = {}
    for names, text in lines if name not in HELPERS else ():
        if names.startswith("`-") and not names.startswith(SHARED):
            told.setdefault(text, []).append(names)
    if told:
        yield "".join(f"- {', '.join(names)}: {text}\n" for text, names in told.items())


def _about(text: str) -> str:
    """Return a command's first paragraph, and what it says about exit codes."""
    first, *others = (" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))
    codes = [found[0] for part in others if (found := re.search(r"Exit code.*", part))]
    return " ".join([first, *codes])


def _row(parameter: inspect.Parameter, hint: Any) -> tuple[str, str]:
    """Return a parameter's names and meaning, from annotations: typer's own objects change with releases."""
    found = next((one for one in getattr(hint, "__metadata__", ()) if hasattr(one, "param_decls")), None)
    kind = get_args(hint)[0] if found is not None else hint
    is_option = found is not None and type(found).__name__ == "OptionInfo"
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    text = ((found.help if found is not None else "") or "").rstrip(".")
    is_told = all(str(one) in text for one in choices)
    more = "" if is_told else f": {', '.join(f'`{one}`' for one in choices)}"
    return f"{_names(parameter.name, found, kind, is_option)}{_default(parameter.default)}", f"{text}{more}"


def _names(name: str, found: Any, kind: Any, is_option: bool) -> str:
    if not is_option:
        return f"`{(found.metavar if found is not None else None) or name.upper()}`"
    # In an annotation typer takes the first name for a default.
    stated = [one for one in (found.default, *(found.param_decls or ())) if isinstance(one, str) and one[:1] == "-"]
    names = stated or [f"--{name.replace('_', '-')}"]
    return ", ".join(f"`{one}`" for stated in names for one in stated.split("/"))


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return " *required*"
    if value is None or value == "" or value is False:
        return ""
    return " (on)" if value is True else f" (`{value}`)"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
