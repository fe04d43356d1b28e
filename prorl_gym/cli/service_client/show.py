"""Finished rollouts as text, files and pages: ``show``, ``export``, ``show-html``, ``predictions``, ``dashboard``."""

import json
import os
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import typer

from prorl_gym.cli.service_client.service_connection import (
    LOCAL_URL,
    RunOption,
    UrlOption,
    atomic_file,
    connect,
    find_rollout,
    printable,
    rollout_summary,
)
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.records import Rollout

Format = Literal["jsonl", "sft", "tokens"]
MaskKey = Literal["train", "weight"]
_MAX_SHOWN = 4000
"""Characters of one text that ``show`` prints."""
_URL_HELP = "Address of the service. Its token is found as by `prorl-gym submit`."


def show(
    rollout_id: Annotated[
        str, typer.Argument(help="Id of the rollout, or a unique prefix of the id of a finished one.")
    ],
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it is finished.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--full", help="The whole record as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the rollout, token by token, as one HTML page.")
    ] = None,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Show how a rollout ended, its row, what was graded, and why the reward is not 1.

    Exit code 1: it is not finished.
    """
    with connect(url) as client:
        rollout_id = find_rollout(client, rollout_id)
        try:
            rollout = client.result(rollout_id, wait) if wait else client.poll_result(rollout_id)
        except TimeoutError:
            rollout = None
        if rollout is None:
            typer.echo(f"{rollout_id} is not finished")
            raise typer.Exit(1)
        if html is not None:
            page = client.page(rollout_id)
            with atomic_file(html) as draft:
                draft.write_text(page, encoding="utf-8")
    if html is not None:
        typer.echo(str(html))
    else:
        typer.echo(rollout.model_dump_json(indent=2) if as_json else rollout_report(rollout))


def rollout_report(rollout: "Rollout") -> str:
    """Return the summary, followed by the row, the reason and what was graded."""
    score, submission = rollout.score, rollout.submission
    message = " ".join(rollout.outcome.message.split())
    texts = {
        "row": f"{rollout.row_id} ({rollout.row_source})" if rollout.row_source else rollout.row_id,
        "why": "" if rollout.why == message else rollout.why,
        "expected": "" if score is None else score.expected or "",
        submission.kind if submission is not None else "": "" if submission is None else submission.text,
        "report": "" if score is None else score.report,
    }
    lines = [f"    {printable(name)}: {_indented(text)}" for name, text in texts.items() if text]
    return "\n".join([rollout_summary(rollout), *lines])


def _indented(text: str) -> str:
    """Return a text for the terminal: one of several lines begins on a line of its own; a long one is cut."""
    shown = printable(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}\n[... --full shows all]")
    return "".join(f"\n        {line}" for line in shown.splitlines()) if "\n" in shown.strip() else shown.strip()


def rejection_reason(rollout: "Rollout", form: Format, min_reward: float | None, include_overlong: bool) -> str:
    """Return why an export leaves a rollout out; empty if it does not."""
    if min_reward is not None and (rollout.reward is None or rollout.reward < min_reward):
        return "reward too low" if rollout.reward is not None else "no reward"
    if form == "jsonl":
        return ""
    if rollout.reward is None:
        return "no reward"
    if not include_overlong and rollout.outcome.status == "truncated":
        return "truncated"
    return "masked" if rollout.masked and not include_overlong else ""


def export(
    output: Annotated[Path, typer.Option("--out", "-o", help="File to write; it appears once it is complete.")],
    run: RunOption = "default",
    form: Annotated[
        Format,
        typer.Option("--format", help="jsonl: records; sft: chats, a mark per message; tokens: a line per segment."),
    ] = "jsonl",
    min_reward: Annotated[float | None, typer.Option(help="Leave out rollouts with a lower reward, or none.")] = None,
    overlong: Annotated[
        bool,
        typer.Option("--overlong", help="sft, tokens: include rollouts that a limit cut short or that are masked."),
    ] = False,
    mask_key: Annotated[
        MaskKey, typer.Option(help='sft: a message\'s mark as "train": true/false or as "weight": 1/0.')
    ] = "train",
    cursor: Annotated[int, typer.Option(min=0, help="Only records after this cursor.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file when it exists.")] = False,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Export the finished rollouts of a run.

    Prints how many were written and left out, and the cursor from which the next export continues. Exit code 1: no
    rollout, and therefore no file, was written.
    """
    from prorl_gym.trainers.sampled_turns import to_chat

    if output.exists() and not force:
        raise ConfigError(f"{output} exists.", "Take another --out, or --force to replace it.")
    serializers: dict[Format, Callable[[Rollout], Iterable[dict[str, Any]]]] = {
        "jsonl": lambda rollout: [rollout.model_dump(mode="json")],
        "sft": lambda rollout: [to_chat(rollout, mask_key)],
        "tokens": _segment_lines,
    }
    counts = Counter[str]()
    with atomic_file(output) as draft, connect(url, survive_restarts=True) as client:
        with draft.open("w", encoding="utf-8") as file:
            for one in client.stream(run, cursor, follow=False):
                cursor = one.cursor
                reason = rejection_reason(one.rollout, form, min_reward, overlong)
                counts[reason] += 1
                if not reason:
                    file.writelines(json.dumps(line) + "\n" for line in serializers[form](one.rollout))
        written = counts.pop("", 0)
        if not written:
            draft.unlink()
    kept = f"{written} of {written + counts.total()} rollouts of run {run} written"
    out_of = ", ".join(f"{count} left out: {reason}" for reason, count in counts.most_common())
    typer.echo(f"{kept}{f' ({out_of})' if out_of else ''}; go on with --cursor {cursor}", err=True)
    if not written:
        raise typer.Exit(1)


