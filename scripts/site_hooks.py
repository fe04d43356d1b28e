"""Hooks of ``mkdocs.yml``: pages of the site that lie outside ``docs/``, and links between all of them.

Files link to each other as they lie in the repository, so that links work there. The site has ``docs/`` and the files
of ``PAGES``; a link to another file of the repository leads to ``repo_url``, and is plain text in a build without one.
A link to a file that does not exist fails the build.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/results/real-vllm.md": "real-vllm.md",
    "environments/prorl_code/README.md": "environments/code.md",
    "environments/prorl_math/README.md": "environments/math.md",
    "environments/prorl_stem/README.md": "environments/stem.md",
    "environments/prorl_swe/README.md": "environments/swe.md",
    "environments/prorl_taskdir/README.md": "environments/taskdir.md",
    "recipes/nemo_rl/README.md": "recipes/nemo-rl.md",
    "recipes/tiny_dapo/README.md": "recipes/tiny-dapo.md",
    "recipes/tiny_dapo/curve.png": "recipes/curve.png",
}
"""Files of the repository by their path, with their place in the site."""
BRANCH = "main"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^ *(```+|~~~+)")


class DeadLinkError(Exception):
    """A page links to a file that the repository does not have."""


def source_of(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return next((source for source, place in PAGES.items() if place == page), f"docs/{page}")


def page_of(source: str) -> str | None:
    """Return the place in the site of a file of the repository, if it has one."""
    return PAGES.get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else None)


def resolve(target: str, source: str, repository: str | None) -> str | None:
    """Return a link's target as the site has it, ``None`` where it can only be text.

    Args:
        target: as the file has it: an address, an anchor, or a path relative to the file.
        source: path of the file in the repository.
        repository: address of the repository, if there is one.

    Raises:
        DeadLinkError: the target is a path that does not exist.
    """
    if re.match(r"[a-z]+:|#", target):
        return target
    path, hash_sign, anchor = target.partition("#")
    there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if there.startswith("..") or not (ROOT / there).exists():
        raise DeadLinkError(f"{source} links to {target}, which does not exist.")
    page = page_of(there)
    if page is not None and (ROOT / there).is_file():
        start = posixpath.dirname(page_of(source) or "")
        return posixpath.relpath(page, start or ".") + hash_sign + anchor
    if not repository:
        return None
    kind = "tree" if (ROOT / there).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/{BRANCH}/{there}{hash_sign}{anchor}"


def rewrite(text: str, source: str, repository: str | None) -> str:
    """Return a page with the targets of its links as the site has them; code is left alone."""

    def one(found: re.Match[str]) -> str:
        target = resolve(found[3], source, repository)
        label = rewrite_line(found[2])  # an image that is a link
        return label if target is None else f"{found[1]}[{label}]({target})"

    def rewrite_line(line: str) -> str:
        return LINK.sub(one, line)

    return "".join(line if is_code else rewrite_line(line) for line, is_code in lines_of(text))


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line with its end, and whether it belongs to a fenced block."""
    fence = ""
    for line in text.splitlines(keepends=True):
        found = FENCE.match(line)
        if fence:
            yield line, True
            if found and found[1].startswith(fence):
                fence = ""
        else:
            yield line, found is not None
            fence = found[1] if found else ""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside ``docs/``."""
    from mkdocs.structure.files import File

    for source, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page."""
    from mkdocs.exceptions import PluginError

    try:
        return rewrite(markdown, source_of(page.file.src_uri), config.repo_url)
    except DeadLinkError as error:
        raise PluginError(str(error)) from None
