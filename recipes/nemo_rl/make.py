#!/usr/bin/env python3
"""Write a NeMo-RL recipe: ``python recipes/nemo_rl/make.py dapo math 4b``.

All recipes come from ``recipe.yaml.in``; ``sc`` is an overlay (``single_controller.yaml.in``) over the recipe of
``async_grpo``, which is written beside it. ``make.py --committed`` writes those of this folder again.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Algorithm:
    """What an algorithm sets. ``mini_batch`` is in prompts."""

    title: str
    kl: str = "1.0e-4"
    clip_max: str = "0.2"
    clip_c: str = "null"
    is_dapo: bool = False
    is_async: bool = False
    mini_batch: str = "8"
    mini_batch_note: str = "published: 4 updates of 8 prompts a step"


@dataclass(frozen=True)
class Domain:
    """What a domain sets; ``context`` is in tokens, ``running`` in agents."""

    environments: tuple[str, ...]
    context: int = 16384
    running: int = 256
    settings: str = ""


@dataclass(frozen=True)
class Size:
    """A model and the GPUs for it: nodes of 8, and how many of them train on one copy or sample with one."""

    model: str
    nodes: int
    train_parallel: int
    generation_parallel: int = 1


ALGORITHMS = {
    "grpo": Algorithm("GRPO"),
    # DAPO has no KL term. With the published 1e-4, compute the reference's log-probs, too.
    "dapo": Algorithm(
        "DAPO (dynamic sampling, clip-higher, no KL)", kl="0", clip_max="0.28", clip_c="10", is_dapo=True
    ),
    "async_grpo": Algorithm(
        "Asynchronous GRPO",
        is_async=True,
        mini_batch="${grpo.num_prompts_per_step}",
        mini_batch_note="one update a step",
    ),
    "sc": Algorithm("Asynchronous GRPO with the SingleController"),
}
DOMAINS = {
    "math": Domain(("math",)),
    "code": Domain(("code",)),
    "stem": Domain(("stem",)),
    "swe": Domain(("swe",), context=32768, running=128, settings=", run_seconds: 2700"),
    "blend": Domain(("math", "code", "stem", "swe"), context=32768, running=128),
}
SIZES = {
    "4b": Size("Qwen/Qwen3-4B-Instruct-2507", nodes=1, train_parallel=2),
    "8b": Size("Qwen/Qwen3-8B", nodes=2, train_parallel=4),
    "14b": Size("Qwen/Qwen3-14B", nodes=4, train_parallel=4, generation_parallel=2),
}
COMMITTED = (
    ("dapo", "math", "4b"),
    ("grpo", "code", "8b"),
    ("dapo", "swe", "14b"),
    ("async_grpo", "blend", "8b"),
    ("sc", "blend", "8b"),
)


class Placeholders(Template):
    """``@{name}``: OmegaConf has the dollar sign."""

    delimiter = "@"


def recipe_name(algorithm: str, domain: str, size: str) -> str:
    """Return the name of a recipe's file, without its ending."""
    return f"{algorithm}_{domain}_qwen3_{size}"


