"""The ``search`` tool: queries a search engine from the host. The agent's sandbox has neither network nor key.

Results are untrusted: they are bounded, and plain text to the model. A search that fails is an observation.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, TypeAdapter, ValidationError

from prorl_gym.agents.protocol import Observation, ToolSpec, arguments_schema
from prorl_gym.contrib.api import ApiClient, ApiConfig, ApiOutage, ApiRefused
from prorl_gym.contrib.tool_text import Secret, printable_text, shorten
from prorl_gym.errors import ConfigError

PROVIDER_VARIABLE = "PRORL_GYM_SEARCH"
"""Environment variable that gives agents a search tool: ``tavily``, or ``corpus:FILE.jsonl``. Not set: none."""

KEY_VARIABLE = "TAVILY_API_KEY"
MAX_RESULTS = 5
MAX_QUERY = 400
_TITLE, _ADDRESS, _TEXT = 200, 300, 1200
"""Characters of a result that are shown."""


class SearchFailed(Exception):
    """The search could not be made; the text is shown to the model and names no address and no key."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    title: str
    text: str
    url: str = ""


_DOCUMENT = TypeAdapter(SearchResult)


class SearchProvider(Protocol):
    async def search(self, query: str, limit: int) -> Sequence[SearchResult]:
        """Return at most ``limit`` results, the best first.

        Raises ``SearchFailed`` (the provider refuses or is down), ``SandboxError`` (its key is refused).
        """
        ...


_SPEC = ToolSpec(
    name="search",
    description=(
        f"Search for reference texts. Returns up to {MAX_RESULTS} results with title, address and an excerpt. They may "
        "be wrong: check them."
    ),
    parameters=arguments_schema(
        {"query": {"type": "string", "description": f"What to look for, up to {MAX_QUERY} characters."}}, "query"
    ),
)


class SearchTool:
    """Implements ``Tool``."""

    spec = _SPEC

    def __init__(self, provider: SearchProvider) -> None:
        self.provider = provider

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        query = " ".join(str(arguments["query"]).split())
        if not query or len(query) > MAX_QUERY:
            return Observation(f"The query must have 1 to {MAX_QUERY} characters.")
        try:
            results = await self.provider.search(query, MAX_RESULTS)
        except SearchFailed as failure:
            return Observation(f"The search failed: {printable_text(str(failure))[:_ADDRESS]}.")
        shown = [_result_text(number, result) for number, result in enumerate(results[:MAX_RESULTS], 1)]
        return Observation("\n\n".join(shown) or "[Nothing was found.]")


def _result_text(number: int, result: SearchResult) -> str:
    title, address = (" ".join(printable_text(text).split()) for text in (result.title, result.url))
    head = f"[{number}] {title[:_TITLE] or 'Without title'}"
    return "\n".join(filter(None, (head, address[:_ADDRESS], shorten(printable_text(result.text).strip(), _TEXT))))


class _TavilyResult(BaseModel):
    title: str = ""
    url: str = ""
    content: str = ""


class _TavilyResponse(BaseModel):
    results: list[_TavilyResult]


class TavilySearch:
    """Implements ``SearchProvider`` on the Tavily API. Raises ``ConfigError`` if there is no key."""

    def __init__(self, url: str = "https://api.tavily.com") -> None:
        if not os.environ.get(KEY_VARIABLE, "").strip():
            raise ConfigError(
                f"{PROVIDER_VARIABLE}=tavily needs the environment variable {KEY_VARIABLE}.", "Export the key."
            )
        self._secret = Secret(KEY_VARIABLE)
        self._api = ApiClient(ApiConfig(url=url, secret=KEY_VARIABLE, answer_bytes=1 << 20, seconds=20.0))

    async def search(self, query: str, limit: int) -> Sequence[SearchResult]:
        try:
            answer = await self._api.post("search", {"query": query, "max_results": limit, "search_depth": "basic"})
            found = _TavilyResponse.model_validate(answer.json())
        except (ApiRefused, ApiOutage) as error:
            raise SearchFailed(self._secret.redact(str(error))) from None
        except ValidationError:
            raise SearchFailed("the answer is not in the form that was expected") from None
        hide = self._secret.redact
        return [SearchResult(hide(one.title), hide(one.content), hide(one.url)) for one in found.results[:limit]]


class CorpusSearch:
    """Implements ``SearchProvider`` on a file, offline and the same every time: for tests and closed sites.

    Ranks by BM25 (Robertson and Zaragoza, 2009) with the usual k1 = 1.2 and b = 0.75; equal scores keep the order of
    the file: JSON lines ``{"title", "text", "url"}``, of which ``url`` may be left out. Raises ``ConfigError`` if it
    cannot be read or a line is not of that form.
    """

    def __init__(self, file: Path) -> None:
        self._documents = list(_documents(file))
        self._counts = [Counter(_words(f"{one.title} {one.text}")) for one in self._documents]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean = sum(self._lengths) / max(1, len(self._lengths)) or 1.0
        holders = Counter(word for counts in self._counts for word in counts)
        total = len(self._documents)
        self._weight = {word: math.log(1 + (total - count + 0.5) / (count + 0.5)) for word, count in holders.items()}

    async def search(self, query: str, limit: int) -> Sequence[SearchResult]:
        words = sorted(set(_words(query)))
        scores: list[float] = []
        for counts, length in zip(self._counts, self._lengths, strict=True):
            damping = 1.2 * (0.25 + 0.75 * length / self._mean)
            held = [word for word in words if counts[word]]
            scores.append(sum(self._weight[word] * counts[word] * 2.2 / (counts[word] + damping) for word in held))
        best = sorted((place for place, score in enumerate(scores) if score > 0), key=lambda place: -scores[place])
        return [self._documents[place] for place in best[:limit]]


def configured_search() -> SearchTool | None:
    """Return the tool over the provider that the service's environment names, or ``None``.

    Raises ``ConfigError`` where it names none that exists, or one that cannot work.
    """
    name = os.environ.get(PROVIDER_VARIABLE, "")
    kind, _, place = name.partition(":")
    if not name:
        return None
    if name == "tavily":
        return SearchTool(TavilySearch())
    if kind == "corpus" and place:
        return SearchTool(CorpusSearch(Path(place)))
    raise ConfigError(f"{PROVIDER_VARIABLE}: '{name[:80]}' is no search provider.", "Known: tavily, corpus:FILE.jsonl.")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _documents(file: Path) -> Iterator[SearchResult]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(f"{file}: cannot be read ({why}).", f"Correct {PROVIDER_VARIABLE}.") from None
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield _DOCUMENT.validate_json(line)
        except ValidationError:
            fix = 'Each line is {"title": text, "text": text, "url": text}.'
            raise ConfigError(f"{file}:{number}: no document.", fix) from None
