"""The agent's side of the swe environment in real sandboxes: what comes out as its patch, whatever it did there."""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.agents.scripted_policy import ScriptedPolicy
from prorl_gym.environments.playback import play_script
from prorl_gym.environments.protocol import RunContext, ScriptedStep
from prorl_gym.environments.registry import get
from prorl_gym.environments.row_format import to_gym_row
from prorl_gym.environments.swe.environment import NO_PATCH, PATCH, SweEnvironment
from prorl_gym.environments.swe.patch_filter import filter_patch
from prorl_gym.environments.swe.repository import sandbox_spec
from prorl_gym.errors import LimitReached, TaskError
from prorl_gym.records import GradedSubmission
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import Sandbox, SandboxBackend, SandboxSpec
from prorl_gym.settings import resolve_settings
from tests.environments.swe.mini import TREE, pack, row

GOLD = """\
diff --git a/src/answer.py b/src/answer.py
--- a/src/answer.py
+++ b/src/answer.py
@@ -1,2 +1,2 @@
 def answer():
-    return 41
+    return 42
"""
HIDDEN = """\
import unittest
from src.answer import answer


class TestAnswer(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(answer(), 42)

    def test_type(self):
        self.assertIsInstance(answer(), int)
"""
ROW = row(
    archive=pack(TREE),
    patch=GOLD,
    tests={
        "files": {"tests/test_hidden.py": HIDDEN},
        "command": "python3 -m unittest -v tests.test_hidden",
        "parser": "unittest",
        "fail_to_pass": ["tests.test_hidden.TestAnswer.test_answer"],
        "pass_to_pass": ["tests.test_hidden.TestAnswer.test_type"],
    },
)
REPAIR = "sed -i 's/41/42/' src/answer.py"


def bash(command: str) -> ScriptedStep:
    return ScriptedStep("", "bash", {"command": command})


class CountingLeases(SandboxLeases):
    """Counts clean sandboxes."""

    cleans = 0

    async def start_clean_sandbox(self, spec: SandboxSpec) -> Sandbox:
        self.cleans += 1
        return await super().start_clean_sandbox(spec)


@pytest.fixture
def lent(backend: SandboxBackend):
    if backend.name == "local":
        pytest.skip("needs isolation: no user namespaces here")
    return CountingLeases(backend)


async def after(
    leases: SandboxLeases, steps: Sequence[ScriptedStep], task: dict[str, Any] = ROW, turns: int | None = None
) -> tuple[Artifacts, list[str]]:
    """Return what is left of an agent that took these steps, and what its tools said."""
    environment, artifacts = SweEnvironment(), Artifacts()
    settings = resolve_settings(environment.settings)
    parsed = environment.parse_row(task)
    try:
        episode = await environment.init(parsed, leases, settings)
        policy = ScriptedPolicy(steps, turns)
        try:
            await environment.run(parsed, episode, RunContext(policy, leases, settings, artifacts))
        except LimitReached:
            assert turns is not None
    finally:
        await leases.close()
    return artifacts, [message.content for message in artifacts.messages if message.role == "tool"]


def applied(patch: bytes, where: Path) -> dict[str, str]:
    """Apply the clean part of a patch to the base tree, on this side; return the tree."""
    for name, text in TREE.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text)
    cleaned = filter_patch(patch, SweEnvironment().parse_row(ROW))
    assert cleaned.refused == ""
    if cleaned.patch:
        subprocess.run(["git", "apply"], input=cleaned.patch, cwd=where, check=True)
    files = [path for path in where.rglob("*") if path.is_file() and path.name != ".gitattributes"]
    return {str(path.relative_to(where)): path.read_text() for path in files}


REPAIRED = {**TREE, "src/answer.py": TREE["src/answer.py"].replace("41", "42")}
OWN = "git config --global user.name a; git config --global user.email a@b; "
EVIL = "printf '#!/bin/sh\\ntouch /tmp/ran\\nsleep 300\\n' >/tmp/evil && chmod +x /tmp/evil"

