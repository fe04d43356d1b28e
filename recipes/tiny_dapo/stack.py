"""An engine and a rollout service as child processes, and a policy to start from, for the scripts of this folder."""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from learn import HERE, SERVICE_NICENESS, service_config
from model import TINY, Decoder, Shape
from processes import Process, server
from tasks import Sum, TurnEncoder, write_tokenizer
from warmup import warm_up

from prorl_gym.client import Client, SyncClient, read_token


@dataclass(frozen=True, slots=True)
class Stack:
    """A service that answers, and the engine behind it."""

    engine: str
    """Address of its routes, without ``/v1``."""
    service: str
    token: str
    language: TurnEncoder

    def client(self) -> Client:
        """Return a client of the service."""
        return Client(self.service, token=self.token)

    def sync_client(self) -> SyncClient:
        """Return a client for code without an event loop."""
        return SyncClient(self.service, token=self.token)


@contextmanager
def tiny_engine(work: Path, out: Path) -> Iterator[str]:
    """Run the recipe's own engine, whose tokenizer lies in ``work``."""
    command = [sys.executable, str(HERE / "engine.py"), "--tokenizer", str(work / "tokenizer")]
    with server(Process("engine", command, out / "engine.log")) as url:
        yield url


@contextmanager
def stack(
    command: Path, work: Path, out: Path, engine: str | None = None, *, niceness: int = SERVICE_NICENESS
) -> Iterator[Stack]:
    """Run the service, and the recipe's engine unless there is another one.

    Args:
        command: ``prorl-gym``.
        work: for state and tokenizer.
        out: for logs.
        engine: address of another engine, ending in ``/v1``.
        niceness: of the service.
    """
    language = write_tokenizer(Sum, work / "tokenizer")
    if engine is None:
        with tiny_engine(work, out) as started, stack(command, work, out, started, niceness=niceness) as found:
            yield found
        return
    config = work / "service.yaml"
    settings = service_config(Sum, engine, work / "tokenizer", work / "state")
    settings["settings"] = Sum.limits()  # for trainers whose requests have none
    config.write_text(json.dumps(settings), encoding="utf-8")
    serve = [str(command), "serve", "--config", str(config)]
    with server(Process("service", serve, out / "service.log", niceness)) as url:
        yield Stack(engine.removesuffix("/v1"), url, read_token(work / "state" / "token"), language)


def start_weights(language: TurnEncoder, seed: int, kept: Path, shape: Shape = TINY) -> Decoder:
    """Return the policy that learning starts from; it is warmed up once and then read from ``kept``."""
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(warm_up(Sum, language, seed, shape).model.state_dict(), kept)
    model = Decoder(language.vocab_size, seed, shape).double()
    model.load_state_dict(torch.load(kept, weights_only=True))
    return model


def script_parser(about: str | None, out: Path, *, updates: int, questions: int | None = None) -> ArgumentParser:
    """Return the arguments that the scripts have in common; ``questions`` where they evaluate."""
    parser = ArgumentParser(description=about)
    parser.add_argument("--service", type=Path, required=True, help="the prorl-gym command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=updates)
    if questions is not None:
        parser.add_argument("--questions", type=int, default=questions, help="held-out ones, before and after")
    parser.add_argument("--out", type=Path, default=out, help="logs and figures")
    return parser


def write_report(file: Path, found: Mapping[str, object] | Sequence[object]) -> None:
    """Write figures as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
