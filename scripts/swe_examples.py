"""Make ``environments/prorl_swe/data/example.jsonl`` from the readable sources beside it.

``example/NAME/repo`` is a repository as it should be; ``task.toml`` says which faults are put into it, which of its
tests are hidden, and how it is repaired. ``tests.json`` has the names of the tests that the faults make fail and of
those that they do not, and the controls of the tests, as ``--measure`` found them by running both states.

    python scripts/swe_examples.py [--measure]
"""

import asyncio
import base64
import gzip
import io
import json
import random
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1] / "environments" / "prorl_swe"
SOURCES = ROOT / "example"
ROWS = ROOT / "data" / "example.jsonl"
AGENT = "prorl_swe_agent"
SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Source:
    """One example as it stands in its directory."""

    directory: Path
    task: Mapping[str, Any]
    right: Mapping[str, str]
    """The repaired repository: path and text."""

    @property
    def measured(self) -> Mapping[str, Any]:
        """Names of tests, and their controls."""
        path = self.directory / "tests.json"
        return json.loads(path.read_text()) if path.exists() else {"fail_to_pass": ["?"], "pass_to_pass": []}

    def wrong(self) -> dict[str, str]:
        """Return the repository with its faults, hidden tests included.

        Raises:
            ValueError: a fault does not fit its file.
        """
        texts = dict(self.right)
        for fault in self.task["fault"]:
            path, right, wrong = fault["file"], fault["right"], fault["wrong"]
            if texts[path].count(right) != 1:
                raise ValueError(f"{self.directory.name}: {path} does not have this once: {right!r}")
            texts[path] = texts[path].replace(right, wrong)
        return texts


def sources() -> list[Source]:
    """Read all examples, by name."""
    found: list[Source] = []
    for task in sorted(SOURCES.glob("*/task.toml")):
        repo = task.parent / "repo"
        files = sorted(path for path in repo.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        texts = {str(path.relative_to(repo)): path.read_text(encoding="utf-8") for path in files}
        found.append(Source(task.parent, tomllib.loads(task.read_text(encoding="utf-8")), texts))
    return found


def make_row(source: Source) -> dict[str, Any]:
    """Return the row of an example, without its NeMo Gym frame."""
    from prorl_gym.environments.swe.swe_row import git_diff

    task, wrong = source.task, source.wrong()
    hidden = set(task["hidden"])
    tests = {path: text for path, text in source.right.items() if path.startswith("tests/")}
    changed = [path for path in wrong if wrong[path] != source.right[path]]
    return {
        "id": task["id"],
        "question": task["question"].strip(),
        "archive": pack({path: text for path, text in wrong.items() if path not in hidden}),
        "tests": {
            "files": tests,
            "build": task.get("build", ""),
            "command": task["command"],
            "parser": task["parser"],
            **source.measured,
            "seconds": SECONDS,
        },
        "patch": "".join(git_diff(path, wrong[path], source.right[path]) for path in changed),
        "gold_steps": [_step(step) for step in task["gold"]],
        "wrong_steps": [_step(step) for step in task["wrong"]],
    }


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    arguments = step.get("arguments") or {"command": step["command"].strip("\n")}
    return {"text": step["text"], "tool": step["tool"], "arguments": arguments}


def pack(texts: Mapping[str, str]) -> str:
    """Return base64 of a tar.gz that depends on the texts alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, text in sorted(texts.items()):
            data = text.encode()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.mtime = len(data), 0o644, 946684800
            archive.addfile(entry, io.BytesIO(data))
    return base64.b64encode(gzip.compress(buffer.getvalue(), mtime=0)).decode()


async def frame(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in NeMo Gym's flat form."""
    from prorl_gym.environments import registry
    from prorl_gym.environments.row_format import to_gym_row

    return await to_gym_row(registry.get("swe"), row, AGENT)


async def measure(source: Source) -> None:
    """Run all tests on both states, and write down which of them tell the difference.

    Raises:
        ValueError: a test fails on the repaired state.
    """
    from prorl_gym.environments.swe.controls.control_search import find_controls
    from prorl_gym.environments.swe.grading import run_hidden_tests
    from prorl_gym.environments.swe.runner_reports import PASSING
    from prorl_gym.environments.swe.swe_row import parse_swe_row
    from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
    from prorl_gym.sandbox.backend_selection import open_backend
    from prorl_gym.sandbox.config import SandboxConfig

    task = parse_swe_row(make_row(source))
    backend = await open_backend(SandboxConfig(backend="userns"))
    leases = SandboxLeases(backend)
    try:
        before = await run_hidden_tests(task, b"", leases, SECONDS)
        after = await run_hidden_tests(task, task.gold_patch.encode(), leases, SECONDS)
        bad = [name for name, status in after.statuses.items() if status not in PASSING]
        if after.problem or bad:
            raise ValueError(f"{source.directory.name}: {after.problem or bad}\n{after.log[-4000:]}")
        fails = {name for name in after.statuses if before.statuses.get(name, "missing") not in PASSING}
        names = {"fail_to_pass": tuple(sorted(fails)), "pass_to_pass": tuple(sorted(after.statuses.keys() - fails))}
        named = replace(task, tests=replace(task.tests, controls=None, **names))
        plan = await find_controls(named, leases, random.Random(task.question))
    finally:
        await leases.close()
        await backend.close()
    print(f"{source.directory.name}: {before.problem or len(fails)} fail, {len(after.statuses)} tests")
    found = {**names, "controls": plan.model_dump(mode="json", exclude_defaults=True)}
    (source.directory / "tests.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


async def main(arguments: list[str]) -> None:
    """Write the rows, after measuring when that is asked for."""
    if "--measure" in arguments:
        for source in sources():
            await measure(source)
    rows = [await frame(make_row(source)) for source in sources()]
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    ROWS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
