"""MkDocs hook: makes pages of the files outside docs/ that a page links to, so that these links work in the site.

Markdown stays what it is, but for the raw figures of benchmarks; notebooks are shown cell by cell; every other file is
shown as code.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)")
RAW_FIGURES = re.compile(r"^```json\n.*?^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    waiting = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ALWAYS)]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        if source.parent != DOCS:
            files.append(File.generated(config, page_of(source), content=text_of(source)))
        if source.suffix == ".md":
            linked = {(source.parent / target).resolve() for target in LINK.findall(source.read_text())}
            new = {path for path in linked - seen if path.is_file() and path.is_relative_to(ROOT)}
            waiting += sorted(path for path in new if not path.is_relative_to(DOCS))
            seen |= new
    return files


def page_of(source: Path) -> str:
    """The page of a file outside docs/, relative to the site's root."""
    path = source.relative_to(ROOT).as_posix()
    return path if source.suffix == ".md" else f"{path}.md"


def text_of(source: Path) -> str:
    text, name = source.read_text(), source.relative_to(ROOT).as_posix()
    if source.suffix == ".md":
        return RAW_FIGURES.sub(f"*The raw figures are in the repository, in `{name}`.*", text)
    if source.suffix == ".ipynb":
        cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
        body = "\n\n".join(code if kind == "markdown" else f"```python\n{code}\n```" for code, kind in cells)
        return body if body.startswith("# ") else f"# {name}\n\n{body}"
    return f"# {name}\n\n```{LANGUAGES.get(source.suffix, 'text')}\n{text}```\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    generated = page.file.src_uri
    source = (
        ROOT / generated.removesuffix(".md") if (ROOT / generated.removesuffix(".md")).is_file() else ROOT / generated
    )
    source = source if source.is_file() else DOCS / generated

    def rewritten(match: re.Match[str]) -> str:
        target = (source.parent / match[0]).resolve()
        if not target.is_file():
            return match[0]
        to = target.relative_to(DOCS).as_posix() if target.is_relative_to(DOCS) else page_of(target)
        return os.path.relpath(to, Path(generated).parent)

    return LINK.sub(rewritten, markdown)