# What an agent may do to the repository beside its repair; none of it may cost or forge the patch.
HABITS = {
    "nothing": "true",
    "commits its work": "git add -A && git commit -qm done && git tag done && git checkout -qb other",
    "amends the base away": "git add -A && git commit -q --amend -m x && git reflog expire --expire=now --all && "
    "git gc -q --prune=now",
    "removes .git": "rm -rf .git",
    "begins anew": f"{OWN}rm -rf .git && git init -q . && git add -A && git commit -qm new",
    "makes .git a file": "rm -rf .git && echo gitdir: /nowhere >.git",
    "breaks the objects": "rm -rf .git/objects && mkdir -p .git/objects/pack && mkfifo .git/objects/pack/pack-1.idx",
    "borrows objects": "echo /nowhere >.git/objects/info/alternates",
    "leaves the index locked": "touch .git/index.lock; echo garbage >.git/index",
    "configures programs": f"{EVIL}; git config core.fsmonitor /tmp/evil; git config filter.x.clean /tmp/evil; "
    "git config diff.x.textconv /tmp/evil; git config diff.external /tmp/evil; git config core.hooksPath /tmp; "
    "git config --global filter.x.clean /tmp/evil; git config --global diff.external /tmp/evil; "
    "echo '* filter=x diff=x' >.git/info/attributes",
    "hides text behind attributes": "echo '*.py -diff -text filter=x' >.gitattributes",
    "makes repositories below": f"{OWN}git init -q src && git -C src add -A && git -C src commit -qm own",
    "adds a submodule": f"{OWN}git init -q /tmp/m && git -C /tmp/m commit -q --allow-empty -m x && "
    "git -c protocol.file.allow=always submodule -q add /tmp/m m && rm -f .gitmodules",
    "works in another tree": "git worktree add -q /tmp/w && git stash -q && git stash pop -q",
    "fills files that are ignored": "mkdir -p build && head -c 20000000 /dev/zero >build/big && touch x.log",
    "makes huge files": "truncate -s 1500M huge.bin && yes text | head -c 30000000 | tee huge.txt >kept.log; "
    'for n in 1 2 3 4 5 6 7 8; do yes text | head -c 700000 >"large [$n]#.txt"; done; true',
    "leaves what it installed": "mkdir -p .venv/lib 'src/node [modules]' && cd .venv/lib && "
    'for n in $(seq 300); do echo $n >$n.py; echo $n >"../../src/node [modules]/$n"; done',
    "makes links": "ln -s /etc/passwd leak && ln -s .. up && mkfifo pipe",
    "adds tests and binaries": "echo x >tests/test_more.py && echo x >conftest.py && printf 'a\\0b' >blob.dat",
    "replaces a binary": "printf 'c\\0d' >data.bin",
    "locks a directory": "mkdir locked && mkfifo locked/x && chmod 0 locked",
    "leaves programs running": "(setsid sh -c 'while :; do :; done' &) ; (sleep 300 &)",
    "fills /tmp": "rm -rf /tmp; touch /tmp",
}


@pytest.mark.parametrize("habit", HABITS, ids=str)
async def test_patch_is_the_repair_whatever_else_was_done(lent: CountingLeases, habit: str, tmp_path: Path):
    artifacts, said = await after(lent, [bash(REPAIR), bash(HABITS[habit])])
    assert all("exit code 0]" in text for text in said), said
    assert NO_PATCH not in artifacts.files, artifacts.files[NO_PATCH]
    assert applied(artifacts.files[PATCH], tmp_path) == REPAIRED


async def test_patch_holds_what_was_edited_made_and_removed(lent: CountingLeases, tmp_path: Path):
    steps = [
        bash(f"{REPAIR}; rm src/gone.py; echo new >'src/new file.py'; touch src/__init__.py; echo forced >>kept.log"),
        ScriptedStep("", "editor", {"command": "create", "path": 'src/ü\t"q".py', "file_text": "x = 1"}),
        bash(f"{OWN}git init -q pkg; echo y >pkg/m.py; git -C pkg add -A; git -C pkg commit -qm 'in the way'"),
        bash("git add -A; git commit -qm work; rm -rf .git/objects; echo x >ignored.log; printf 'c\\0d' >data.bin"),
        ScriptedStep("", "finish", {"answer": "done"}),
    ]
    artifacts, _ = await after(lent, steps)
    expected = {
        **REPAIRED,
        "src/new file.py": "new\n",
        "src/__init__.py": "",
        "pkg/m.py": "y\n",
        "kept.log": TREE["kept.log"] + "forced\n",
        'src/ü\t"q".py': "x = 1",
    }
    del expected["src/gone.py"]
    assert applied(artifacts.files[PATCH], tmp_path) == expected
    assert artifacts.answer == "done"


async def test_limit_of_turns_keeps_the_patch(lent: CountingLeases, tmp_path: Path):
    artifacts, _ = await after(lent, [bash(REPAIR), bash("true")], turns=1)
    assert applied(artifacts.files[PATCH], tmp_path) == REPAIRED


async def test_without_git_there_is_no_patch_and_that_is_said(lent: CountingLeases):
    artifacts, _ = await after(lent, [bash(f"{REPAIR}; rm -f $(command -v git) || mv $(command -v git) /tmp")])
    if PATCH in artifacts.files:
        pytest.skip("git is on a read-only mount here")
    assert b"git does not work in the agent's sandbox any more" in artifacts.files[NO_PATCH]


