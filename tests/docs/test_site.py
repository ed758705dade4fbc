"""The built site: no dead link, no dead anchor, nothing fetched from other servers. `make test-docs` builds it and runs this."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.blocks import ROOT

SITE = ROOT / "build" / "site"
pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="`make docs` builds the site")

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "use": "href"}


class Page(HTMLParser):
    """Anchors, links, and what a browser loads by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and {"stylesheet", "icon", "preload", "preconnect"} & set(found.get("rel", "").split()):
            self.loaded.append(found.get("href", ""))
        if tag in LOADED and LOADED[tag] in found:
            self.loaded.append(found[LOADED[tag]])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"}


def test_no_link_and_no_anchor_is_dead(pages):
    dead = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            address = urlsplit(link)
            if address.scheme in ("http", "https", "mailto", "data"):
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                dead.append(f"{path.relative_to(SITE)}: {link}")
            elif address.fragment and target in pages and unquote(address.fragment) not in pages[target].anchors:
                dead.append(f"{path.relative_to(SITE)}: {link} (no such anchor)")
    assert not dead
    assert len(pages) > 40 and sum(len(page.links) for page in pages.values()) > 2000


def test_pages_load_nothing_from_other_servers(pages):
    loaded = {address for page in pages.values() for address in page.loaded if urlsplit(address).netloc}
    assert not loaded
    for path in SITE.rglob("*.css"):
        addresses = re.findall(r"url\(['\"]?(https?:[^)]*)|@import ['\"](https?:[^'\"]*)", path.read_text())
        assert not addresses, path.name


def test_the_search_finds_pages_without_a_server(pages):
    index = json.loads((SITE / "search" / "search_index.json").read_text())
    assert (SITE / "search" / "search_index.js").exists()
    locations = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"start.html", "recurrent_ppo.html", "reference/cores.html", "commands.html"} <= locations


def browse(address: str, folder: Path) -> tuple[str, set[str]]:
    """What chromium shows, and the servers that it asks."""
    log = folder / "net.json"
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    alone = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = ["chromium", *alone, *quiet, f"--log-net-log={log}", "--virtual-time-budget=8000", "--dump-dom", address]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    requested = set(re.findall(r'"url":"https?://([^"/]+)', log.read_text()))
    return shown, {host for host in requested if not host.endswith(("google.com", "googleapis.com", "gvt1.com"))}


needs_chromium = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


@needs_chromium
@pytest.mark.parametrize("page", ["index.html", "reference/policies.html", "notebooks/look_inside_the_memory.html"])
def test_a_browser_asks_no_server(page, tmp_path):
    shown, servers = browse((SITE / page).as_uri(), tmp_path)
    assert "md-content" in shown
    assert not servers  # what is left out are chromium's own


@needs_chromium
def test_the_search_works_in_pages_opened_from_a_folder(tmp_path):
    shown, servers = browse((SITE / "reference" / "cores.html").as_uri() + "?q=bootstrap", tmp_path)
    assert re.search(r"\d+ matching documents", shown) and "recurrent_ppo.html" in shown
    assert not servers
