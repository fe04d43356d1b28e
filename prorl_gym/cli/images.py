"""``prorl-gym images``: build, pull, sync, list, prune and import the images of sandboxes."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.sandbox.images.store import ImageRecord, ImageStore

images = typer.Typer(no_args_is_help=True, help="Images of sandboxes: build, pull, sync, list, prune, import.")

Store = Annotated[Path | None, typer.Option("--store", help="Directory of the store, on a local disk.")]
Uid = Annotated[int | None, typer.Option(help="Owner of unpacked files when run as root: the sandboxes' uid.")]
Mirror = Annotated[
    list[str] | None,
    typer.Option("--mirror", help="URL to use instead of docker.io, or HOST=URL for another registry."),
]
MaxBytes = Annotated[int | None, typer.Option(help="Bytes that the store may hold.")]
MaxInodes = Annotated[int | None, typer.Option(help="Files and directories that the store may hold.")]
Name = Annotated[str, typer.Option(help="Name to use the image by.")]
T = TypeVar("T")
_PULL_SECONDS = 3600.0


@images.command()
def pull(
    image: Annotated[
        list[str],
        typer.Argument(help="docker:// references, paths of SIF files, or (with --name) library://, oras://."),
    ],
    name: Annotated[str, typer.Option(help="Name for an image that only Apptainer can fetch.")] = "",
    store: Store = None,
    uid: Uid = None,
    mirror: Mirror = None,
) -> None:
    """Fetch images, or update those that are here."""
    from prorl_gym.sandbox.images.image_import import APPTAINER_SCHEMES, pull_with_apptainer

    async def work(store: "ImageStore") -> None:
        for one in image:
            if one.startswith(APPTAINER_SCHEMES):
                _show(await pull_with_apptainer(store, one, name, seconds=_PULL_SECONDS))
            else:
                _show(await store.ensure_image(one, refresh=True))

    _run_with_store(work, directory=store, uid=uid, mirrors=_parse_mirrors(mirror))


@images.command()
def build(
    what: Annotated[str, typer.Argument(help="prorl-python (the python tool's stock image) or a definition file.")],
    name: Annotated[
        str, typer.Option(help="Name to use the image by; the file's name without suffix by default.")
    ] = "",
    cache: Annotated[
        Path | None, typer.Option(help="Directory of downloaded packages, to build again without network.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Longest time that building from a definition may take.")
    ] = 3600,
    store: Store = None,
    uid: Uid = None,
) -> None:
    """Build an image under a name."""
    from prorl_gym.sandbox.config import default_cache
    from prorl_gym.sandbox.images import python_image
    from prorl_gym.sandbox.images.image_import import build_definition

    async def work(store: "ImageStore") -> None:
        if what == python_image.NAME:
            place = cache or default_cache() / "packages"
            _show(await python_image.build(store, place, name or what))
        else:
            _show(await build_definition(store, Path(what), name or Path(what).stem, seconds=seconds))

    _run_with_store(work, directory=store, uid=uid)


@images.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A directory, a SIF file or a tar archive.")],
    name: Name,
    base: Annotated[str, typer.Option(help="Image to which the source is added as a thin layer.")] = "",
    store: Store = None,
    uid: Uid = None,
) -> None:
    """Make an image from a directory, a SIF file or an archive."""
    from prorl_gym.sandbox.images.image_import import import_image

    async def work(store: "ImageStore") -> None:
        _show(await import_image(store, source.absolute(), name, base=base))

    _run_with_store(work, directory=store, uid=uid)


@images.command()
def sync(
    rows: Annotated[Path, typer.Argument(help="JSONL file whose rows need images.")],
    template: Annotated[
        str, typer.Option(help="How rows name images: row, swe-bench, swe-gym, r2e-gym, or 'team/{key}:tag'.")
    ] = "row",
    jobs: Annotated[int, typer.Option(min=1, help="Images fetched at a time.")] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the estimate.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Continue although the estimate does not fit.")] = False,
    shard: Annotated[str, typer.Option(help="Only shard I of N (I from 0), one per node.")] = "0/1",
    store: Store = None,
    uid: Uid = None,
    mirror: Mirror = None,
    max_bytes: MaxBytes = None,
    max_inodes: MaxInodes = None,
) -> None:
    """Fetch the images of a data set; run it again to continue."""
    from prorl_gym.data.image_sync import (
        SyncResult,
        check_free_space,
        list_images,
        parse_template,
        plan_sync,
        select_shard,
        sync_images,
    )

    wanted = select_shard(list_images(rows, parse_template(template)), shard)

    async def work(store: "ImageStore") -> SyncResult:
        needed = await plan_sync(store, wanted, jobs)
        unknown = f" ({len(needed.failed)} of them not in the estimate, see below)" if needed.failed else ""
        typer.echo(
            f"{len(needed.missing)} images to bring{unknown}, {needed.present_count} here: {needed.layer_count} "
            f"layers to fetch"
            f" ({needed.shared_count} shared or here), {_format_bytes(needed.download_bytes)} to download,"
            f" about {_format_bytes(needed.unpacked_bytes)} and {needed.inodes} inodes unpacked"
        )
        if dry_run:
            return SyncResult(failed=needed.failed)
        if not force:
            check_free_space(needed, store)
        return await sync_images(store, needed.missing, jobs, lambda image, end: typer.echo(f"{image}: {end}"))

    bounds = {"max_bytes": max_bytes, "max_inodes": max_inodes, "jobs": jobs}
    outcome = _run_with_store(work, directory=store, uid=uid, mirrors=_parse_mirrors(mirror), **bounds)
    if dry_run:
        for image, reason in outcome.failed.items():
            typer.echo(f"{image}: {reason}")
    if outcome.failed:
        typer.echo(f"{len(outcome.failed)} of {len(wanted)} images failed; run it again to try these once more")
        raise typer.Exit(1)


@images.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    store: Store = None,
    uid: Uid = None,
) -> None:
    """List the images here and their sizes."""

    async def work(store: "ImageStore") -> None:
        store.layers.make_directories()
        layers = {layer.key: layer for layer in store.layers.list_layers()}
        rows: list[dict[str, Any]] = []
        for record in store.records.list_records():
            found = [layers.get(digest.replace(":", "-")) for digest in record.layers]
            there = [layer for layer in found if layer is not None]
            facts = {"image": record.reference, "kind": record.kind, "digest": record.digest, "layers": len(found)}
            sizes = {"bytes": sum(one.size for one in there), "inodes": sum(one.inodes for one in there)}
            rows.append({**facts, **sizes, "here": len(there) == len(found)})
        if as_json:
            typer.echo(json.dumps({"store": str(store.layers.directory), "images": rows}, indent=2))
            return
        for row in rows:
            state = "" if row["here"] else "  (pruned; fetched again when needed)"
            typer.echo(
                f"{row['image']}  {row['layers']} layers, {_format_bytes(row['bytes'])}, {row['inodes']} inodes{state}"
            )
        size, inodes = sum(one.size for one in layers.values()), sum(one.inodes for one in layers.values())
        total = f"{_format_bytes(size)}, {inodes} inodes"
        typer.echo(f"{store.layers.directory}: {len(layers)} layers, {total} in all")

    _run_with_store(work, directory=store, uid=uid)


@images.command()
def prune(
    image: Annotated[
        list[str] | None, typer.Argument(help="Images to remove; without any, only the bounds are enforced.")
    ] = None,
    store: Store = None,
    uid: Uid = None,
    max_bytes: MaxBytes = None,
    max_inodes: MaxInodes = None,
) -> None:
    """Remove images by name, then the least recently used layers beyond the bounds. Layers in use are kept."""

    async def work(store: "ImageStore") -> None:
        store.layers.make_directories()
        removed = sum([await store.remove_image(one) for one in image or []])
        done = await store.prune()
        typer.echo(
            f"{removed + done.layers} layers removed; {_format_bytes(done.left_bytes)}, {done.left_inodes} inodes left"
        )

    _run_with_store(work, directory=store, uid=uid, max_bytes=max_bytes, max_inodes=max_inodes)


def _run_with_store(work: "Callable[[ImageStore], Awaitable[T]]", **given: Any) -> T:
    from prorl_gym.config import load_config
    from prorl_gym.sandbox.config import ImagesConfig
    from prorl_gym.sandbox.images.store import ImageStore

    config = load_config(ImagesConfig, {key: value for key, value in given.items() if value is not None}, "options")

    async def run() -> T:
        store = ImageStore(config)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _parse_mirrors(given: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given or []:
        host, mark, url = text.partition("=")
        host, url = (host, url) if mark and "://" not in host else ("docker.io", text)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--mirror {text!r} is no URL.", "Write http(s)://HOST[:PORT], or REGISTRY=URL.")
        found[host] = url
    return found


def _show(record: "ImageRecord") -> None:
    typer.echo(f"{record.reference}  {record.digest}  {len(record.layers)} layers")


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
