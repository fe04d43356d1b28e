"""Bringing the images of a data set here: from a registry of our own with faults, and from Debian's."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from images_support import FakeRegistry, directory, entry, layer, push

from prorl_gym.data.image_sync import (
    check_free_space,
    list_images,
    parse_template,
    plan_sync,
    select_shard,
    sync_images,
)
from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.config import ImagesConfig
from prorl_gym.sandbox.images.store import ImageStore

BASE = layer(directory("usr"), entry("usr/base", bytes(5000)))


def rows_file(place: Path, *rows: object) -> Path:
    path = place / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def quiet(image: str, end: str) -> None:
    assert image and end


@pytest.mark.parametrize(
    ("template", "row", "image"),
    [
        ("swe-bench", {"instance_id": "Astropy__astropy-1"}, "swebench/sweb.eval.x86_64.astropy_1776_astropy-1:latest"),
        ("swe-gym", {"instance": {"instance_id": "a__B-1"}}, "xingyaoww/sweb.eval.x86_64.a_s_b-1:latest"),
        ("r2e-gym", {"docker_image": "namanjain12/x_final:abc"}, "namanjain12/x_final:abc"),
        ("row", {"metadata": {"docker_image": "ghcr.io/a/b:1"}}, "ghcr.io/a/b:1"),
        ("team/{repo}:{commit}", {"repo": "x", "commit": "f0"}, "team/x:f0"),
    ],
)
def test_rows_name_their_images(place: Path, template: str, row: object, image: str) -> None:
    assert list_images(rows_file(place, row, row), parse_template(template)) == [f"docker://{image}"]


def test_row_without_a_name_is_pointed_at(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: the row has no instance_id"):
        list_images(rows_file(place, {"instance_id": "a__b-1"}, {"id": 1}), parse_template("swe-bench"))


@pytest.mark.parametrize("template", ["swebench", "team/{}", "team/{a.b}", "{a[0]}"])
def test_unknown_template_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="--template"):
        parse_template(template)


def test_shares_of_a_job_array_are_all_and_disjoint() -> None:
    names = [str(n) for n in range(10)]
    shares = [select_shard(names, f"{n}/3") for n in range(3)]
    assert sorted(name for share in shares for name in share) == names


@pytest.mark.parametrize("text", ["3/3", "1", "a/b", "-1/3", "0/0"])
def test_wrong_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--shard"):
        select_shard([], text)


async def test_plan_counts_shared_layers_once(store: ImageStore, fake_registry: FakeRegistry) -> None:
    own = [layer(entry(f"own-{n}", b"1")) for n in range(3)]
    names = [fake_registry.add(f"image-{n}", BASE, data) for n, data in enumerate(own)]
    needed = await plan_sync(store, [*names, fake_registry.name("nowhere")], jobs=2)
    assert (len(needed.missing), needed.present_count, needed.layer_count, needed.shared_count) == (4, 0, 4, 2)
    assert needed.download_bytes == len(BASE) + sum(len(data) for data in own)
    assert list(needed.failed) == [fake_registry.name("nowhere")]
    assert not any("/blobs/" in path for path in fake_registry.asked)


async def test_plan_without_room_is_refused(store: ImageStore, fake_registry: FakeRegistry, place: Path) -> None:
    small = ImageStore(ImagesConfig(directory=place / "small", max_bytes=1))
    needed = await plan_sync(store, [fake_registry.add("image", BASE)], jobs=1)
    check_free_space(needed, store)
    with pytest.raises(ConfigError, match="more than the store holds"):
        check_free_space(needed, small)


async def test_failed_image_keeps_no_other_from_coming(store: ImageStore, fake_registry: FakeRegistry) -> None:
    bad = fake_registry.add("bad", layer(entry("../out", b"1")))
    good = [fake_registry.add(f"good-{n}", BASE, layer(entry(f"{n}", b"1"))) for n in range(3)]
    outcome = await sync_images(store, [bad, *good], 2, quiet)
    assert (sorted(outcome.done), list(outcome.failed)) == (sorted(good), [bad])


async def test_second_run_brings_only_the_rest(store: ImageStore, fake_registry: FakeRegistry) -> None:
    names = [fake_registry.add(f"image-{n}", layer(entry(f"{n}", b"1"))) for n in range(3)]
    fake_registry.faults.append(lambda request: web.Response(status=404) if "image-1" in request.path else None)
    first = await sync_images(store, names, 3, quiet)
    fake_registry.faults.clear()
    fake_registry.asked.clear()
    needed = await plan_sync(store, names, 3)
    second = await sync_images(store, needed.missing, 3, quiet)
    assert (list(first.failed), needed.present_count, second.done) == ([names[1]], 2, [names[1]])
    assert all("image-1" in path for path in fake_registry.asked)


def prorl_gym(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prorl_gym", "images", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


async def test_estimate_names_what_it_leaves_out(fake_registry: FakeRegistry, place: Path) -> None:
    rows = rows_file(place, {"image": "docker://there/is:none"})
    arguments = ("--dry-run", "--mirror", fake_registry.url, "--store", place / "store")
    dry = await asyncio.to_thread(prorl_gym, "sync", rows, *arguments)
    assert dry.returncode == 1
    assert "1 images to bring (1 of them not in the estimate, see below), 0 here" in dry.stdout, dry.stderr
    assert "docker://there/is:none: " in dry.stdout


@pytest.mark.slow
async def test_images_of_a_real_registry_by_the_command(real_registry: str, place: Path) -> None:
    shared = [layer(directory("usr"), entry(f"usr/base-{n}", bytes(2000 * n))) for n in range(1, 4)]
    async with asyncio.TaskGroup() as group:
        for n in range(32):
            own = layer(directory("testbed"), entry("testbed/n", str(n).encode()), entry("usr/.wh.base-1"))
            group.create_task(
                push(real_registry, f"swebench/sweb.eval.x86_64.a_1776_b-{n}", "latest", [*shared[: n % 3 + 1], own])
            )
    rows = rows_file(place, *({"instance_id": f"a__b-{n}"} for n in range(32)))
    arguments = ("sync", rows, "--template", "swe-bench", "--mirror", real_registry, "--store", place / "store")

    dry = await asyncio.to_thread(prorl_gym, *arguments, "--dry-run")
    assert "32 images to bring, 0 here: 35 layers to fetch" in dry.stdout, dry.stderr
    half = await asyncio.to_thread(prorl_gym, *arguments, "--shard", "0/2")
    assert (half.returncode, half.stdout.count(": done")) == (0, 16), half.stderr
    rest = await asyncio.to_thread(prorl_gym, *arguments)
    assert (rest.returncode, rest.stdout.count(": done")) == (0, 16), rest.stderr
    assert "16 images to bring, 16 here" in rest.stdout

    listed = json.loads((await asyncio.to_thread(prorl_gym, "list", "--json", "--store", place / "store")).stdout)
    assert (len(listed["images"]), {image["here"] for image in listed["images"]}) == (32, {True})
    assert len(list((place / "store/layers").glob("*"))) == 35
