"""Reading a few figures of an engine's Prometheus page, which may hold thousands of lines, or anything.

The library that writes our own page has a parser too, but it builds every family with all its histograms: this one
reads only the lines that are needed, since pages are read every few seconds for every engine.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>[^ \t]+)(?:[ \t]+-?\d+)?")
# A name is searched only where a word begins: searching inside of words takes quadratic time.
_LABEL = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_MAX_LINE_BYTES = 1 << 16
_MAX_SAMPLES = 4096
"""Samples of one name that are kept: replicas times ranks behind one server. A page is read on the event loop."""
_LARGEST_COUNT = 2.0**53
"""Larger floats are not exact counts."""


@dataclass(frozen=True, slots=True)
class PrometheusSample:
    labels: Mapping[str, str]
    value: float


class PrometheusPage:
    """The samples of a page that have certain names.

    Lines that cannot be read, or that hold no finite number, are left out, and those that contradict ``labels``:
    ``{"tp_rank": "0"}`` keeps rank 0, and what names no rank.
    """

    def __init__(self, payload: bytes, names: Sequence[str], labels: Mapping[str, str] | None = None) -> None:
        self.samples: dict[str, list[PrometheusSample]] = {name: [] for name in names}
        """By name; empty for a name that the page does not have."""
        labels = labels or {}
        # One search finds the lines that begin with one of the names.
        known = b"|".join(re.escape(name).encode() for name in names)
        wanted = re.compile(rb"^(%b)[{ \t].{0,%d}$" % (known, _MAX_LINE_BYTES), re.MULTILINE)
        for found in wanted.finditer(payload):
            samples = self.samples[found[1].decode()]
            if len(samples) >= _MAX_SAMPLES:
                continue
            sample = _parse_line(found[0].decode("utf-8", "replace"))
            if sample is not None and all(sample.labels.get(label, kept) == kept for label, kept in labels.items()):
                samples.append(sample)

    def total(self, name: str) -> int:
        """Return the sum over all labels as a count; 0 without samples."""
        return round(min(sum(max(0.0, sample.value) for sample in self.samples[name]), _LARGEST_COUNT))

    def mean_share(self, name: str) -> float:
        """Return the mean over all labels, kept between 0 and 1; 0 without samples."""
        values = [min(1.0, max(0.0, sample.value)) for sample in self.samples[name]]
        return sum(values) / len(values) if values else 0.0


def parse_count(text: str) -> int | None:
    """Read a label that holds a positive count; ``None`` for any other (vLLM writes ``None`` before it is known)."""
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) and int(text) > 0 else None


def _parse_line(line: str) -> PrometheusSample | None:
    match = _LINE.fullmatch(line.rstrip())
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    return PrometheusSample(dict(_LABEL.findall(match["labels"] or "")), value) if math.isfinite(value) else None
