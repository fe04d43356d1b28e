"""Write ``docs/metrics.md`` out of the families that the code knows: ``python scripts/metrics_page.py``.

The page is committed; a test compares it with what this prints.
"""

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from prorl_gym import __version__
from prorl_gym.api.app_context import AppContext
from prorl_gym.client.wire_models import MismatchBody
from prorl_gym.demand import Demand
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.records import BatchMismatch, Mismatch, RolloutRequest
from prorl_gym.rollout.nodes.node_runners import NodeRunners, NodesConfig
from prorl_gym.rollout.nodes.wire import JoinBody
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """# Dashboard and metrics

## The dashboard

The service serves it at `/`. It holds no data: while it is visible, it asks the service every five seconds, with the
token.

```bash
prorl-gym dashboard           # prints the address with the token in it
prorl-gym dashboard --open    # and opens it in this machine's browser
ssh -L 8770:127.0.0.1:8770 HOST    # first, when the service listens on another machine's loopback
```

The token follows the `#` of the address, which browsers never send; the page removes it and keeps it for its tab.

![The dashboard: rewards by version, causes of zeros, problems](images/dashboard-light.png)

| to find out | look at |
|---|---|
| whether reward rose | **Reward by policy version**: choose two versions for the change and 1.96 standard errors |
| why rewards are zero | **Why rewards are zero or missing**: a row for each reason; a click filters the rest |
| which problem is never solved | **Problems**, least solved first; "compare" shows the worst and the best rollout |
| what runs, waits or is slow | **Rollouts**, sorted by any column; the tile **Waiting** |
| which engine is sick | the tile **Engines** and their table: state and reason, version, calls, cache |
| groups, mismatch | of a run with a [demand](scheduling.md); the latest [mismatch](trainers.md#checks) |

Filters are part of the address. Rollouts come from the [ledger](ledger.md) and
survive a restart; each figure covers the newest 100,000 finished rollouts of the run. Curves and mismatch begin with
the service.

## The trajectory page

One file that needs neither service nor network: from the list, `prorl-gym show ID --html FILE`,
`GET /v1/rollouts/{id}/page`, or `prorl-gym show-html RESULTS` for a whole Gym results file. It shows the outcome and
its reason, the time of each stage, the conversation, what was graded, and every token, coloured by mask, log-prob or
policy version.

![Tokens coloured by log-prob, the least likely ones the strongest](images/trajectory-light.png)

Model output cannot run on these pages: it travels as JSON without `<`, is inserted as text, and each page's policy
names the hashes of its own program and styles. The dashboard shows a trajectory in a frame without an origin.

## Metrics

`/metrics`, in Prometheus' text form; the table is written by `scripts/metrics_page.py`. Counters end in `_total`, the
rest are gauges. Times are in seconds, sizes in bytes. No id of a run, group or rollout is ever a label.
`prorl_stage_seconds` is the time in a stage, `prorl_stage_queue_seconds` the wait before it, which no deadline
counts.

```yaml
scrape_configs:
  - job_name: prorl-gym
    authorization: {credentials_file: /home/me/.local/state/prorl-gym/token}
    static_configs: [{targets: ["127.0.0.1:8770"]}]
```

|name|labels|meaning|
|---|---|---|
"""


async def example() -> str:
    """Return the page of a service that has done a little of everything."""
    runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    service = RolloutService(MemoryLedger(), runner, RetryConfig(pause_seconds=0.001))
    await service.start()
    async with EnginePool("policy") as pool:
        pool.add_engine(FakeEngine("policy-0", lambda _: Reply((2,))))
        nodes = NodeRunners(NodesConfig(), {}, lambda _: None, lambda *_: False)
        nodes.join("n0", JoinBody(incarnation="1", release=__version__, slots=1, init_slots=1))
        context = AppContext(service, pools=[pool], count_sandboxes=lambda: 0, nodes=nodes)
        figures = Mismatch(1, 0.0, 0.0, 0.0, 1.0, 0)
        batch = BatchMismatch(figures, {0: figures}, {"turn 1": figures}, {"policy-0": figures})
        context.mismatches.add("grouped", MismatchBody(version=0, mismatch=batch))
        await service.set_demand("grouped", Demand(groups=1))
        scripts = [{}, {"run": "sandbox_lost", "flaky": 1, "id": "again"}]
        rows = [RolloutRequest(rollout_id=f"r{i}", environment="scripted", task=row) for i, row in enumerate(scripts)]
        group = {"run_id": "grouped", "group_id": "g", "group_size": 1, "environment": "scripted", "task": {}}
        await service.submit([*rows, RolloutRequest(rollout_id="g0", **group)])
        for name in ("r0", "r1", "g0"):
            await service.result(name, wait=10)
        text = (await context.metrics.render()).decode()
    await service.stop(drain=False)
    return text


def page() -> str:
    """Return the whole page."""
    rows: list[str] = []
    for family in text_string_to_metric_families(asyncio.run(example())):
        if family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        told = ", ".join(f"`{label}`" for label in labels)
        kind = " (histogram)" if family.type == "histogram" else ""
        rows.append(f"|`{name}`|{told}|{family.documentation.rstrip('.')}{kind}|")
    return HEAD + "\n".join(sorted(rows)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