def recipe(algorithm: str, domain: str, size: str) -> str:
    """Return the text of a recipe."""
    values = _names(algorithm, domain, size)
    if algorithm == "sc":
        agents = _lines(4, _failing_agents(DOMAINS[domain]))
        return _fill("single_controller", values, base=recipe_name("async_grpo", domain, size), agents=agents)
    a, d, s = ALGORITHMS[algorithm], DOMAINS[domain], SIZES[size]
    paths = [f"- responses_api_agents/prorl_rollout_agent/configs/{name}.yaml" for name in d.environments]
    return _fill(
        "recipe",
        values,
        epochs="100" if a.is_async else "10",
        leave_one_out=_flag(not a.is_dapo),
        overlong_filtering=_flag(a.is_dapo),
        dynamic_sampling=_flag(a.is_dapo),
        batch_multiplier="2" if a.is_dapo else "1",
        skip_reference=_flag(a.kl == "0"),
        is_async=_flag(a.is_async),
        generation_failures="3" if a.is_async else "0",
        kl=a.kl,
        clip_max=a.clip_max,
        clip_c=a.clip_c,
        mini_batch=a.mini_batch,
        mini_batch_note=a.mini_batch_note,
        model=s.model,
        context=str(d.context),
        train_parallel=str(max(s.train_parallel, d.context // 8192)),
        generation_parallel=str(s.generation_parallel),
        colocated=_flag(not a.is_async),
        generation_gpus="null" if not a.is_async else "4" if s.nodes == 1 else "8",
        generation_nodes="null" if not a.is_async else str(max(1, s.nodes // 2)),
        nodes=str(s.nodes),
        config_paths=_lines(6, paths),
        running=str(d.running),
        agents=_lines(4, _agents(a, d)),
    )


def write(folder: Path, combination: Sequence[str]) -> list[Path]:
    """Write a recipe, and what it builds on; return the files."""
    algorithm, *rest = combination
    below = write(folder, ("async_grpo", *rest)) if algorithm == "sc" else []
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{recipe_name(*combination)}.yaml"
    file.write_text(recipe(*combination), encoding="utf-8")
    return [*below, file]


def _names(algorithm: str, domain: str, size: str) -> dict[str, str]:
    environments = ", ".join(f"prorl_{name}" for name in DOMAINS[domain].environments)
    return {
        "name": f"{algorithm} {domain} {size}",
        "title": f"{ALGORITHMS[algorithm].title}, {environments}, {SIZES[size].model}",
        "run": f"{algorithm}-prorl-{domain}-{size}".replace("_", "-"),
        "data": f"data/prorl_{domain}",
    }


def _agents(algorithm: Algorithm, domain: Domain) -> Iterable[str]:
    """Yield the blocks of each environment's agents: one for training rows, one for validation rows."""
    settings = f'{{max_turns: 50, max_tokens: "${{policy.max_total_sequence_length}}"{domain.settings}}}'
    for name in domain.environments:
        yield f"prorl_{name}_agent:"
        yield "  responses_api_agents:"
        yield "    prorl_rollout_agent:"
        yield "      num_generations: ${grpo.num_generations_per_prompt}"
        yield f"      settings: {settings}"
        if algorithm.is_dapo:
            yield "      mask_truncated: true        # as overlong_filtering, which sees full contexts only"
        if algorithm.is_dapo and len(domain.environments) == 1:  # an agent sees no other's groups
            yield '      early_stop: {informative_groups: "${grpo.num_prompts_per_step}", spare: 4, age_seconds: 900}'
        yield f"prorl_{name}_validation_agent:"
        yield "  responses_api_agents:"
        yield "    prorl_rollout_agent:"
        yield "      entrypoint: app.py"
        yield "      resources_server: {type: resources_servers, name: prorl_rollout}"
        yield f"      environment: {name}"
        yield "      evaluation: true"
        yield f"      settings: {settings}"


def _failing_agents(domain: Domain) -> Iterable[str]:
    for name in domain.environments:
        yield f"prorl_{name}_agent: {{responses_api_agents: {{prorl_rollout_agent: {{on_failure: raise}}}}}}"


def _lines(indent: int, lines: Iterable[str]) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _fill(template: str, names: dict[str, str], **values: str) -> str:
    text = (FOLDER / f"{template}.yaml.in").read_text(encoding="utf-8")
    return Placeholders(text).substitute(names, **values)


def main() -> None:
    """Write the recipe that the command line names."""
    parser = argparse.ArgumentParser(description="Write a NeMo-RL recipe.")
    parser.add_argument("algorithm", nargs="?", choices=ALGORITHMS)
    parser.add_argument("domain", nargs="?", choices=DOMAINS)
    parser.add_argument("size", nargs="?", choices=SIZES)
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="folder to write to")
    parser.add_argument("--committed", action="store_true", help="write the recipes of this folder again")
    options = parser.parse_args()
    asked = (options.algorithm, options.domain, options.size)
    if options.committed:
        for combination in COMMITTED:
            write(FOLDER, combination)
    elif None in asked:
        parser.error("name an algorithm, a domain and a size")
    else:
        print(*write(options.output, asked), sep="\n")


if __name__ == "__main__":
    main()
