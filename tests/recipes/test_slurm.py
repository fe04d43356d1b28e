"""``recipes/slurm`` on a real Slurm, as a normal user: jobs that are requeued, reach their time limit, are cancelled.

``.ci/slurm`` makes such a cluster. On a cluster of one's own, the directory for temporary files has to be shared.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from killed_service import ENGINE, example_requests, started

from prorl_gym.client import SyncClient, read_token
from prorl_gym.records import Rollout, RolloutRequest

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes/slurm"
CACHE = Path(os.environ.get("PRORL_GYM_CACHE", ""))
IMAGE = CACHE / f"images/bookworm-{os.geteuid()}"
SMALL = ["--cpus-per-task=2", "--mem=500"]
PATIENCE = 300
"""Seconds that a state may take on a machine that is busy with other things."""


@pytest.fixture
def engine() -> Iterator[str]:
    with started(["engine", "oracle", "--port", "0", "--seed", "3"], ENGINE) as (_, url):
        yield url


@pytest.fixture
def directory(tmp_path: Path, engine: str) -> Path:
    """The directory of a job, with its configuration."""
    tmp_path.chmod(0o700)
    config = {
        "inference": {"engines": [engine], "model": "oracle", "tokenizer": "small"},
        "http": {"host": "0.0.0.0", "stop_seconds": 60},
        "state": ".",
        "ledger": {"path": "ledger.sqlite", "allow_network_filesystem": True},
        "nodes": {"lease_seconds": 10},
        "retry": {"restarts": 10},
        "sandbox": {"backend": "apptainer", "image": str(IMAGE)} if IMAGE.exists() else {"backend": "userns"},
        "runner": {"queue": 2, "init": 2, "run": 4, "eval": 2},
    }
    (tmp_path / "service.yaml").write_text(json.dumps(config))
    return tmp_path


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def submit_job(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Submit jobs with this package; cancel them at the end."""
    jobs = list[str]()

    def submit(*arguments: str) -> str:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={tmp_path}/job.log", *SMALL, *arguments]
        jobs.append(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.strip()
        )
        return jobs[-1]

    yield submit
    for job in jobs:
        slurm("scancel", job)
        wait_for(lambda job=job: state(job) in ("CANCELLED", "COMPLETED", "FAILED"))
    print((tmp_path / "job.log").read_text())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, slurm("scontrol", "show", "job")
        time.sleep(0.1)


def fact(job: str, name: str) -> str:
    found = re.search(rf"{name}=(\S+)", slurm("scontrol", "show", "job", job))
    assert found is not None
    return found[1]


def state(job: str) -> str:
    return fact(job, "JobState")


def connect(directory: Path) -> SyncClient:
    """Connect to the service that runs now."""
    url = directory / "url"
    wait_for(url.exists)
    return SyncClient(url.read_text().strip(), token=read_token(directory / "token"))


def node_count(client: SyncClient) -> int:
    nodes = client.status().nodes
    assert nodes is not None
    return len(nodes.nodes)


def groups(prefix: str, count: int, size: int) -> list[RolloutRequest]:
    rows = example_requests(1)
    return [
        rows[number % len(rows)].model_copy(
            update={
                "rollout_id": f"{prefix}{number}-{replica}",
                "group_id": f"{prefix}{number}",
                "group_size": size,
                "replica": replica,
            }
        )
        for number in range(count)
        for replica in range(size)
    ]


def records(directory: Path) -> list[Rollout]:
    with connect(directory) as client:
        return [one.rollout for one in client.stream(follow=False)]


def scratch_of(job: str) -> list[Path]:
    return list(Path("/tmp").glob(f"prorl-{job}-*"))


def processes_that_name(text: str) -> list[str]:
    found = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            seen = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in seen:
            found.append((process / "cmdline").read_text())
    return found


