import subprocess
import sys

import pytest

from prorl_gym.cli import doctor_host
from prorl_gym.cli.doctor_host import host_facts, wide_console


def test_host_is_described() -> None:
    facts = {finding.name: (finding.verdict, finding.detail) for finding in host_facts()}
    assert set(facts) == {"python", "NeMo Gym", "/usr/bin/python3", "bash"}
    assert facts["python"] == ("yes", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")


def test_what_is_missing_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "_SANDBOX_PYTHON", "/nonexistent/python3")
    (fact,) = [fact for fact in host_facts() if fact.name == "/nonexistent/python3"]
    assert (fact.verdict, bool(fact.fix)) == ("no", True)


def test_a_pipe_has_no_width() -> None:
    code = "from prorl_gym.cli.doctor_host import wide_console; wide_console().print('x' * 300, end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "x" * 300
    assert wide_console().width > 0
