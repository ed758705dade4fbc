"""What the site adds to the pages in docs/: MkDocs runs these hooks (mkdocs.yml).

- A link that leaves docs/ (`../examples/own_loop.py`) leads to a page of the site that shows that file; data files are copied.
- CONTRIBUTING.md and CHANGELOG.md are pages too, and so are the notebooks, as they were run.
- Figures are put into their pages, so that they follow the light and dark theme.
- `commands.md` is written from the parsers of `holdfast`.
Pages in docs/ stay plain Markdown that can be read without the site.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path

import commands_page
import notebook_page
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SHOWN = {".py": "python", ".sbatch": "bash", ".yaml": "yaml"}
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()((?!https?:|mailto:|#)[^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config) -> Files:
    """Add a page or a copy for every file outside docs/ that a page links to."""
    files.append(File.generated(config, "commands.md", content=_commands()))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=notebook_page.page(notebook)))
    for name, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=_page(name)))
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        content = files.get_file_from_path(page).content_string
        for target in _outside(page, content):
            uri = site_uri(target)
            if files.get_file_from_path(uri) is None:
                files.append(_file(config, target, uri))
                if uri.endswith(".md"):
                    waiting.append(uri)
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Point links that leave docs/ at the pages made above."""
    here = page.file.src_uri

    def to_site(match: re.Match[str]) -> str:
        target = _repository_path(here, match[2])
        if target is None or target.startswith("docs/"):
            return match[0]
        return match[1] + posixpath.relpath(site_uri(target), posixpath.dirname(here) or ".") + match[3]

    return LINK.sub(to_site, markdown)


def on_page_content(html: str, page, config, files) -> str:
    """Put figures that take the color of the text into the page itself; an <img> would not know whether it is dark."""

    def inline(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / "figures" / match[1]).read_text()
        return f'<span class="figure">{svg}</span>' if "currentColor" in svg else match[0]

    return re.sub(r'<img [^>]*src="(?:\.\./)*figures/(\w+\.svg)"[^>]*>', inline, html)


def site_uri(target: str) -> str:
    """Where a file of the repository is on the site."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    return f"source/{target}.md" if Path(target).suffix in SHOWN else f"source/{target}"


def _repository_path(page: str, link: str) -> str | None:
    """The file of the repository that a link means, or None if it is inside docs/ or not there."""
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return target if (ROOT / target).is_file() else None


def _outside(page: str, content: str) -> list[str]:
    targets = (_repository_path(page, match[2]) for match in LINK.finditer(content))
    return [target for target in targets if target and not target.startswith("docs/") and target not in ROOT_PAGES]


def _file(config, target: str, uri: str) -> File:
    path = ROOT / target
    if path.suffix in SHOWN:
        text = f"# `{target}`\n\n````{SHOWN[path.suffix]}\n{path.read_text()}````\n"
        return File.generated(config, uri, content=text)
    if path.suffix == ".md":
        return File.generated(config, uri, content=path.read_text())
    return File.generated(config, uri, abs_src_path=str(path))


@cache  # importing torch takes seconds, and `make docs-serve` builds often
def _commands() -> str:
    return commands_page.page()


def _page(name: str) -> str:
    """A page at the root of the repository, with its links as seen from docs/."""
    return LINK.sub(lambda m: m[1] + posixpath.relpath(m[2], "docs") + m[3], (ROOT / name).read_text())
