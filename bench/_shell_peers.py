"""Everything that the shell bench's figures stand beside, measured in the same run."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from tempfile import TemporaryDirectory

import _apptainer
import _mix
import _peers
from _report import Peer, peer

FLOOR = "raw pty, blocking calls, no sandbox (floor)"
_GYM, _SWEREX = "NeMo Gym's apptainer provider", "SWE-ReX session, host"
_GYM_TIMES, _SWEREX_TIMES = 200.0, 300.0
"""How many times faster ``echo hi`` shall be."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """How often what is done. Peers that take a tenth of a second and more are asked less often."""

    fast: int = 1000
    slow: int = 30
    polled: int = 12
    rounds: int = 5
    bulk: int = 10


@dataclass(frozen=True, slots=True)
class Peers:
    """Peers of ``echo hi``, of the mix (mean ms), and of a megabyte of output."""

    echo: list[Peer] = field(default_factory=list[Peer])
    mix: list[Peer] = field(default_factory=list[Peer])
    bulk: list[Peer] = field(default_factory=list[Peer])

    def add(self, name: str, echo: Sequence[float], mix: Sequence[float], bulk: Sequence[float] = ()) -> None:
        """Take a peer's times; what it was not asked is left out."""
        wanted = {_GYM: _GYM_TIMES, _SWEREX: _SWEREX_TIMES}.get(name)
        if echo:
            self.echo.append(peer(name, echo, target=wanted))
        if mix:
            self.mix.append(peer(name, [mean(mix)]))
        if bulk:
            self.bulk.append(peer(name, bulk))


Run = Callable[[Sequence[str]], list[float] | None]


def measure(image: str | None, sif: str | None, megabyte: str, counts: Repetitions, *, pytest: bool) -> Peers:
    """Measure every peer that is here.

    Args:
        image: directory of the image that the sandboxes have, for its pytest.
        sif: the same image, for peers that take no directory.
        megabyte: command with that much output.
        counts: how often.
        pytest: whether the mix has it.
    """
    env, found = _peers.environment(image), Peers()

    def on_host(name: str, run: Run, echoes: int, rounds: int, bulk: int) -> None:
        with TemporaryDirectory(prefix="mix-") as root:
            echo = run(["echo hi"] * (echoes + 1))
            actions = run([_mix.setup(root), *(list(_mix.actions(root, pytest=pytest)) * rounds)])
            output = run([megabyte] * (bulk + 1)) if bulk else []
        found.add(name, (echo or [])[1:], (actions or [])[1:], (output or [])[1:])  # the first one warms up

    on_host(FLOOR, lambda commands: _peers.raw_pty(commands, env), counts.fast, counts.rounds, counts.bulk)
    found.echo.append(peer("fork and exec of /bin/true (floor)", _peers.fork_exec(max(10, counts.fast // 4))))
    if sif:
        echoes, bulk = ["echo hi"] * counts.slow, [megabyte] * max(2, counts.bulk // 2)
        root = f"{_apptainer.GYM_DIRECTORY}/mix"
        mix = list(_mix.actions(root, pytest=pytest)) * counts.rounds
        if measured := _apptainer.gym(sif, _mix.setup(root), [*echoes, *mix, *bulk]):
            times, actions = measured.times, len(echoes) + len(mix)
            found.add(_GYM, times[: len(echoes)], times[len(echoes) : actions], times[actions:])
    if os.environ.get("PRORL_BENCH_SWEREX"):
        rex_bulk = max(2, counts.bulk // 2)
        on_host(_SWEREX, lambda commands: _peers.swerex(commands, env), counts.slow, counts.rounds, rex_bulk)
    for polling, echoes, rounds in ((_peers.OPENHANDS, counts.polled, 2), (_peers.EAGER, counts.slow, counts.rounds)):
        on_host(polling.name, lambda commands, polling=polling: _peers.tmux(commands, polling, env), echoes, rounds, 0)
    return found
