"""``prorl-gym demo``: roll out four environments through NeMo Gym and write a page of the results."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer


def demo(
    base_url: Annotated[str, typer.Option(help="A vLLM server's /v1 address; oracle engines when omitted.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model on that server.")] = "",
    tokenizer: Annotated[
        str, typer.Option(help="That model's tokenizer: a directory or a hub name. Default: the model's name.")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts of each row.")] = 4,
    output: Annotated[Path, typer.Option(help="Directory of the results, logs and page.")] = Path("outputs"),
) -> None:
    """Roll out the example rows of four environments through NeMo Gym and show the results."""
    from prorl_gym.cli.demo.run import DemoOptions, run

    if bool(base_url) != bool(model):
        raise typer.BadParameter("--base-url and --model (make: BASE_URL and MODEL) come together")
    options = DemoOptions(base_url, model, tokenizer or model, repeats, output)
    raise typer.Exit(asyncio.run(_interruptible(run(options))))


async def _interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end; the first SIGINT or SIGTERM cancels it, further ones do not interrupt the clean-up."""
    task = asyncio.ensure_future(work)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            print("\ndemo: stopping everything ...", file=sys.stderr)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        print("demo: interrupted", file=sys.stderr)
        return 130
