"""The table of waits in docs/scheduling.md names code that exists, and all of it that can make a rollout wait."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("rollout", "inference", "environments", "api", "sandbox/service", "sandbox/images")
CODE = re.compile(r"`([\w/]+\.py): (\w+)(?:\.(\w+))?`")
WAITS = {
    *("asyncio.Semaphore", "asyncio.BoundedSemaphore", "asyncio.Condition", "asyncio.Lock", "asyncio.Event"),
    *("asyncio.Queue", "asyncio.PriorityQueue", "asyncio.LifoQueue", "asyncio.Barrier", "fcntl.flock", "fcntl.lockf"),
}
NO_ROLLOUT_WAITS = {
    ("service_process.py", "StopSignals"): "the process waits for a signal",
    ("control_checks.py", "_ControlChecks"): "bounds the sandboxes of one grading, its own",
    ("node.py", "Node"): "the node waits for signals and messages, no rollout",
    ("node.py", "_Held"): "says that an attempt is over; Node waits for it, for an earlier attempt that was given up",
    ("wire.py", "Outbox"): "requests wait for messages",
    ("members.py", "ChangeSignal"): "what CallGate and EnginePool wait with",
    ("open_ledger.py", "_flock"): "does not wait: a locked file is refused",
    ("runner.py", "InProcessRunner"): "events, without a bound: putting one never waits",
    ("interactive_process.py", "OutputStream"): "the reader of a program's output, which a stage's deadline bounds",
    ("locks.py", "try_lock"): "does not wait; locked does, in the table",
}
"""Where something waits that is no rollout, or nothing does, by the file's and the top-level name; and why."""


def table() -> list[tuple[str, str, str]]:
    """Return file, top-level name and member (or "") of everything that the table's second column names."""
    page = (ROOT / "docs" / "scheduling.md").read_text()
    rows = [line.split(" | ") for line in page.partition("| charged to |")[2].partition("\n\n")[0].splitlines()[2:]]
    assert all(CODE.search(row[1]) for row in rows), "every row names its code"
    return [match.groups(default="") for row in rows for match in CODE.finditer(row[1])]


def top_level(file: Path) -> dict[str, ast.stmt]:
    nodes = ast.parse(file.read_text()).body
    return {
        node.name: node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }


def waits() -> Iterator[tuple[str, str]]:
    """Yield file and top-level name of everything that makes one of ``WAITS`` or calls it."""
    package = ROOT / "prorl_gym"
    for folder in PACKAGES:
        for file in sorted((package / folder).rglob("*.py")):
            for name, node in top_level(file).items():
                calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                used = [part for call in calls for part in (call.func, *(word.value for word in call.keywords))]
                if WAITS & {ast.unparse(each) for each in used}:
                    yield str(file.relative_to(package)), name


def test_every_row_names_code_that_exists() -> None:
    for file, name, member in table():
        found = top_level(ROOT / "prorl_gym" / file)
        assert name in found, f"{file} has no {name}"
        members = {
            each.name for each in ast.walk(found[name]) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not member or member in members, f"{file}: {name} has no {member}"


def test_every_wait_is_in_the_table_or_makes_no_rollout_wait() -> None:
    named = {(file, name) for file, name, _ in table()}
    others = {(Path(file).name, name) for file, name in set(waits()) - named}
    assert others == set(NO_ROLLOUT_WAITS)
