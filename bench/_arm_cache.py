"""Runs of simulated arms, made once and remembered. Each is deterministic, so that cores only save time."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

ArmT = TypeVar("ArmT")
ResultT = TypeVar("ResultT")


class ArmCache(Generic[ArmT, ResultT]):
    """The results of arms by arm, one for each seed. ``execute`` must be a function of a module."""

    def __init__(self, execute: Callable[[ArmT], ResultT], seeds_of: Callable[[ArmT], Sequence[int]]) -> None:
        self._execute, self._seeds_of = execute, seeds_of
        self._done: dict[ArmT, list[ResultT]] = {}

    def prepare(self, arms: Sequence[ArmT]) -> None:
        """Run what is not there yet, all seeds of all arms on all cores."""
        new: list[Any] = [arm for arm in dict.fromkeys(arms) if arm not in self._done]
        jobs = [replace(arm, seed=seed) for arm in new for seed in self._seeds_of(arm)]
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as workers:
            results = iter(list(workers.map(self._execute, jobs)))
        for arm in new:
            self._done[arm] = list(islice(results, len(self._seeds_of(arm))))

    def __getitem__(self, arm: ArmT) -> list[ResultT]:
        return self._done[arm]
