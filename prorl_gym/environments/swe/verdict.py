"""From the status of each test to a reward: all that have to pass must pass."""

from collections.abc import Iterable, Mapping, Sequence

from prorl_gym.environments.swe.parsers import PASSING, Status, worse
from prorl_gym.environments.swe.run_tests import TestResults
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.errors import Evidence
from prorl_gym.records import Score

KILLED = "killed"
"""Key of ``Score.detail``; see ``with_kill``."""
_NAMED = 3
_NAME_LENGTH = 120


def judge(task: SweTask, results: TestResults) -> Score:
    """Return 1.0 when every test that must pass is reported to, and nothing in the report contradicts itself.

    The detail counts them and names up to three tests that failed and three that were not reported at all.
    """
    return with_kill(_judged(task, results), killed=results.killed, sigkill=results.sigkill)


def with_kill(score: Score, *, killed: bool, sigkill: Evidence | None = None) -> Score:
    """Say in the detail of a repair that failed that its run was killed, and no limit explains that.

    ``sigkill``: see ``ExecResult``.
    """
    if score.reward == 1.0 or not killed:
        return score
    return score.model_copy(update={"detail": {**score.detail, KILLED: True if sigkill is None else sigkill.value}})


def _judged(task: SweTask, results: TestResults) -> Score:
    if results.complaint:
        return unsolved(results.complaint)
    find = Names(results.statuses, without_file=task.source == "r2egym")
    fail_to_pass = find.all(task.tests.fail_to_pass)
    pass_to_pass = find.all(task.tests.pass_to_pass)
    both = [*fail_to_pass, *pass_to_pass]
    detail: dict[str, str | int | float | bool | None] = {
        "fail_to_pass": f"{_passing(fail_to_pass)}/{len(fail_to_pass)}",
        "pass_to_pass": f"{_passing(pass_to_pass)}/{len(pass_to_pass)}",
    }
    if fail_to_pass and _passing(both) == len(both):
        return Score(reward=1.0, detail=detail)
    missing = [name for name, status in both if status == "missing"]
    failed = [name for name, status in both if status not in PASSING and status != "missing"]
    detail |= {"failed": name_some(failed), "missing": name_some(missing)}
    return Score(reward=0.0, detail={"why": _why(fail_to_pass, pass_to_pass), **detail})


def broke_others(task: SweTask, results: TestResults) -> bool:
    """Whether the fault is repaired and nothing is amiss but tests that failed and passed before."""
    find = Names(results.statuses, without_file=task.source == "r2egym")
    repaired = all(status in PASSING for _, status in find.all(task.tests.fail_to_pass))
    others = [status for _, status in find.all(task.tests.pass_to_pass)]
    return not results.complaint and repaired and any(status not in PASSING for status in others)


def name_flaky(score: Score, task: SweTask, results: TestResults, again: TestResults) -> Score:
    """Name in the detail which of a task's tests ended otherwise when they ran again.

    The reward stays: a repair may be what makes a test flaky. Rows that often name one are to be looked at.
    """
    first, second = (Names(each.statuses, without_file=task.source == "r2egym") for each in (results, again))
    names = task.tests.pass_to_pass
    flaky = [name for name in names if (first.status(name) in PASSING) is not (second.status(name) in PASSING)]
    return score.model_copy(update={"detail": {**score.detail, "flaky": name_some(flaky)}}) if flaky else score


def unsolved(why: str) -> Score:
    """Return the score of a repair that was not judged test by test."""
    return Score(reward=0.0, detail={"why": why})


def name_some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(name[:_NAME_LENGTH] for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


class Names:
    """Finds tests by the names that data sets have for them.

    Args:
        statuses: by the names that the runner has.
        without_file: pytest ids are also known without their file, joined by dots, as R2E-Gym has them. Tests of
            several files that share such a name count as the worst of them.
    """

    def __init__(self, statuses: Mapping[str, Status], *, without_file: bool = False) -> None:
        self._statuses = statuses
        self._short: dict[str, Status] = {}
        for name, status in statuses.items() if without_file else ():
            short = ".".join(name.split("::")[1:]).split(" - ")[0]
            self._short[short] = worse(self._short[short], status) if short in self._short else status

    def all(self, names: Iterable[str]) -> list[tuple[str, Status]]:
        """Return each name with its status."""
        return [(name, self.status(name)) for name in names]

    def status(self, name: str) -> Status:
        """Return the status of a test; ``missing`` when it was not reported."""
        if name in self._statuses:
            return self._statuses[name]
        if name in self._short:
            return self._short[name]
        # Data sets made with a parser that ends an id at the first space: the parameter is cut in the middle.
        found: Status = "missing"
        if name.count("[") > name.count("]"):
            for candidate, status in self._statuses.items():
                if candidate.startswith(name):
                    found = status if found == "missing" else worse(found, status)
        return found


def _passing(tests: Sequence[tuple[str, Status]]) -> int:
    return sum(status in PASSING for _, status in tests)


def _why(fail_to_pass: Sequence[tuple[str, Status]], pass_to_pass: Sequence[tuple[str, Status]]) -> str:
    if _passing(fail_to_pass) < len(fail_to_pass):
        return "the fault is not repaired"
    return "tests that passed before do not any more" if pass_to_pass else "no test shows the repair"