async def test_gold_is_one_and_time_up_is_graded_too(lent: CountingLeases):
    environment, settings = SweEnvironment(), resolve_settings(SweEnvironment.settings)
    try:
        played = await play_script(environment, ROW, environment.gold_steps(ROW), lent)
        assert played.score.reward == 1.0, played.score.detail
        assert played.score.detail["files"] == 1
        assert played.artifacts.submission is not None
        assert "+    return 42" in played.artifacts.submission.text
        assert set(played.score.report.splitlines()) == {
            "passed tests.test_hidden.TestAnswer.test_answer",
            "passed tests.test_hidden.TestAnswer.test_type",
        }
        # A rollout whose time is up is killed before the patch was taken: evaluate takes it.
        artifacts = Artifacts()
        score = await environment.evaluate(environment.parse_row(ROW), artifacts, lent, settings)
        assert score.reward == 1.0
    finally:
        await lent.close()


async def test_empty_patch_is_zero_without_a_clean_sandbox(lent: CountingLeases):
    environment = SweEnvironment()
    edits = bash("echo x >tests/test_more.py; echo y >conftest.py; ln -s a b")
    try:
        played = await play_script(environment, ROW, [edits], lent)
    finally:
        await lent.close()
    assert played.score.reward == 0.0
    assert played.score.detail == {
        "why": "empty patch: it only touches what is not graded (symbolic link, test)",
        "files": 0,
        "dropped: symbolic link": 1,
        "dropped: test": 2,
    }
    assert played.artifacts.submission == GradedSubmission(kind="patch", text="")
    assert lent.cleans == 0


async def test_nothing_of_the_answer_is_in_prompt_tools_or_sandbox(lent: CountingLeases):
    secret = "needle_in_hidden_test"
    task = {**ROW, "tests": {**ROW["tests"], "files": {"tests/test_hidden.py": f"# {secret}\n{HIDDEN}"}}}
    task["patch"] = GOLD.replace("return 42", f"return 42  # {secret}")
    look = f"grep -ral {secret[:7]}_in_hidden / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr; env; ps axww"
    artifacts, said = await after(lent, [bash(look)], task)
    assert "PATH=" in said[0]
    assert secret not in "".join(message.content for message in artifacts.messages[:2])
    assert "/" not in said[0].partition("PATH=")[0].replace(look, "").split("\n")[0][:1]
    assert secret not in said[0].replace(look, "")


async def test_images_of_collections_keep_tests_from_the_agent_and_give_it_their_interpreter(backend: SandboxBackend):
    fake = {
        "swegym": "mkdir -p /opt/miniconda3/bin; echo 'conda() { export FOUND=$2; }' >/opt/miniconda3/bin/activate",
        "r2egym": "mkdir -p .venv/bin /r2e_tests; touch /r2e_tests/t run_tests.sh a; "
        "echo 'echo testbed' >.venv/bin/found; chmod +x .venv/bin/found",
    }
    for source, build in fake.items():
        lent, environment, artifacts = CountingLeases(backend), SweEnvironment(), Artifacts()
        task = replace(environment.parse_row(ROW), source=source, archive="")
        resolved = resolve_settings(environment.settings)
        try:
            sandbox = await lent.get_agent_sandbox(await sandbox_spec(task))
            made = await sandbox.exec(["sh", "-c", f"git init -q .; touch tracked; {build}"], timeout=60)
            assert made.exit_code == 0
            episode = await environment.init(task, lent, resolved)
            look = "echo ${FOUND:-$(found)}; ls -A . / | grep -E 'run_tests|r2e' || echo clean"
            context = RunContext(ScriptedPolicy([bash(look)]), lent, resolved, artifacts)
            await environment.run(task, episode, context)
        finally:
            await lent.close()
        said = next(message.content for message in artifacts.messages if message.role == "tool")
        assert said.startswith("testbed\nclean\n"), said


async def test_replicas_get_the_same_prompt_and_see_the_same_repository(backend: SandboxBackend):
    seen: list[tuple[Any, ...]] = []
    for _ in range(2):
        lent = CountingLeases(backend)
        artifacts, said = await after(lent, [bash("git log; git status; pwd; ls -A; git count-objects -v")])
        seen.append((artifacts.messages[:2], said))
    assert seen[0] == seen[1]


async def test_gym_row_needs_no_sandbox():
    gym = await to_gym_row(SweEnvironment(), ROW, "swe_agent")
    texts = [message["content"] for message in gym["responses_create_params"]["input"]]
    assert ROW["question"] in texts[1]
    assert [tool["name"] for tool in gym["responses_create_params"]["tools"]] == ["bash", "editor", "think", "finish"]
    assert "42\n" not in str(gym["responses_create_params"])


def test_row_without_gold_is_refused():
    environment = get("swe")
    with pytest.raises(TaskError, match="no gold answer"):
        environment.gold_steps({**ROW, "patch": ""})
