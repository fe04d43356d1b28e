"""``prorl-gym root``, ``venvs``, ``doctor``, ``agents`` and ``bench``: what this machine needs and achieves.

Gym gives each server directory an environment of its own (minutes, gigabytes). With ``skip_venv_if_present=true`` and
``uv_venv_dir=DIR`` it takes ``DIR/<type>/<name>/.venv`` as it finds it; ``venvs`` makes these links to ``sys.prefix``.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import prorl_gym
from prorl_gym.errors import ConfigError
from prorl_gym.gym_roots import component_roots, gym_folder

_BENCHES = Path(__file__).parents[2] / "bench"
_SERVER_TYPES = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")


def gym_root() -> Path:
    """Return the component root inside the installed package."""
    return Path(prorl_gym.__file__).parent / "gym_root"


def root() -> None:
    """Print our component root (two for NeMo Gym < 0.7), for NEMO_GYM_EXTRA_ROOTS=$(prorl-gym root)."""
    typer.echo(os.pathsep.join(component_roots()))


def venvs(directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to create the links.")]) -> None:
    """Link every Gym server's environment to this one, then print the flags that make Gym use them."""
    tree = directory.resolve()
    count = link_venvs(tree, Path(sys.prefix))
    typer.echo(f"{count} servers use {sys.prefix}", err=True)
    typer.echo(f"+skip_venv_if_present=true +uv_venv_dir={tree}")


