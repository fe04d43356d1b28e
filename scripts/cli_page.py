"""Write ``docs/cli.md`` out of the commands: ``python scripts/cli_page.py``.

The page is committed; a test compares it with what this prints.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from prorl_gym.cli.main import EXAMPLES, example_line, iter_commands

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"

HEAD = """# The command line

Every command of `prorl-gym`, with one example each. Written by `scripts/cli_page.py` from the commands themselves;
`prorl-gym COMMAND --help` prints the same.

**Talking to a service.** The address is `--url` of each command, `$PRORL_GYM_URL`, or `http://127.0.0.1:8770`. The
token is `$PRORL_GYM_TOKEN`, what the file `$PRORL_GYM_TOKEN_FILE` holds, or what a service of the same user wrote to
`~/.local/state/prorl-gym/token`. A command looks for a service for 6 seconds; one that waits (`watch`, `submit --wait`,
`export`) survives a restart of up to 10 minutes once it has reached the service.

**Exit codes.** 0: done. 1: done, with a negative result (each command below describes it). 2: not done; standard error
has two lines, what is wrong and how to fix it. 130: Ctrl-C. `replay` also has a 3.

**Formats of `export`.** `jsonl`: one record per line, as `show --full` prints it. `sft`: chats in the form
`{"messages": [...], "tools": [...]}`, with tool calls in OpenAI's form and a mark on each message: `"train": true` or
`"weight": 1` on the policy's messages after the first prompt, except turns with a call that could not be parsed.
`tokens`: one line per segment with `token_ids`, `mask`, `logprobs` and `policy_versions` of equal length. `sft` and
`tokens` leave out rollouts without a reward, and, unless `--overlong` is given, those that a limit cut short. A file
appears once it is complete; to continue later, give the `--cursor` that the last export printed, and another `--out`.

**Replay.** `replay` takes the task from the service and plays the recorded turns through the environment's own tools in
a fresh sandbox, without an engine. Each answer that differs is shown as a unified diff. `--loose` ignores differences
without a meaning: times, durations, addresses, process ids.
"""


def page() -> str:
    """Return the whole page."""
    sections = ("\n".join(_section(name, callback)) for name, callback in iter_commands())
    return "\n".join([HEAD, *sections]).rstrip() + "\n"


def _section(name: str, callback: Callable[..., Any]) -> Iterator[str]:
    yield f"## {name}\n"
    yield inspect.cleandoc(callback.__doc__ or "") + "\n"
    if name in EXAMPLES:
        yield f"```\n{example_line(name)}\n```\n"
    hints = get_type_hints(callback, include_extras=True)
    parameters = inspect.signature(callback).parameters.values()
    rows = [_row(one, hints[one.name]) for one in parameters if one.name != "url"]  # described in the head
    if rows:
        yield "| | default | |\n|---|---|---|"
        yield from rows
        yield ""


def _row(parameter: inspect.Parameter, hint: Any) -> str:
    """Return a parameter's row, from the function's annotations, since typer's own objects change with releases."""
    found = next((one for one in getattr(hint, "__metadata__", ()) if hasattr(one, "param_decls")), None)
    kind = get_args(hint)[0] if found is not None else hint
    is_option = found is not None and type(found).__name__ == "OptionInfo"
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    text = ((found.help if found is not None else "") or "").replace("|", "\\|")
    more = f" One of {', '.join(f'`{one}`' for one in choices)}." if choices else ""
    return f"| {_names(parameter.name, found, kind, is_option)} | {_default(parameter.default)} | {text}{more} |"


def _names(name: str, found: Any, kind: Any, is_option: bool) -> str:
    if not is_option:
        return f"`{(found.metavar if found is not None else None) or name.upper()}`"
    dashed = name.replace("_", "-")
    # In an annotation typer takes the first name for a default.
    stated = [one for one in (found.default, *(found.param_decls or ())) if isinstance(one, str) and one[:1] == "-"]
    negated = kind is bool and not stated
    names = stated or [f"--{dashed}", *([f"--no-{dashed}"] if negated else [])]
    return ", ".join(f"`{one}`" for stated in names for one in stated.split("/"))


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "**required**"
    if value is None or value == "":
        return ""
    return ("on" if value else "off") if isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
