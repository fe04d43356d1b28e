"""Patches that repair nothing and try to be paid: the rows of ``tests/corpora/hostile_patches.yaml``."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.environments.swe.hostile_repositories import VICTIMS, Victim

CORPUS = Path(__file__).parents[2] / "corpora" / "hostile_patches.yaml"

_BLIND = """import sys

for name, module in list(sys.modules.items()):
    if name.startswith("prorl_") and hasattr(module, "_CORE"):
        module._CORE = ()
        module._INITIAL_CORE.clear()
del name, module
"""
"""What each of them does first: our plug-in shall not see which parts of pytest it replaces."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """One patch: what its repository's module does first, and what stands in place of the fault."""

    victim: str
    prelude: str = ""
    instead: str = ""

    @property
    def repository(self) -> Victim:
        return VICTIMS[self.victim]

    def patch(self) -> str:
        return self.repository.patch(self.instead or self.repository.fault, _BLIND + self.prelude)


CLASSES = {
    kind: {name: Hostile(**patch) for name, patch in patches.items()}
    for kind, patches in yaml.safe_load(CORPUS.read_text("utf-8")).items()
}
HOSTILE = {name: patch for patches in CLASSES.values() for name, patch in patches.items()}
