"""Gym's ``AsyncSandbox`` over our provider: both real backends, started by nothing but a configuration line."""

import asyncio
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest
import pytest_asyncio
from nemo_gym.sandbox import AsyncSandbox, SandboxCreateError, SandboxSpec, SandboxStatus, create_provider
from nemo_gym.sandbox.config import resolve_provider_config
from nemo_gym.sandbox.providers import base

from prorl_gym.errors import ConfigError, FailureKind, SandboxError
from prorl_gym.gym_sandbox.provider import SHM_SIZE_KEY, ProrlProvider
from prorl_gym.sandbox import protocol
from prorl_gym.sandbox.protocol import ExecResult
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC, CHECKS, PYTHON_CHECKS, SHELL_CHECKS, Check

APPTAINER = pytest.param("apptainer", marks=[pytest.mark.apptainer, pytest.mark.product])

pytestmark = [
    *(pytest.mark.gym, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")),
    pytest.mark.usefixtures("found_by_gym"),
]

OUTPUT = 16 << 10


@pytest.fixture(scope="module", params=["userns", APPTAINER])
def block(request: pytest.FixtureRequest) -> dict[str, object]:
    """A sandbox block as Gym's configurations have it."""
    return {"sandbox": {"prorl": {"backend": request.param, "limits": {"output": OUTPUT}}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(block: dict[str, object], found_by_gym: None) -> AsyncIterator[ProrlProvider]:
    provider = create_provider(resolve_provider_config("sandbox", block))
    assert isinstance(provider, ProrlProvider)
    yield provider
    await provider.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(provider: ProrlProvider) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(provider, SandboxSpec(env={"OWN": "variable"}), owns_provider=False) as sandbox:
        yield await sandbox.start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(provider: ProrlProvider) -> AsyncIterator[AsyncSandbox]:
    """A sandbox with little room, by what Gym's requests can say of it."""
    spec = SandboxSpec(resources={"memory_mib": 96}, metadata={SHM_SIZE_KEY: str(1 << 20)})
    async with AsyncSandbox(provider, spec, owns_provider=False) as sandbox:
        yield await sandbox.start()


async def test_optional_protocols_are_those_that_can_be_kept(provider: ProrlProvider) -> None:
    kept = {name for name in vars(base) if name.startswith("Supports") and isinstance(provider, getattr(base, name))}
    names = ("BackgroundServices", "Pty", "RuntimeRequirements")
    assert kept == {f"SupportsSandbox{name}" for name in names}


async def test_command_gives_output_and_code(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("echo out; echo $OWN $MORE >&2; (exit 3)", env={"MORE": "more"})
    assert (result.stdout, result.stderr) == ("out\n", "variable more\n")
    assert (result.return_code, result.error_type) == (3, None)


async def test_command_longer_than_an_argument_list_runs(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec(f"x='{'y' * 500_000}'; echo ${{#x}}; cat | wc -c")
    assert (result.stdout, result.return_code) == ("500000\n0\n", 0)


async def test_timeout_keeps_what_was_printed(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("echo early; sleep 100", timeout_s=0.3)
    assert (result.stdout, result.return_code, result.error_type) == ("early\n", 125, "timeout")
    assert result.stderr == "Command timed out after 0.3s"


async def test_other_users_are_refused(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.exec("id -u", user="root")).stdout == "0\n"
    with pytest.raises(ValueError, match="one user, root"):
        await sandbox.exec("id", user="nobody")


async def test_files_go_both_ways(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    (tmp_path / "script").write_bytes(data)
    (tmp_path / "script").chmod(0o750)
    await sandbox.upload(tmp_path / "script", "/made/on/the way")
    assert (await sandbox.exec("stat -c '%a %s' '/made/on/the way'")).stdout == "750 256000\n"
    await sandbox.download("/made/on/the way", tmp_path / "also" / "made")
    assert (tmp_path / "also" / "made").read_bytes() == data


async def test_background_services_survive_their_command(sandbox: AsyncSandbox) -> None:
    await sandbox.exec("sleep 77.77 >/dev/null 2>&1 &", preserve_background_services=True)
    assert "77.77" in ((await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout or "")


@pytest.fixture
def given() -> Iterator[Path]:
    """A host directory that the sandboxes' uid may read."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        path = Path(directory)
        path.chmod(0o755)
        (path / "file").write_text("mounted")
        yield path


async def test_request_shapes_the_sandbox(
    provider: ProrlProvider, given: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A share of the processors is not enforced, which is logged."""
    runtime = provider.validate_runtime_requirements(cap_add=(), shm_size=1 << 20)
    assert runtime is not None
    spec = SandboxSpec(
        workdir="/testbed",
        files={"/testbed/input": "given"},
        resources={"cpu": 0.5, "memory_mib": 512, "disk_gib": 1},
        metadata=runtime,
        provider_options={"mounts": [[str(given), "/given"]], "egress": ["index.example"]},
    )
    async with AsyncSandbox(provider, spec, owns_provider=False) as sandbox:
        await sandbox.start()
        script = "pwd; cat input /given/file; echo; df --output=size -B1 / /dev/shm; echo $HTTPS_PROXY"
        lines = ((await sandbox.exec(script)).stdout or "").split()
        limits = sandbox._require_handle().raw.sandbox.spec.limits  # noqa: SLF001
    assert lines[:2] == ["/testbed", "givenmounted"]
    assert lines[2:] == ["1B-blocks", str(1 << 30), str(1 << 20), "http://127.0.0.1:3128"]
    assert (limits.total_memory, limits.file_size) == (512 << 20, 1 << 30)
    assert [line for line in caplog.messages if "resources.cpu (0.5) is not enforced" in line]


_OPENER = "python3 -c 'import os; [os.dup(0) for _ in range(99)]'"
_HOG = "python3 -c 'import time; x = [b\"x\" * (8 << 20) for _ in range(20)]; time.sleep(20)'"


@pytest.mark.parametrize(
    ("command", "code", "word"),
    [
        pytest.param(_HOG, 137, "memory_sandbox", id="memory"),
        pytest.param("cd /dev/shm; head -c 9000000 /dev/zero > x; code=$?; rm x; exit $code", 1, "disk", id="disk"),
        pytest.param(f"ulimit -n 64; {_OPENER}", 1, "open_files", id="open files"),
        pytest.param("head -c 100000 /dev/zero", 0, "output", id="output"),
        pytest.param("exit 9", 9, None, id="none"),
    ],
)
async def test_limit_that_a_command_ran_into_is_named(
    small: AsyncSandbox, command: str, code: int, word: str | None
) -> None:
    result = await small.exec(command, timeout_s=60)
    assert (result.return_code, result.error_type) == (code, word), result


async def test_timeout_names_its_cause(small: AsyncSandbox) -> None:
    late = await small.exec("echo 'bash: fork: retry: Resource temporarily unavailable' >&2; sleep 100", timeout_s=0.5)
    assert late.error_type == "timeout" and (late.stderr or "").endswith("after 0.5s (limit: processes)"), late


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param(SandboxSpec(image="/no/such/image"), "/no/such/image", id="image"),
        pytest.param(SandboxSpec(resources={"gpu": 1}), "resources.gpu", id="gpu"),
        pytest.param(SandboxSpec(resources={"memory_mib": 0}), "resources.memory_mib", id="memory"),
        pytest.param(SandboxSpec(entrypoint=["sleep"]), "entrypoint", id="entrypoint"),
        pytest.param(SandboxSpec(provider_options={"mount": []}), "'mounts'", id="option"),
        pytest.param(SandboxSpec(ready_timeout_s=1e-6), "1e-06 s", id="timeout"),
    ],
)
async def test_what_cannot_be_had_is_a_create_error(provider: ProrlProvider, spec: SandboxSpec, words: str) -> None:
    with pytest.raises(SandboxCreateError) as raised:
        await AsyncSandbox(provider, spec, owns_provider=False).start()
    assert words in str(raised.value) and len(str(raised.value).splitlines()) <= 2


async def test_unknown_keys_and_capabilities_are_refused_by_name(provider: ProrlProvider) -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown key 'limits.memroy'.*memory"):
        ProrlProvider(limits={"memroy": 1})
    with pytest.raises(ValueError, match="SYS_ADMIN"):
        provider.validate_runtime_requirements(cap_add=("SYS_ADMIN",), shm_size=None)


async def test_status_distinguishes_alive_stopped_and_dead(provider: ProrlProvider) -> None:
    handle = await provider.create(SandboxSpec())
    assert await provider.status(handle) is SandboxStatus.RUNNING
    await provider.close(handle)
    await provider.close(handle)
    assert await provider.status(handle) is SandboxStatus.STOPPED
    lost = await provider.create(SandboxSpec())
    await lost.raw.sandbox.close()
    assert await provider.status(lost) is SandboxStatus.ERROR
    result = await provider.exec(lost, "true")
    assert (result.return_code, result.error_type) == (125, "sandbox")


async def test_time_to_live_ends_it(provider: ProrlProvider) -> None:
    handle = await provider.create(SandboxSpec(ttl_s=0.2))
    began = asyncio.get_running_loop().time()
    assert (await provider.exec(handle, "sleep 100")).error_type == "sandbox"
    assert asyncio.get_running_loop().time() - began < 30
    assert await provider.status(handle) is SandboxStatus.STOPPED


async def test_providers_of_a_loop_share_a_backend(provider: ProrlProvider, block: dict[str, object]) -> None:
    other = create_provider(resolve_provider_config("sandbox", block))
    ours = await provider.create(SandboxSpec())
    theirs = await other.create(SandboxSpec())
    assert len({started.sandbox.id for started in (ours.raw, theirs.raw)}) == 2
    await other.aclose()
    assert await other.status(theirs) is SandboxStatus.STOPPED
    assert await provider.status(ours) is SandboxStatus.RUNNING
    await provider.close(ours)


class ProviderBox:
    """A sandbox of Gym's provider, seen through Gym's own API, as a ``Sandbox`` that our conformance kit can ask.

    A program's arguments become one command line, its stdin a file.
    """

    def __init__(self, sandbox: AsyncSandbox, spec: protocol.SandboxSpec) -> None:
        self._sandbox = sandbox
        self.id = "through Gym"
        self.spec = spec

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: object = None,
    ) -> ExecResult:
        assert limits is None
        command = shlex.join(argv)
        if stdin:
            await self.write_file("/tmp/stdin", stdin)
            command += " < /tmp/stdin"
        try:
            result = await self._sandbox.exec(command, timeout_s=timeout, cwd=cwd, env=dict(env) if env else None)
        except RuntimeError as error:  # Gym's word for a sandbox that was stopped
            raise SandboxError(FailureKind.SANDBOX_LOST, str(error)) from None
        if result.error_type == "sandbox":
            raise SandboxError(FailureKind.SANDBOX_LOST, result.stderr or "")
        timed_out = result.error_type == "timeout"
        stdout, stderr = (result.stdout or "").encode(), (result.stderr or "").encode()
        truncated = b"bytes left out" in stdout
        return ExecResult(137 if timed_out else result.return_code, stdout, stderr, timed_out, truncated)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            await self._sandbox.upload(file.name, path)

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        with tempfile.NamedTemporaryFile() as file:
            await self._sandbox.download(path, file.name)
            return file.read()

    async def is_alive(self) -> bool:
        return await self._sandbox.status() is SandboxStatus.RUNNING

    async def close(self) -> None:
        await self._sandbox.stop()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"Gym's contract has no {name}")


# Every check of the kit that Gym's contract has words for. The others, and why:
_CANNOT = {
    **{check.__name__: "no persistent shell: Gym's has terminals" for check in SHELL_CHECKS},
    **{check.__name__: "no python tool" for check in PYTHON_CHECKS},
    "sandbox_says_that_it_lives": "asks the shell and the python tool, too; see the test of the status",
    "close_ends_calls_in_flight": "likewise; see the test of the time to live",
    "exec_obeys_narrower_limits": "no limits of one command",
    "large_files_are_refused": "no limit of one download",
    "files_have_modes": "no way to leave a file's permissions as they are; see the test of uploads",
    "files_have_any_name": "no listing of directories",
    "missing_paths_are_told_apart": "likewise",
    "directories_are_listed": "likewise",
    "listen_accepts_connections_from_inside": "no sockets of the sandbox",
}


assert set(_CANNOT) <= {check.__name__ for check in CHECKS}
_CAN = [check for check in CHECKS if check.__name__ not in _CANNOT]


@pytest.mark.parametrize("check", _CAN, ids=lambda check: check.__name__)
async def test_conformance(check: Check, provider: ProrlProvider) -> None:
    async with AsyncSandbox(provider, SandboxSpec(), owns_provider=False) as sandbox:
        await sandbox.start()
        await check(ProviderBox(sandbox, CHECK_SPEC))