def link_venvs(tree: Path, prefix: Path) -> int:
    """Link every server of every root below ``tree``, Gym's ``uv_venv_dir``, to ``prefix``; return their number.

    Raises ``ConfigError``: ``prefix`` is not a virtual environment, or ``tree`` cannot be written.
    """
    if not (prefix / "bin" / "activate").exists():
        raise ConfigError(
            f"{prefix}: not a virtual environment (bin/activate is missing), so Gym cannot reuse it.",
            "Run this command with the interpreter of the environment that has nemo-gym installed.",
        )
    folders = {folder for root in server_roots() for kind in _SERVER_TYPES for folder in (root / kind).glob("*")}
    found = {
        f"{folder.parent.name}/{folder.name}"
        for folder in folders
        if any((folder / name).exists() for name in ("requirements.txt", "pyproject.toml"))
    }
    for server in sorted(found):
        link = tree / server / ".venv"
        try:
            if link.exists() and (not link.is_symlink() or link.readlink() == prefix):
                continue  # an environment that was really built there, or the same link
            link.unlink(missing_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(prefix)
        except OSError as error:
            raise ConfigError(f"{tree / server}: cannot be written ({error.strerror}).", "Name another DIR.") from None
    return len(found)


def server_roots() -> list[Path]:
    """Return the directories in which Gym looks for servers: extra roots, here, and where it is installed."""
    extra = [Path(entry) for entry in os.environ.get("NEMO_GYM_EXTRA_ROOTS", "").split(os.pathsep) if entry]
    gym = gym_folder()
    installed = [Path(gym).parent] if gym is not None else []
    return [*extra, gym_root(), Path.cwd(), *installed]


def doctor(
    scratch: Annotated[Path | None, typer.Option(help="Directory of the sandboxes' small files.")] = None,
    store: Annotated[Path | None, typer.Option(help="Directory of the image store.")] = None,
    uid: Annotated[int | None, typer.Option(help="Uid of sandboxes when run as root.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
) -> None:
    """Start a sandbox on every backend and show what this machine lacks."""
    from prorl_gym.cli.doctor_report import run_doctor

    run_doctor(scratch, store, uid, as_json=as_json)


agents = typer.Typer(no_args_is_help=True, help="Agent programs that run unmodified in the sandbox: list, install.")

Directory = Annotated[
    Path | None,
    typer.Option("--directory", help="Directory of the layers; the service's: `agents` in `sandbox.cache`."),
]


@agents.command("list")
def list_agents(
    directory: Directory = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs, with what is run.")] = False,
) -> None:
    """List the presets, and which are installed."""
    from prorl_gym.harness.presets import PRESETS

    layers = directory or _default_directory()
    if as_json:
        rows = [
            {
                "name": preset.name,
                "version": preset.version,
                "wire": preset.wire,
                "installed": preset.is_installed(layers),
                "command": preset.mounted(layers).model_dump(mode="json"),
            }
            for preset in PRESETS.values()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for preset in PRESETS.values():
        state = "installed" if preset.is_installed(layers) else "-"
        typer.echo(f"{preset.name:18} {preset.version:10} {preset.wire:18} {state:11} {preset.licence}".rstrip())


@agents.command()
def install(
    name: Annotated[list[str], typer.Argument(help="Presets; `all` for every one.")],
    directory: Directory = None,
    python: Annotated[
        str | None, typer.Option(help="Python with pip that a preset from PyPI brings along; by default one that fits.")
    ] = None,
) -> None:
    """Install presets from npm or PyPI, pinned. What was fetched is kept, and used instead of the network next time."""
    from prorl_gym.harness.layers import install_preset
    from prorl_gym.harness.presets import PRESETS

    wanted = list(PRESETS) if name == ["all"] else name
    for one in wanted:
        if one not in PRESETS:
            raise ConfigError(f"There is no preset '{one}'.", f"Known: {', '.join(PRESETS)}.")
    for one in wanted:
        if PRESETS[one].licence:
            typer.echo(f"{one}: {PRESETS[one].licence}", err=True)
        typer.echo(f"{one}: {install_preset(PRESETS[one], directory or _default_directory(), python)}")


def _default_directory() -> Path:
    from prorl_gym.sandbox.config import SandboxConfig

    return SandboxConfig().agents_cache_dir()


def bench(
    name: Annotated[str, typer.Argument(help="Name of the bench, for example shell or service.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    short: Annotated[bool, typer.Option("--short", help="Measure a tenth, to try it; not for publication.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="For bench tokens: directory with Qwen's tokenizer and templates.")
    ] = None,
) -> None:
    """Measure the figures of one bench on this machine."""
    if short:
        os.environ["PRORL_BENCH_SHORT"] = "1"
    if tokenizer is not None:
        os.environ["PRORL_GYM_QWEN"] = str(tokenizer)
    report = run_bench(name, _BENCHES)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show_report(report)


def run_bench(name: str, scripts: Path) -> Mapping[str, Any]:
    """Run ``<scripts>/<name>.py`` and return its report. Raises ``ConfigError``: no such script, or no checkout."""
    if not (scripts / "_report.py").is_file():
        raise ConfigError(
            "bench: the scripts are part of the repository, not of the installed package.",
            "Clone the repository, install it with `pip install -e .` and run the command there.",
        )
    known = sorted(path.stem for path in scripts.glob("[a-z]*.py"))
    if name not in known:
        raise ConfigError(f"bench: there is no bench '{name}'.", f"Known: {', '.join(known)}.")
    sys.path.insert(0, str(scripts))  # scripts share `_report`
    try:
        # a name of its own, by which worker processes find its functions
        spec = importlib.util.spec_from_file_location(f"_bench_{name}", scripts / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module.run()
    finally:
        sys.path.remove(str(scripts))


def _show_report(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", "target", "runs", "peers", title=f"bench {report['bench']}")
    for row in cast(list[dict[str, Any]], report["figures"]):
        target, value = "", f"{_number(row['value'])} {row['unit']}"
        if row["target"] is not None:
            is_lower_better = row["better"] == "lower"
            is_met = row["value"] <= row["target"] if is_lower_better else row["value"] >= row["target"]
            target = f"{'<=' if is_lower_better else '>='} {_number(row['target'])}"
            value = f"[{'green' if is_met else 'red'}]{value}[/]"
        peers = "\n".join(f"{peer['name']}: {_number(peer['value'])}" for peer in row["peers"])
        name = f"{row['backend']}: {row['name']}" if row["backend"] else row["name"]
        measured: list[float] = row["runs"]
        runs = " ".join(map(_number, measured))
        if len(measured) > 5:
            runs = f"{_number(min(measured))} to {_number(max(measured))} ({len(measured)})"
        table.add_row(name, value, target, runs, peers)
    console = Console()
    console.print(table)
    if report["ratios"] is None:
        console.print("no ratios: the load average exceeds the cores, and peers suffer from it unequally")
    for name, ratio in cast(dict[str, float], report["ratios"] or {}).items():
        console.print(f"{_number(ratio)}x  {name}", highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in cast(dict[str, str], report["versions"]).items())
    console.print(f"{report['cores']} cores, load average {report['load_average']:.1f}; {versions}", highlight=False)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
