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
from model import CONTEXT, Cache, Decoder, padded, token_logprobs

SLOTS = 48


@dataclass(slots=True)
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
    slot: Slot | None = None

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
        self._model, self._cache = model, Cache.empty(SLOTS)
        self._slots = [Slot(index) for index in range(SLOTS)]
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls: list[Call] = []
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
        self._orders.put(lambda: self._calls.append(call))

    def abort(self, call: Call) -> None:
        """End a call early with what it has."""
        self._orders.put(lambda: self._end(call, "abort") if call in self._calls else None)

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
            while not (self._closed or (self._calls and self._orders.empty())):
                self._orders.get()()
            if self._closed:
                return
            waiting = [call for call in self._calls if call.slot is None]
            for call in waiting:
                self._place(call)
            running = sorted((call for call in self._calls if call.slot), key=_is_prefill)
            for _, batch in groupby(running, key=_is_prefill):
                self._step(list(batch))

    def _forget(self) -> None:
        for slot in self._slots:
            slot.ids = []

    def _place(self, call: Call) -> None:
        """Give a call the free slot that shares the longest prefix with it; without one it waits."""
        taken = {id(other.slot) for other in self._calls}
        free = [slot for slot in self._slots if id(slot) not in taken]
        if not free:
            return
        shared = {slot.index: _common(slot.ids, call.ids) if slot.salt == call.salt else 0 for slot in free}
        best = max(free, key=lambda slot: (shared[slot.index], -slot.used))
        call.cached = min(shared[best.index], len(call.ids) - 1)  # the last token has to be computed
        best.ids, best.salt, call.slot = best.ids[: call.cached], call.salt, best

    def _step(self, calls: list[Call]) -> None:
        """Compute what the cache lacks of each call, and sample its next token."""
        self._steps += 1
        fresh = [call.ids[len(call.slot.ids) :] for call in calls]
        starts = torch.tensor([len(call.slot.ids) for call in calls])
        ids = padded(fresh)
        positions = (starts[:, None] + torch.arange(ids.shape[1])).clamp(max=CONTEXT)
        slots = torch.tensor([call.slot.index for call in calls])
        logits = self._model(ids, positions, self._cache, slots)
        last = logits[torch.arange(len(calls)), torch.tensor([len(part) - 1 for part in fresh])]
        logprobs = last.log_softmax(-1)
        for call, row in zip(calls, logprobs, strict=True):
            call.slot.ids, call.slot.used = list(call.ids), self._steps
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
        call.finish = finish
        self._calls.remove(call)
        call.result.set_result(call)


def _is_prefill(call: Call) -> bool:
    return len(call.ids) - len(call.slot.ids) > 1


def _common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _started() -> Future[Any]:
    """Return a future that its consumer cannot cancel: the sampler always sets it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
