"""The benchmarks of ``gym_root/benchmarks``: which data set each is made of, and where its rows are written.

The data sets come from the Hugging Face hub by the ``datasets`` library, which NeMo Gym brings, or from files of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from prorl_gym.data.pipeline import LocatedRow, json_compatible, read_dataset
from prorl_gym.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Benchmark:
    environment: str
    form: str
    """Name of the converter."""
    repository: str
    """Name of the data set on the hub."""
    split: str
    subset: str | None = None
    revision: str | None = None
    size: int | None = None
    """Rows as published; ``None`` where a window selects them."""
    selects: Callable[[Mapping[str, Any]], bool] = lambda row: True
    """Whether a row of the data set belongs to the benchmark."""


BENCHMARKS: Mapping[str, Benchmark] = {
    "prorl_aime25": Benchmark("math", "deepscaler", "MathArena/aime_2025", "train", size=30),
    "prorl_gpqa_diamond": Benchmark("stem", "gpqa", "Idavidrein/gpqa", "train", "gpqa_diamond", size=198),
    "prorl_livecodebench": Benchmark(
        "code",
        "livecodebench",
        "livecodebench/code_generation_lite",
        "test",
        "release_v6",
        revision="refs/pr/7",  # the same rows without a loading script, which `datasets` no longer runs
        # The window of NeMo Gym's own v6 configuration.
        selects=lambda row: "2024-08-01" <= str(row.get("contest_date", "")) < "2025-06-01",
    ),
    "prorl_swebench_verified": Benchmark("swe", "swebench", "princeton-nlp/SWE-bench_Verified", "test", size=500),
}


def benchmark_file(name: str) -> Path:
    """Return where NeMo Gym reads a benchmark's rows, relative to the working directory."""
    return Path("benchmarks", name, "data", f"{name}.jsonl")


def read_benchmark(benchmark: Benchmark, inputs: Sequence[Path]) -> Iterator[LocatedRow]:
    """Yield the rows of a benchmark from files of its data set, or without files from the hub.

    Raises ``ConfigError`` if the data set cannot be read.
    """
    located = chain.from_iterable(map(read_dataset, inputs)) if inputs else _download(benchmark)
    return ((where, row) for where, row in located if benchmark.selects(row))


def _download(benchmark: Benchmark) -> Iterator[LocatedRow]:
    """Yield the rows of a data set on the hub; its client takes a token from ``HF_TOKEN`` or a login."""
    try:
        datasets: Any = import_module("datasets")  # untyped, and slow to import
    except ImportError:
        raise ConfigError(
            f"{benchmark.repository}: downloading needs the package `datasets`.",
            "Install it: pip install datasets. Or download the files elsewhere and name them.",
        ) from None
    try:
        rows: Any = datasets.load_dataset(
            benchmark.repository, benchmark.subset, split=benchmark.split, revision=benchmark.revision
        )
    except Exception as error:  # of requests, httpx, pyarrow, the hub's client: no common base
        raise ConfigError(
            f"{benchmark.repository}: cannot be loaded ({type(error).__name__}: {str(error)[:300]}).",
            "Accept its terms on huggingface.co and set HF_TOKEN, or download the files elsewhere and name them.",
        ) from None
    for number, row in enumerate(rows, 1):
        yield f"{benchmark.repository}[{number}]", {key: json_compatible(value) for key, value in row.items()}
