"""Which engine serves which call, and when: policies by name, membership, health, admission and failover of a pool.

In the service's process. May import ``inference.protocol``.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from prorl_gym.inference.balance.cost_policy import CostPolicy
from prorl_gym.inference.balance.simple_policies import (
    LeastOutstanding,
    MinHeap,
    PublishedHeap,
    RoundRobin,
    StickyLeastOutstanding,
)
from prorl_gym.inference.protocol import BalancePolicy

BalancePolicyName = Literal["cost", "sticky", "least_outstanding", "min_heap", "round_robin", "published"]

_POLICIES: Mapping[BalancePolicyName, Callable[[], BalancePolicy]] = {
    "cost": CostPolicy,
    "sticky": StickyLeastOutstanding,
    "least_outstanding": LeastOutstanding,
    "min_heap": MinHeap,
    "round_robin": RoundRobin,
    "published": PublishedHeap,
}


def make_balance_policy(name: BalancePolicyName) -> BalancePolicy:
    return _POLICIES[name]()
