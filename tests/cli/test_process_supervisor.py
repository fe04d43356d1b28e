"""Nothing that was started is left, whatever it does to escape."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from prorl_gym.cli.demo.process_supervisor import descendants, send_signal
from prorl_gym.process_identity import ProcessIdentity

ESCAPES = """
    import asyncio, os, sys
    from pathlib import Path
    from prorl_gym.cli.demo.process_supervisor import ProcessSupervisor
    from prorl_gym.sandbox.syscalls import set_child_subreaper

    CHILD = '''
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(600)
        os._exit(0)
    {parent}
    '''

    async def main():
        set_child_subreaper()
        family = ProcessSupervisor(Path(sys.argv[1]))
        for index, parent in enumerate(("time.sleep(600)", "os._exit(0)")):
            argv = [sys.executable, "-c", CHILD.format(parent=parent)]
            child = await family.start_child(f"c{index}", argv, os.environ, Path("/"))
            while not child.log.read_text().strip():
                await asyncio.sleep(0.01)
        print(*(child.log.read_text().strip() for child in family.children), flush=True)
        left = await family.stop_all(grace=0.2)
        print("left", left, flush=True)

    asyncio.run(main())
"""


@pytest.mark.slow
def test_daemons_that_ignore_sigterm_are_ended(tmp_path: Path):
    code = textwrap.dedent(ESCAPES)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    pids, left = done.stdout.strip().splitlines()
    assert left == "left 0"
    assert len(pids.split()) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.split())


def test_descendants_are_found_below_a_process_only():
    child = subprocess.Popen(["sleep", "30"])
    try:
        assert child.pid in {seen.pid for seen in descendants(os.getpid())}
        assert not descendants(child.pid)
    finally:
        child.kill()
        child.wait(timeout=10)


def test_signal_is_not_sent_to_a_reused_number():
    child = subprocess.Popen(["sleep", "30"])
    try:
        send_signal(ProcessIdentity(child.pid, start_ticks=1), 9)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait(timeout=10)
