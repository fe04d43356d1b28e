"""What no namespace contains: calls that payloads do not have, and what all sandboxes of one uid share."""

import fcntl
import itertools
from pathlib import Path

import pytest
from sandbox_support import closing, on_x86_64, pids_of, python_output

from prorl_gym.sandbox.guest import seccomp
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

X86_64 = {"add_key": 248, "keyctl": 250, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425}


def read(path: str) -> str:
    return Path(path).read_text()


@on_x86_64
@pytest.mark.parametrize("call", X86_64)
async def test_a_call_is_as_if_the_kernel_had_none(box: RunningSandbox, call: str) -> None:
    script = f"print(c.syscall({X86_64[call]}, 0, 0, 0, 0, 0), errno.errorcode[error()])"
    assert await python_output(box, script) == "-1 ENOSYS"


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_ALG", "AF_PACKET", "AF_CAN"])
async def test_only_sockets_that_a_network_namespace_contains(box: RunningSandbox, family: str) -> None:
    script = f"print(c.socket(socket.{family}, 1, 0), errno.errorcode[error()])"
    assert await python_output(box, script) == "-1 EAFNOSUPPORT"


async def test_ordinary_sockets_are_left(box: RunningSandbox) -> None:
    script = "for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6): print(socket.socket(family, 1, 0).type)"
    assert await python_output(box, script) == "\n".join(["1"] * 3)


@on_x86_64
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        # mov eax, 359 (socket); mov ebx, 40 (AF_VSOCK); mov ecx, 1; xor edx, edx; int 0x80; ret
        pytest.param("53b867010000bb28000000b90100000031d2cd805bc3", -97, id="i386 socket"),
        # mov eax, 102 (socketcall); int 0x80; ret
        pytest.param("b866000000cd80c3", -38, id="i386 socketcall"),
        # mov eax, 0x40000000 + 39 (x32 getpid); syscall; ret
        pytest.param("b8270000400f05c3", -38, id="x32"),
    ],
)
async def test_older_interfaces_of_the_machine_are_no_way_around(box: RunningSandbox, code: str, answer: int) -> None:
    script = f"""
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("{code}"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    assert int(await python_output(box, script)) == answer


@pytest.mark.default
async def test_a_crash_cannot_run_the_hosts_core_handler(box: RunningSandbox) -> None:
    script = """
import resource
print(resource.getrlimit(resource.RLIMIT_CORE))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))
print(resource.getrlimit(resource.RLIMIT_CORE))
resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert (await python_output(box, script)).splitlines() == ["(1, 1)", "(1, 1)", "(99, 99)"]


async def test_the_hosts_interpreter_is_named_nowhere(box: RunningSandbox) -> None:
    seen = await box.exec(["/bin/bash", "-c", "cat /proc/1/cmdline /proc/1/task/*/cmdline"], timeout=20)
    assert b"spawner" not in seen.stdout, seen


async def test_terminals_of_one_are_not_missing_in_another(box: RunningSandbox, fresh: RunningSandbox) -> None:
    script = """
held = []
try:
    while True:
        held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError as failure:
    print(len(held), errno.errorcode[failure.errno])
"""
    count, code = (await python_output(box, script)).split()
    assert 16 <= int(count) <= 64 and code == "ENOSPC"
    assert (await (await fresh.shell()).run_command("echo fine", timeout=10)).output == "fine\n"


@pytest.mark.parametrize("kind", ["F_RDLCK", "F_WRLCK"])
async def test_no_lease_keeps_a_program_from_being_executed(box: RunningSandbox, kind: str) -> None:
    script = f"""
import fcntl, shutil, subprocess
shutil.copy("/bin/true", "/tmp/held")
file = os.open("/tmp/held", os.O_RDONLY)
try:
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.{kind})
except OSError as failure:
    print(errno.errorcode[failure.errno])
subprocess.run(["/tmp/held"], check=True, timeout=5)
"""
    assert await python_output(box, script) == "EINVAL"


async def test_other_requests_of_fcntl_are_left(box: RunningSandbox) -> None:
    script = "import fcntl; print(fcntl.fcntl(0, fcntl.F_GETLEASE), fcntl.fcntl(0, fcntl.F_DUPFD, 50))"
    assert await python_output(box, script) == f"{fcntl.F_UNLCK} 50"


@on_x86_64
async def test_high_bits_of_a_request_hide_no_lease(box: RunningSandbox) -> None:
    script = "print(c.syscall(72, 0, ctypes.c_ulong(1 << 32 | 1024), 0), errno.errorcode[error()])"
    assert await python_output(box, script) == "-1 EINVAL"


async def test_payloads_may_hold_fewer_descriptors_than_their_guest(backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(open_files=1 << 30)))) as box:
        inside = int(await python_output(box, "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[1])"))
        limits = read(f"/proc/{pids_of(backend, box)[0]}/limits").splitlines()
        guests = next(int(line.split()[3]) for line in limits if line.startswith("Max open files"))
        assert inside <= guests - min(1024, guests // 2)


async def test_filter_is_a_whole_number_of_instructions_and_short_enough() -> None:
    for machine, system_v in itertools.product(("x86_64", "aarch64", "riscv64"), (False, True)):
        program = seccomp.assemble(machine, allow_system_v=system_v, may_notify=True)
        assert (
            len(program) % 8 == 0 and len(program) // 8 <= 4096
        )  # BPF_MAXINSNS; a jump that is too long does not pack