def _segment_lines(rollout: "Rollout") -> "Iterable[dict[str, Any]]":
    """Yield the segments of a rollout, each with the facts that a trainer needs with it."""
    about = rollout.model_dump(
        mode="json",
        include={"rollout_id", "run_id", "group_id", "group_size", "replica", "environment", "stands_in_for"},
    )
    for index, segment in enumerate(rollout.segments):
        yield {
            **about,
            "reward": rollout.reward,
            "masked": rollout.masked,
            "segment": index,
            "segments": len(rollout.segments),
            **segment.model_dump(mode="json", exclude={"generations"}),
        }


def read_results(path: Path) -> list[Mapping[str, Any]]:
    """Read a results file. Raises ``ConfigError`` if it is missing, or a line is not the JSON object of a result."""
    from prorl_gym.environments.row_format import read_json_lines

    results: list[Mapping[str, Any]] = []
    for where, line in read_json_lines(path):
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: not a JSON object.", "Give a results file of `gym eval run`.")
        if "response" not in row or "reward" not in row:
            raise ConfigError(
                f"{where}: not a result ('response' and 'reward' are missing).",
                "Give a results file of `gym eval run`, not its input or another of its outputs.",
            )
        results.append(row)  # pyright: ignore[reportUnknownArgumentType]
    if not results:
        raise ConfigError(f"{path}: holds no results.", "Give a results file of `gym eval run`.")
    return results


def write_page(results: Path, tokenizer: str, page: Path) -> None:
    from prorl_gym.inference.tokens.template_check import load_codec
    from prorl_gym.pages.gym_results_page import render_gym_results

    page.write_text(render_gym_results(read_results(results), load_codec(tokenizer).decode), encoding="utf-8")


def show_html(
    results: Annotated[Path, typer.Argument(help="Results file of `gym eval run`.")],
    tokenizer: Annotated[str, typer.Option(help="`small`, a tokenizer directory, or a model name.")] = "small",
    output: Annotated[
        Path | None, typer.Option(help="Page to write; next to the results by default.", show_default=False)
    ] = None,
) -> None:
    """Write one self-contained HTML page with every rollout, token by token."""
    page = output or results.with_suffix(".html")
    write_page(results, tokenizer, page)
    typer.echo(str(page))


def predictions(
    results: Annotated[Path, typer.Argument(help="Results file of `gym eval run` with rows of SWE-bench.")],
    model: Annotated[str, typer.Option(help="Name of the model in the predictions.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("predictions.jsonl"),
    repeat: Annotated[int, typer.Option(min=0, help="Which sample of each row, from 0.")] = 0,
) -> None:
    """Write the patches of an evaluation as SWE-bench's own harness reads them.

    The patch is what was graded: without changes to tests and binary files. Exit code 1: rows are missing because
    infrastructure failed them.
    """
    samples = [
        row
        for row in read_results(results)
        if row.get("environment") == "swe" and row.get("_ng_rollout_index", 0) == repeat
    ]
    if not samples:
        raise ConfigError(f"{results}: holds no sample {repeat} of a swe row.", "Give another file or --repeat.")
    measured = [row for row in samples if row.get("prorl_git_patch") is not None or not row.get("mask_sample")]
    with atomic_file(output) as draft, draft.open("w", encoding="utf-8") as file:
        for row in measured:
            task = row["task"]
            patch = row.get("prorl_git_patch") or ""  # none could be taken: unresolved, as an empty one
            prediction = {"instance_id": task.get("instance_id") or task["id"], "model_name_or_path": model}
            file.write(json.dumps(prediction | {"model_patch": patch}) + "\n")
    typer.echo(f"{len(measured)} predictions are in {output}.")
    if missing := len(samples) - len(measured):
        typer.echo(f"{missing} rows are missing: infrastructure failed them. Evaluate these again.", err=True)
        raise typer.Exit(1)


def dashboard(
    url: Annotated[str, typer.Option(envvar="PRORL_GYM_URL", help=_URL_HELP)] = LOCAL_URL,
    open_browser: Annotated[bool, typer.Option("--open", help="Also open it in this machine's browser.")] = False,
) -> None:
    """Print the dashboard's address, which contains the token. Keep it secret: it gives access to the service.

    The token follows a '#', and browsers do not send that part over the network. If the service listens on another
    machine's loopback, forward the port first: ssh -L 8770:127.0.0.1:8770 HOST. Exit code 1: no browser was found.
    """
    from prorl_gym.client.service_credentials import default_state_dir, read_token, service_url

    address = f"{service_url(url)}/#token={quote(read_token(), safe='')}"
    typer.echo(address)
    if open_browser and not webbrowser.open(
        _write_redirect_page(default_state_dir() / "dashboard.html", address).as_uri()
    ):
        typer.echo("no browser was found: open the address by hand", err=True)
        raise typer.Exit(1)


def _write_redirect_page(file: Path, address: str) -> Path:
    """Write a page that redirects to an address, readable by its owner only: all users see a browser's arguments."""
    page = f'<!doctype html><title>prorl-gym</title><meta http-equiv="refresh" content="0; url={escape(address)}">\n'
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror}).", "Open the address by hand, or set XDG_STATE_HOME."
        ) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(page)
    return file
