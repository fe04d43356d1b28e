"""Both real servers and the weights they can be given, as the tests see them."""

import json
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from real_server import MODEL, VOCAB, RealServer

from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions

ENGINES = 2
TOKENIZER = Path(__file__).parents[2] / "prorl_gym" / "oracle" / "tokenizer"
STOP = 2

Figures = dict[str, tuple[object, str, str]]
"""Value, unit and explanation of what was measured, by name."""


@dataclass
class Checkpoints:
    """Directories of weights, made when they are first asked for."""

    python: str
    root: Path
    made: dict[str, Path] = field(default_factory=dict)

    def random(self, seed: int) -> Path:
        return self._make(f"random-{seed}", seed=seed)

    def chain(self, *ids: int, after: int = 7, again: bool = False) -> Path:
        """Weights that say these ids after each other, whatever the prompt; ``again``: in a circle.

        ``after`` is the last id of the prompt: of the conformance kit's, by default.
        """
        steps = list(zip((after, *ids), ids, strict=False)) + ([(ids[-1], ids[0])] if again else [])
        return self._make("-".join(map(str, ("circle" if again else "chain", after, *ids))), chain=steps)

    def _make(self, name: str, **weights: object) -> Path:
        if name not in self.made:
            jobs = self.root / f"{name}.json"
            job = {"directory": str(self.root / name), "tokenizer": str(TOKENIZER), "vocab": VOCAB, "stop": STOP}
            jobs.write_text(json.dumps([job | weights]))
            subprocess.run([self.python, Path(__file__).with_name("make_model.py"), jobs], check=True, timeout=60)
            self.made[name] = self.root / name
        return self.made[name]


@dataclass
class Fleet:
    servers: list[RealServer]
    checkpoints: Checkpoints
    policy: Path
    opened: list[VllmEngine] = field(default_factory=list)

    def engine(self, number: int = 0, **changes: Any) -> VllmEngine:
        """Return an adapter for one of them; closed when the test is over."""
        options = VllmOptions(model=MODEL, vocab_size=VOCAB, logprob_kind="processed")
        options = replace(options, **changes)
        self.opened.append(VllmEngine(f"vllm-{number}", self.servers[number].url, options))
        return self.opened[-1]

    def engines(self) -> list[VllmEngine]:
        return [self.engine(number) for number in range(ENGINES)]
