"""Write ``docs/metrics.md`` out of the families that the code knows: ``python scripts/metrics_page.py``.

The page is committed; a test compares it with what this prints.
"""

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from prorl_gym.api.app import make_serving
from prorl_gym.demand import Demand
from prorl_gym.inference.fake import FakeEngine, Reply
from prorl_gym.inference.pool import EnginePool
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.fake import EmptyBackend, FakePolicySource, ScriptedEnvironment, lookup
from prorl_gym.rollout.memory_ledger import MemoryLedger
from prorl_gym.rollout.retry import RetryConfig
from prorl_gym.rollout.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """# Metrics

What `/metrics` shows, in Prometheus' text form. Written by `scripts/metrics_page.py` from the code. Seconds and bytes
are the units throughout; counters end in `_total`. Labels come from bounded sets: environments that the service knows,
closed lists of words, engines. No id of a run, group or rollout is ever a label.

```yaml
scrape_configs:
  - job_name: prorl-gym
    authorization: {credentials_file: /home/me/.local/state/prorl-gym/token}
    static_configs: [{targets: ["127.0.0.1:8770"]}]
```

`prorl_stage_seconds` is the time in a stage, `prorl_stage_queue_seconds` the wait before it: deadlines are charged for
the former only. The share of time that a stage waits for a slot is
`rate(prorl_stage_queue_seconds_sum[5m]) / rate(prorl_stage_seconds_sum[5m])` by `stage`.

| name | type | labels | meaning |
|---|---|---|---|
"""


async def example() -> str:
    """Return the page of a service that has done a little of everything."""
    runner = InProcessRunner(lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    service = RolloutService(MemoryLedger(), runner, RetryConfig(pause_seconds=0.001))
    await service.start()
    async with EnginePool("policy") as pool:
        pool.add(FakeEngine("policy-0", lambda _: Reply((2,))))
        serving = make_serving(service, sandboxes=lambda: 0)
        serving.load([pool], {}, {}, None)
        await service.set_demand("grouped", Demand(groups=1))
        scripts = [{}, {"run": "sandbox_lost", "flaky": 1, "id": "again"}]
        rows = [RolloutRequest(rollout_id=f"r{i}", environment="scripted", task=row) for i, row in enumerate(scripts)]
        group = {"run_id": "grouped", "group_id": "g", "group_size": 1, "environment": "scripted", "task": {}}
        await service.submit([*rows, RolloutRequest(rollout_id="g0", **group)])
        for name in ("r0", "r1", "g0"):
            await service.result(name, wait=10)
        text = (await serving.metrics.page()).decode()
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
        rows.append(f"| `{name}` | {family.type} | {told} | {family.documentation} |")
    return HEAD + "\n".join(sorted(rows)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
