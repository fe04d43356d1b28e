"""The mismatch of log-probs that trainers report.

Kept in memory, as ``History`` is: the trainer has the figures itself, and reports again at its next update.
"""

import time
from collections import OrderedDict

from prorl_gym.client.wire_models import MismatchBody, MismatchReport

MAX_RUNS = 16
"""Runs of which reports are kept: those that reported last."""

MAX_VERSIONS = 256
"""Reports that are kept of a run: the latest."""


class MismatchReports:
    """Reports by run and policy version."""

    def __init__(self) -> None:
        self.count = 0
        """Reports since the start."""
        self._by_run: OrderedDict[str, OrderedDict[int, MismatchReport]] = OrderedDict()

    def add(self, run_id: str, body: MismatchBody) -> MismatchReport:
        """Keep a report; it replaces an earlier one of the same run and version."""
        report = MismatchReport(run_id=run_id, version=body.version, reported_at=time.time(), mismatch=body.mismatch)
        reports = self._by_run.setdefault(run_id, OrderedDict())
        reports[body.version] = report
        reports.move_to_end(body.version)
        self._by_run.move_to_end(run_id)
        if len(reports) > MAX_VERSIONS:
            reports.popitem(last=False)
        if len(self._by_run) > MAX_RUNS:
            self._by_run.popitem(last=False)
        self.count += 1
        return report

    def of_run(self, run_id: str) -> tuple[MismatchReport, ...]:
        """Return the reports of a run in the order in which they came."""
        return tuple(self._by_run[run_id].values()) if run_id in self._by_run else ()

    def latest(self) -> tuple[MismatchReport, ...]:
        """Return the latest report of each run; the newest is the last."""
        return tuple(next(reversed(reports.values())) for reports in self._by_run.values())
