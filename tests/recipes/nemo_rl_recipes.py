"""The recipes of ``recipes/nemo_rl`` as NeMo-RL's loader sees them, without NeMo-RL."""

import re
import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "recipes/nemo_rl"
MAKE = SimpleNamespace(**runpy.run_path(str(FOLDER / "make.py")))


@cache
def written(*combination: str) -> dict[str, Any]:
    return yaml.safe_load(MAKE.recipe(*combination))


def merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {key: merged(base.get(key), over.get(key, base.get(key))) for key in {**base, **over}}
    return over


@cache
def composed(combination: tuple[str, str, str]) -> dict[str, Any]:
    """What NeMo-RL's loader makes of a recipe: ``defaults`` merged, references resolved."""
    config = written(*combination)
    if "defaults" in config:
        assert config["defaults"] == MAKE.recipe_name("async_grpo", *combination[1:]) + ".yaml"
        config = merged(written("async_grpo", *combination[1:]), config)
    return resolved(config, config)


def resolved(tree: Any, root: dict[str, Any]) -> Any:
    if isinstance(tree, dict):
        return {key: resolved(value, root) for key, value in tree.items()}
    if isinstance(tree, list):
        return [resolved(value, root) for value in tree]
    return reference(tree, root) if isinstance(tree, str) and tree.startswith("${") else tree


def reference(text: str, root: dict[str, Any]) -> Any:
    """Resolve what the recipes use: a path, and the product of two terms."""
    if product_of := re.fullmatch(r"\$\{mul:(.+), *(.+)\}", text):
        first, second = (int(resolved(term, root)) for term in product_of.groups())
        return first * second
    if text.startswith("${."):
        return None  # relative: the sampling of validation
    value: Any = root
    for key in text.removeprefix("${").removesuffix("}").split("."):
        value = value[key]
    return resolved(value, root)