def test_a_service_that_is_requeued_ends_every_rollout_once(directory: Path, submit_job: Callable[..., str]) -> None:
    job = submit_job("--nodes=3", str(RECIPES / "service.sbatch"), str(directory))
    wanted = groups("a", count=32, size=8)
    assert len(wanted) == 256
    with connect(directory) as client:
        client.submit(wanted)
        wait_for(lambda: node_count(client) == 3)
        wait_for(lambda: client.status().ledger.kept >= 60)
    before = {one.rollout_id: one for one in records(directory)}
    assert 60 <= len(before) < 200, "requeued in the middle"
    slurm("scontrol", "requeuehold", job)  # held: what it leaves can be looked for before it starts again
    wait_for(lambda: fact(job, "Restarts") == "1" and state(job) == "PENDING")
    wait_for(lambda: not scratch_of(job) and not processes_that_name(f"prorl-{job}-"))
    slurm("scontrol", "release", job)
    wait_for(lambda: state(job) == "RUNNING")

    with connect(directory) as client:
        ended = {one.rollout_id: client.result(one.rollout_id, timeout=PATIENCE) for one in wanted}
    assert {one.outcome.status for one in ended.values()} == {"completed"}
    assert {one.reward for one in ended.values()} == {1.0}, "the oracle plays gold"
    assert {name: ended[name] for name in before} == before, "what was finished is not made again"
    assert any(one.retries for one in ended.values()), "the requeue cut attempts off"
    assert Counter(one.rollout_id for one in records(directory)) == Counter(one.rollout_id for one in wanted)

    # The time limit is near: what is in hand is finished, and what is queued waits for the next run of the job.
    late = groups("b", count=8, size=8)
    with connect(directory) as client:
        client.submit(late)
        wait_for(lambda: client.status().ledger.kept > len(wanted))
    slurm("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: fact(job, "Restarts") == "2")
    (queued,) = re.findall(r"running rollouts; (\d+) wait for the next start", (directory / "job.log").read_text())[-1:]
    assert int(queued) > 0
    wait_for(lambda: state(job) == "RUNNING")
    with connect(directory) as client:
        drained = [client.result(one.rollout_id, timeout=PATIENCE) for one in late]
    assert {one.outcome.status for one in drained} == {"completed"}
    assert not any(one.retries for one in drained), "no attempt was cut off"

    second = submit_job("--nodes=1", str(RECIPES / "service.sbatch"), str(directory))
    wait_for(lambda: state(second) == "FAILED")  # the ledger is in use
    with connect(directory) as client:
        assert node_count(client) == 3, "the address is still that of the first"

    slurm("scancel", job)
    wait_for(lambda: state(job) == "CANCELLED" and not scratch_of(job))
    wait_for(lambda: not processes_that_name(f"prorl-{job}-"))


TRAINER = """
import sys, time
from prorl_gym.client import SyncClient
from prorl_gym.records import RolloutRequest

with SyncClient() as client:  # the job's environment names the service
    while not getattr(client.status().nodes, "nodes", ()):
        time.sleep(0.2)
    wanted = [RolloutRequest.model_validate_json(line) for line in open(sys.argv[1])]
    client.submit(wanted)
    assert all(client.result(one.rollout_id, timeout=300).reward == 1 for one in wanted)
"""


@pytest.mark.ray
def test_cpu_nodes_join_the_ray_of_a_trainers_job(directory: Path, submit_job: Callable[..., str]) -> None:
    # One CPU node: on one machine, Ray nodes that start at the same moment take each other's ports.
    rows, trainer = directory / "rows.jsonl", directory / "trainer.py"
    rows.write_text("".join(request.model_dump_json() + "\n" for request in groups("t", count=4, size=4)))
    trainer.write_text(TRAINER)
    job = submit_job(
        *(":", "--nodes=1", *SMALL, str(RECIPES / "trainer.sbatch"), str(directory)),
        *("python", str(trainer), str(rows)),
    )
    wait_for(lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    log = (directory / "job.log").read_text()
    assert state(job) == "COMPLETED", log[-5000:]
    assert len(re.findall(r"placing a node on Ray node", log)) == 1
    wait_for(lambda: not processes_that_name(f"ray-{job}"))
