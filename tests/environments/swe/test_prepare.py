"""Placing a repository: one commit, nothing of later ones, files as they were; and images that cannot be used."""

import hashlib
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from prorl_gym.environments.swe.repository import place_repository, place_repository_for_agent, read_archive
from prorl_gym.environments.swe.swe_row import SweTask, parse_swe_row
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.sandbox.protocol import Sandbox, SandboxBackend, SandboxSpec
from tests.environments.swe.mini import TREE, archived, packed, row

HOSTILE = (Path(__file__).parent / "hostile_repository.sh").read_text(encoding="utf-8")
SPEC = SandboxSpec(workdir="/testbed")


@asynccontextmanager
async def sandbox_of(backend: SandboxBackend):
    if backend.name == "local":
        pytest.skip("needs isolation: no user namespaces here")
    sandbox = await backend.start_sandbox(SPEC)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def sh(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(["sh", "-c", script], timeout=60, cwd="/testbed")
    assert result.exit_code == 0, result.stderr.decode()
    return result.stdout.decode()


async def hostile_task(sandbox: Sandbox, **more: object) -> SweTask:
    return parse_swe_row(row(base_commit=(await sh(sandbox, HOSTILE)).split()[-1], **more))


async def test_hostile_history_is_gone_and_files_keep_their_state(backend: SandboxBackend):
    async with sandbox_of(backend) as sandbox:
        task = await hostile_task(sandbox)
        listing = "find . -path ./.git -prune -o -path ./module/.git -prune -o -print0 | sort -z | xargs -0 ls -ld"
        before = await sh(sandbox, listing)
        contents = "find . -path ./.git -prune -o -type f ! -name .git -print0 | sort -z | xargs -0 sha256sum"
        bytes_before = await sh(sandbox, contents)
        base = await place_repository(task, sandbox)

        assert await sh(sandbox, contents) == bytes_before
        assert _names(await sh(sandbox, listing)) == _names(before)
        assert base.dirty == {"run.sh", "version.txt"}
        assert await sh(sandbox, "git log --all --reflog --format='%H %P %an %ad %s'") == (
            f"{base.commit}  base Sat Jan 1 00:00:00 2000 +0000 Base\n"
        )
        assert await sh(sandbox, "git symbolic-ref HEAD; git for-each-ref --format='%(refname)'") == (
            "refs/heads/main\nrefs/heads/main\n"
        )
        assert await sh(sandbox, "git status --short") == "?? version.txt\n"
        assert await sh(sandbox, "git check-ignore module.o build/out.bin") == "module.o\nbuild/out.bin\n"
        assert "kept.o" in (await sh(sandbox, "git ls-files")).split()
        # Not hidden: gone. Every object that is left belongs to the one commit.
        reachable = set((await sh(sandbox, "git rev-list --objects --all | cut -c1-40")).split())
        stored = set(
            (await sh(sandbox, "git cat-file --batch-all-objects --batch-check='%(objectname)' --unordered")).split()
        )
        assert stored == reachable
        assert await sh(sandbox, "git fsck --full --lost-found --no-progress --unreachable 2>&1") == ""
        texts = "git cat-file --batch-all-objects --batch | grep -a future; grep -ra future .git /tmp; true"
        assert await sh(sandbox, texts) == ""
        config = "ls .git/hooks .git/modules .git/worktrees .git/logs /tmp/linked /tmp/elsewhere/.git/objects /tmp/ran"
        assert (
            await sh(sandbox, f"for place in $(echo {config[3:]}); do test -e $place && echo $place; done; true") == ""
        )
        assert "evil" not in await sh(sandbox, "cat .git/config .git/info/*; ls .git/info")
        assert "url" not in await sh(sandbox, "cat .git/config")
        assert await sh(
            sandbox, "git ls-files -v | grep -v ^H; echo x >>run.sh; echo x >>src/gone.py; git diff --stat"
        ) == (" run.sh      | 1 +\n src/gone.py | 1 +\n 2 files changed, 2 insertions(+)\n")
        await sh(sandbox, "git add -A && git commit -qm 'the agent can work'")


def _names(listing: str) -> list[str]:
    return [line for line in listing.splitlines() if not line.endswith((" .", " ./module"))]


async def test_archive_is_the_base_independently_of_its_gitignore(backend: SandboxBackend):
    async with sandbox_of(backend) as sandbox:
        base = await place_repository(archived(), sandbox)
        assert base.dirty == frozenset()
        assert set((await sh(sandbox, "git -c core.quotePath=false ls-files -z")).split("\0")) - {""} == set(TREE)
        assert await sh(sandbox, "touch new.log; git status --short") == ""


async def test_dirty_head_without_base_commit_is_the_base(backend: SandboxBackend):
    async with sandbox_of(backend) as sandbox:
        await sh(sandbox, HOSTILE)
        base = await place_repository(parse_swe_row(row()), sandbox)
        assert await sh(sandbox, "git log --all --format=%H; git show main:run.sh | tail -1") == (
            f"{base.commit}\n# set by the build\n"
        )


async def test_commit_of_the_builders_of_swe_bench_belongs_to_the_base(backend: SandboxBackend):
    build = """
        export HOME=/tmp GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
        git init -q . && echo 1 >a && git add a && git commit -qm one && git rev-parse HEAD
        echo 2 >a && git commit -qam {subject} >&2; echo 3 >>a
    """
    for subject, text in (("SWE-bench", "2\n3\n"), ("later", "1\n")):
        async with sandbox_of(backend) as sandbox:
            base = (await sh(sandbox, build.format(subject=subject))).split()[0]
            await place_repository(parse_swe_row(row(base_commit=base)), sandbox)
            assert await sh(sandbox, "cat a; git status --short") == text


async def test_worktree_of_another_repository_takes_that_one_along(backend: SandboxBackend):
    build = """
        export HOME=/tmp GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
        git init -q /srv/main && cd /srv/main && echo 1 >a && git add a && git commit -qm one
        git worktree add -q --detach /testbed/ HEAD && echo future >a && git commit -qam future
    """
    async with sandbox_of(backend) as sandbox:
        await sh(sandbox, build)
        await place_repository(parse_swe_row(row()), sandbox)
        assert await sh(sandbox, "cat a; git log --all --format=%s; ls -A; ls -A /srv") == "1\nBase\n.git\na\n"


async def test_graders_files_of_r2e_gym_are_put_aside_and_kept_from_the_agent(backend: SandboxBackend):
    task = replace(parse_swe_row(row()), source="r2egym")
    build = """
        git init -q . && mkdir r2e_tests /r2e_tests && echo x >a
        for file in r2e_tests/t run_tests.sh /r2e_tests/t; do echo gold >$file; done
    """
    elsewhere = "--exclude-dir=proc --exclude-dir=usr --exclude-dir=sys"
    where = f"grep -ral gold / --include=t --include=run_tests.sh {elsewhere} 2>&1; true"
    for placing, left in ((place_repository, 3), (place_repository_for_agent, 0)):
        async with sandbox_of(backend) as sandbox:
            await sh(sandbox, build)
            await placing(task, sandbox)
            assert len((await sh(sandbox, where)).split()) == left
            assert "run_tests.sh" not in await sh(sandbox, "ls")


@pytest.mark.parametrize(
    ("build", "more", "kind", "what"),
    [
        ("true", {}, FailureKind.IMAGE_BROKEN, "there is no repository in /testbed"),
        ("echo 1 >a", {"base_commit": "1" * 40}, FailureKind.IMAGE_BROKEN, "has no commit 1111"),
        ("git init -q .", {"base_commit": "1" * 40}, FailureKind.IMAGE_BROKEN, "has no commit 1111"),
        ("rm -f /usr/bin/git", {}, FailureKind.IMAGE_BROKEN, "git does not run in it"),
        ("true", {"archive": "bm90IGEgdGFy"}, FailureKind.BAD_ROW, "its archive cannot be unpacked"),
    ],
)
async def test_what_cannot_be_placed_reports_why(
    backend: SandboxBackend, build: str, more: dict[str, str], kind: FailureKind, what: str
):
    async with sandbox_of(backend) as sandbox:
        if "usr" in build:
            await sh(sandbox, f"{build} 2>/dev/null || true")
            if not (await sh(sandbox, "command -v git || true")).strip() == "":
                pytest.skip("git is on a read-only mount here")
        else:
            await sh(sandbox, build)
        with pytest.raises(TaskError) as caught:
            await place_repository(parse_swe_row(row(**more)), sandbox)
        assert caught.value.kind is kind
        assert what in caught.value.what
        assert caught.value.fix


def test_file_of_the_host_is_checked(tmp_path: Path):
    file = tmp_path / "tree.tar.gz"
    file.write_bytes(packed(TREE))
    good = hashlib.sha256(packed(TREE)).hexdigest()
    task = replace(parse_swe_row(row(archive="")), path=str(file), sha256=good)
    assert read_archive(task) == packed(TREE)
    with pytest.raises(TaskError, match="does not have the SHA-256"):
        read_archive(replace(task, sha256="0" * 64))
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(TaskError, match="cannot be read on this host"):
            read_archive(replace(task, path=str(path)))
