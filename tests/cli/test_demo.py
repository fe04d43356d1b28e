"""``prorl-gym demo``: what it makes of the results, and that nothing it started is left."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from rollout_samples import ROW, failed, rollout, segment

from prorl_gym.cli.demo import check_results, pass_at, results_table
from prorl_gym.cli.demo.stack import LoggedProcess, descendants, send_signal
from prorl_gym.process_identity import ProcessIdentity
from prorl_gym.records import Score
from prorl_gym.trainers.gym_result import to_gym_result


def rows(*rewards: float, task: int = 0) -> list[dict[str, object]]:
    return [
        to_gym_result(rollout(rollout_id=f"r{task}-{i}", score=Score(reward=reward)), ROW | {"_ng_task_index": task})
        for i, reward in enumerate(rewards)
    ]


def test_good_rows_pass_and_a_missing_one_is_a_complaint():
    assert check_results(rows(1.0, 0.0), expected=2) == ([], 0)
    assert check_results(rows(1.0), expected=2)[0] == ["1 rows came back, 2 were sent"]


def test_masked_row_fails_the_demo_without_a_complaint():
    results = [*rows(1.0), to_gym_result(failed(), ROW | {"_ng_task_index": 1})]
    assert check_results(results, expected=2) == ([], 1)


def test_group_with_another_first_prompt_is_a_complaint():
    other = to_gym_result(rollout(segments=[segment(prompt=[9, 9, 9])]), ROW | {"_ng_task_index": 0})
    errors, _ = check_results([*rows(1.0), other], expected=2)
    assert "first prompt differs" in errors[0]


def test_pass_at_k_counts_tasks_and_leaves_out_masked_rows():
    masked = to_gym_result(failed(), ROW | {"_ng_task_index": 0})
    results = [*rows(1.0, 0.0, task=0), *rows(0.0, 0.0, task=1), masked]
    assert pass_at(results, any_of=False) == pytest.approx(0.25)
    assert pass_at(results, any_of=True) == pytest.approx(0.5)


def test_table_has_a_line_per_environment():
    results = [*rows(1.0, 0.0), *[row | {"environment": "code"} for row in rows(1.0, task=1)]]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(results_table(results))
    text = console.export_text()
    assert all(word in text for word in ("math", "0.50", "pass@2"))
    head = next(line for line in text.splitlines() if "environment" in line).split()
    assert head[-4:] == ["queue", "INIT", "RUN", "EVAL"]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text  # it fits a terminal


ESCAPES = """
    import asyncio, os, sys
    from pathlib import Path
    from prorl_gym.cli.demo.stack import ProcessSupervisor
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


def test_the_end_of_a_log_shows_first_what_the_server_that_ended_said(tmp_path: Path):
    log = tmp_path / "gym-servers.log"
    ended = "(prorl_code_agent) ERROR: address already in use"
    traceback = ["Traceback"] * 40 + ["RuntimeError: Process `prorl_code_agent` finished unexpectedly!"]
    log.write_text("\n".join(["(prorl_math_agent) ready", ended, *traceback]))
    shown = LoggedProcess("gym-servers", cast("Any", None), log).tail(3).splitlines()
    assert shown == [ended, "Traceback", "Traceback", traceback[-1]]


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
