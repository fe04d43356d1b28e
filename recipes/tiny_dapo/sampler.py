"""Batched sampling with a KV cache, prefix reuse, and weights that are exchanged between two steps."""

import os
import queue
import threading
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from random import Random
from typing import Any

import torch
from model import Cache, CachePositions, Decoder, padded, token_logprobs

SLOTS = 48


@dataclass(slots=True, eq=False)
class Slot:
    """A row of the KV cache, and what it holds."""

    index: int
    ids: list[int] = field(default_factory=list)
    salt: str | None = None
    used: int = 0


@dataclass(slots=True, eq=False)
class Call:
    """One completion under way."""

    ids: list[int]
    """Prompt, then what is sampled."""
    max_tokens: int
    stops: frozenset[int]
    temperature: float
    random: Random
    salt: str | None = None
    result: Future["Call"] = field(default_factory=lambda: _started())
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    cached: int = 0

    @property
    def sampled(self) -> list[int]:
        """What was sampled until now."""
        return self.ids[len(self.ids) - len(self.logprobs) :]


class Sampler:
    """Samples calls in batches, in a thread of its own.

    Between two steps it takes new calls, aborts and weights, so that each token has one version.

    Args:
        model: the decoder; nothing else may use it.
    """

    def __init__(self, model: Decoder) -> None:
        self._model, self._cache = model, Cache(SLOTS, model)
        self._slots = [Slot(index) for index in range(SLOTS)]
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: list[Call] = []
        self._running: dict[Call, Slot] = {}
        self._version, self._steps = 0, 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._do(lambda: setattr(self, "_closed", True)).result()
        self._thread.join()

    def submit(self, call: Call) -> None:
        """Start a call; its ``result`` is set at its end."""
        self._orders.put(lambda: self._waiting.append(call))

    def abort(self, call: Call) -> None:
        """End a call early with what it has."""
        self._orders.put(lambda: self._end(call, "abort"))

    def load(self, weights: dict[str, torch.Tensor], version: int) -> Future[None]:
        """Exchange the weights and forget what was computed with the old ones, also for calls under way."""

        def exchange() -> None:
            self._model.load_state_dict(weights)
            self._version = version
            self._forget()

        return self._do(exchange)

    def reset(self) -> Future[None]:
        """Forget what calls have computed."""
        return self._do(self._forget)

    def score(self, ids: list[int]) -> Future[list[float]]:
        """Return the log-prob of each id but the first, computed without the cache."""
        return self._do(lambda: token_logprobs(self._model, torch.tensor([ids]))[0, 1:].tolist())

    def _do(self, work: Any) -> Future[Any]:
        done = _started()

        def order() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._orders.put(order)
        return done

    def _run(self) -> None:
        try:
            self._sample()
        except BaseException:  # an engine that answers and never samples again would be worse than none
            traceback.print_exc()
            os._exit(1)

    @torch.inference_mode()
    def _sample(self) -> None:
        while True:
            while not (self._closed or ((self._waiting or self._running) and self._orders.empty())):
                self._orders.get()()
            if self._closed:
                return
            free = [slot for slot in self._slots if slot not in self._running.values()]
            while self._waiting and free:
                call = self._waiting.pop(0)
                self._running[call] = slot = self._reuse(call, free)
                free.remove(slot)
            for _, batch in groupby(sorted(self._running.items(), key=_is_prefill), key=_is_prefill):
                self._step(dict(batch))

    def _forget(self) -> None:
        for slot in self._slots:
            slot.ids = []

    def _reuse(self, call: Call, free: list[Slot]) -> Slot:
        """Return the free slot that shares the longest prefix with a call, cut down to that prefix."""
        shared = {slot: _common(slot.ids, call.ids) if slot.salt == call.salt else 0 for slot in free}
        best = max(free, key=lambda slot: (shared[slot], -slot.used))
        call.cached = min(shared[best], len(call.ids) - 1)  # the last token has to be computed
        best.ids, best.salt = best.ids[: call.cached], call.salt
        return best

    def _step(self, calls: dict[Call, Slot]) -> None:
        """Compute what the cache lacks of each call, and sample its next token."""
        self._steps += 1
        fresh = [call.ids[len(slot.ids) :] for call, slot in calls.items()]
        ids = padded(fresh)
        starts = torch.tensor([len(slot.ids) for slot in calls.values()])
        slots = torch.tensor([slot.index for slot in calls.values()])
        logits = self._model(ids, CachePositions(self._cache, slots, starts, ids.shape[1]))
        last = logits[torch.arange(len(calls)), torch.tensor([len(part) - 1 for part in fresh])]
        logprobs = last.log_softmax(-1)
        for (call, slot), row in zip(calls.items(), logprobs, strict=True):
            slot.ids, slot.used = list(call.ids), self._steps
            token = self._choose(call, row)
            call.ids.append(token)
            call.logprobs.append(float(row[token]))
            call.versions.append(self._version)
            if token in call.stops:
                self._end(call, "stop")
            elif len(call.logprobs) == call.max_tokens:
                self._end(call, "length")

    @staticmethod
    def _choose(call: Call, logprobs: torch.Tensor) -> int:
        if call.temperature == 0:
            return int(logprobs.argmax())
        weights = (logprobs.double() / call.temperature).softmax(-1).cumsum(-1)
        return min(int(torch.searchsorted(weights, call.random.random() * weights[-1])), len(weights) - 1)

    def _end(self, call: Call, finish: str) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
        elif self._running.pop(call, None) is None:
            return  # it has ended before it was aborted
        call.finish = finish
        call.result.set_result(call)


def _is_prefill(running: tuple[Call, Slot]) -> bool:
    """Whether more than the last token has to be computed: such calls are batched apart, since rows are padded."""
    call, slot = running
    return len(call.ids) - len(slot.ids) > 1


def _common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _started() -> Future[Any]:
    """Return a future that its consumer cannot cancel: the sampler always sets it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
