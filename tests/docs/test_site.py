"""The documentation site builds without a warning and is complete in itself; every link of a page leads somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from doc_reader import DOCS, README, ROOT, last_command_of_make

PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Html(HTMLParser):
    """The names of a page's elements, and what it links to or loads."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.add(str(given["id"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        elif given.get("src") or tag == "link":
            self.loaded.append(str(given.get("src") or given.get("href")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the site needs the extra 'docs'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {file: Html(file.read_text()) for file in site.rglob("*.html")}


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path, pages: dict[Path, Html]):
    assert {f"{page.stem}.html" for page in DOCS} <= {file.name for file in pages}
    for file, html in pages.items():
        for link in html.links:
            parts = urlsplit(link)
            if parts.scheme or file.name == "404.html":
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.is_file(), f"{file.name} links to {link}"
            names = pages[target].ids if target in pages else set()
            assert not parts.fragment or unquote(parts.fragment) in names, f"{file.name} links to {link}"


def test_the_site_loads_nothing_from_elsewhere(pages: dict[Path, Html]):
    assert [url for html in pages.values() for url in html.loaded if urlsplit(url).netloc] == []


@pytest.mark.parametrize(
    "words, page",
    {
        "async": "swarm",
        "install": "install",
        "multi-gpu": "ranks",
        "off-policy": "algorithms",
        "retry": "swarm",
        "preempt": "swarm",
        "hyperparameter": "algorithms",
    }.items(),
)
def test_a_search_for_a_word_of_the_field_finds_the_page(words: str, page: str, site: Path):
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {doc["location"].partition(".html")[0] for doc in index if words in (doc["title"] + doc["text"]).lower()}
    assert page in found


def test_make_builds_the_site_strictly():
    assert last_command_of_make("docs")[-4:] == [".venv/bin/mkdocs", "build", "--strict", "--quiet"]
    assert "site/" in (ROOT / ".gitignore").read_text().splitlines()


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_within_the_repository_name_a_file_and_a_heading_that_exist(page: Path):
    for link in LINK.findall(prose(page)):
        parts = urlsplit(link)
        if parts.scheme:
            assert "offbeat" not in link, "there is no published repository and no hosted site"
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not parts.fragment or parts.fragment in anchors(target), f"{page.name} links to {link}"


def test_the_package_names_no_place_that_does_not_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "urls" not in project


def test_the_figures_of_the_benchmarks_page_are_those_of_the_records():
    page = ROOT / "docs" / "benchmarks.md"
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("|") and "/results/" in line]
    results = [row for row in rows if len(row) == 4 and row[2] != "machine"]
    assert len(results) == 15
    for question, result, *_ in results:
        files = [page.parent / target for target in LINK.findall(question)]
        records = " ".join(file.read_text() for file in files)
        recorded = {float(figure) for figure in re.findall(r"(?<![\w.])\d+\.\d+", records)}
        targets = re.findall(r"target ([\d.]+\d)", result)
        for shown in re.findall(r"(?<![\w.])\d+\.\d+", result):
            digits = len(shown.partition(".")[2])
            assert shown in targets or any(round(figure, digits) == float(shown) for figure in recorded), (
                question,
                shown,
            )
