"""The bound: a placement made by one who knows every session's turns before the first has begun.

No policy can know them, so nothing that is served online is expected to reach it. Sessions start in the trace's order
under the same kind of cap. They are placed greedily by the work that engines will still have to do (known exactly),
the placement is improved by moving sessions from the engine that ends last, each move kept when a whole replay of the
trace gets shorter, and the best over all caps counts. A true optimum may be better still; what is found is a placement
that really exists, on the same engines.
"""

from collections.abc import Sequence

from _sim_workload import Session, Trace
from balance_sim import Arm, Clock, Incidents, Result, replay

from prorl_gym.inference.protocol import CallOutcome, GenerationRequest
from prorl_gym.records import EngineLoad
from prorl_gym.testing.inference.simulated_engine import Hardware


class FixedPlacement:
    """A policy that places every session where it was told to."""

    def __init__(self, homes: dict[str, str]) -> None:
        self._homes = homes

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Look it up."""
        return self._homes[request.session_id]

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        """Nothing was reserved."""

    def forget_session(self, session_id: str) -> None:
        """Nothing is remembered."""

    def invalidate_cache(self, engine: str) -> None:
        """Nothing is believed."""

    def observe_load(self, engine: str, load: EngineLoad) -> None:
        """Nothing is learnt."""


class LeastRemainingWork:
    """Places each session, when it begins, on the engine with the least work left; work is known exactly."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.homes: dict[str, str] = {}
        self._work = {session.id: work(session, trace, hardware) for session in trace.sessions}
        self._turns = {session.id: len(session.turns) for session in trace.sessions}
        self._left: dict[str, float] = {}

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick the one that would be done first."""
        session = request.session_id
        if session not in self.homes:
            self.homes[session] = min(healthy, key=lambda name: self._left.get(name, 0.0))
            home = self.homes[session]
            self._left[home] = self._left.get(home, 0.0) + self._work[session]
        return self.homes[session]

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        """One turn less to do."""
        self._left[engine] -= self._work[request.session_id] / self._turns[request.session_id]

    def forget_session(self, session_id: str) -> None:
        """Nothing is left of it."""

    def invalidate_cache(self, engine: str) -> None:
        """Nothing is believed."""

    def observe_load(self, engine: str, load: EngineLoad) -> None:
        """Nothing is learnt."""


def work(session: Session, trace: Trace, hardware: Hardware) -> float:
    """Seconds of an engine that a session costs, in a batch of a common size."""
    context, seconds = trace.prompt_tokens, 0.0
    for turn in session.turns:
        seconds += turn.output * (hardware.step_base / 12 + hardware.step_per_call + hardware.step_per_token * context)
        seconds += turn.observation / hardware.prefill_rate
        context += turn.output + turn.observation
    return seconds


def clairvoyant(
    trace: Trace, hardware: Hardware, engines: int, caps: Sequence[int], moves: int, incidents: Incidents | None = None
) -> Result:
    """Return the best run that was found; ``moves`` replays are spent on improving it."""
    best: tuple[Result, LeastRemainingWork, int] | None = None
    for cap in caps:
        foresight = LeastRemainingWork(trace, hardware)
        result = replay(trace, hardware, engines, Arm(lambda clock, one=foresight: one, cap), incidents)
        if best is None or result.makespan < best[0].makespan:
            best = (result, foresight, cap)
    assert best is not None
    result, foresight, cap = best
    homes = foresight.homes
    ranked = sorted(trace.sessions, key=lambda session: -work(session, trace, hardware))
    for number in range(moves):
        last = max(result.busy, key=result.busy.__getitem__)
        first = min(result.busy, key=result.busy.__getitem__)
        there = [session.id for session in ranked if homes[session.id] == last]
        trial = homes | {there[(number * 7) % len(there)]: first}
        tried = replay(trace, hardware, engines, Arm(_fixed(trial), cap), incidents)
        if tried.makespan < result.makespan:
            homes, result = trial, tried
    return result


def _fixed(homes: dict[str, str]):
    def make(clock: Clock) -> FixedPlacement:
        return FixedPlacement(homes)

    return make
