import subprocess
import sys

from prorl_gym.cli.doctor_report import program_findings, wide_console


def test_host_is_described() -> None:
    facts = {finding.name: (finding.verdict, finding.detail) for finding in program_findings()}
    assert set(facts) == {"python", "NeMo Gym", "/usr/bin/python3", "bash"}
    assert facts["python"] == ("yes", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")


def test_what_is_missing_has_a_fix() -> None:
    (fact,) = [fact for fact in program_findings("/nonexistent/python3") if fact.name == "/nonexistent/python3"]
    assert (fact.verdict, bool(fact.fix)) == ("no", True)


def test_a_pipe_has_no_width() -> None:
    code = "from prorl_gym.cli.doctor_report import wide_console; wide_console().print('x' * 300, end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "x" * 300
    assert wide_console().width > 0
