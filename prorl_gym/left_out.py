"""What readers of live wires leave out: fields that nothing here knows, and parts that cannot be used.

In a file or a row they are refused. On a live wire they are not, since a new release of an engine or of an agent
program must not end rollouts: readers check what carries meaning, and what else they meet is logged once for each
source and counted for the metrics page.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Wire = Literal["agent_program", "engine", "registry"]

_MAX_NAMES = 64
"""Names that are logged of one source: it is untrusted, and may invent them."""

log = logging.getLogger(__name__)

_counts: Counter[Wire] = Counter(dict.fromkeys(get_args(Wire), 0))
_logged: defaultdict[str, set[str]] = defaultdict(set)
"""Names by source. Both are of the process, as the metrics page is."""


def count_left_out(wire: Wire, source: str, names: Iterable[str]) -> None:
    """Count what was left out of one message of ``source``, an address or a program; log the names that are new."""
    for name in names:
        _counts[wire] += 1
        known, shown = _logged[source], "".join(letter if letter.isprintable() else "?" for letter in name[:80])
        if shown not in known and len(known) < _MAX_NAMES:
            known.add(shown)
            log.info("%s %s: left out '%s', which is not known or cannot be used here", wire, source, shown)


def unknown_fields(fields: Mapping[str, object], known: frozenset[str], prefix: str = "") -> Iterable[str]:
    """Return the names of fields that hold something and are not known."""
    return (prefix + name for name, value in fields.items() if name not in known and value)


def left_out_counts() -> Mapping[Wire, int]:
    """Return how much this process has left out, by the kind of wire."""
    return _counts
