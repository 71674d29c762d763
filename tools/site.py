"""What the site needs beyond its pages, as hooks of MkDocs (`hooks:` in mkdocs.yml).

Pages link to examples, benchmarks and tests, which are in the repository and not in docs/: those files become part of
the site, under source/, so that every link is one that MkDocs checks. All decisions are put into the navigation.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")
DECISIONS = "decisions/"


def on_config(config: Any) -> Any:
    """In place of `decisions/` in the navigation: a page for each."""
    pages = sorted(
        path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir, DECISIONS).glob("*.md")
    )
    config.nav = [
        {title: pages if value == DECISIONS else value for title, value in entry.items()} for entry in config.nav
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of docs/."""
    for path in sorted({path for page in files.documentation_pages() for _, path in _outside(page)}):
        if path.is_file():
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, f"source/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let those links lead to where the files are in the site."""
    here = posixpath.dirname(page.file.src_uri)
    for link, path in _outside(page.file):
        name = path.relative_to(ROOT).as_posix()
        markdown = markdown.replace(f"]({link}", f"]({posixpath.relpath(f'source/{name}', here or '.')}")
    return markdown


def _outside(page: File) -> list[tuple[str, Path]]:
    """The links of a page that lead out of docs/ to something of the repository, as they are written and as paths."""
    assert page.abs_src_path is not None
    here, docs = Path(page.abs_src_path).parent, ROOT / "docs"
    links = {link for _, link in LINK.findall(page.content_string)}
    paths = [(link, Path(os.path.normpath(here / link))) for link in sorted(links, key=len, reverse=True)]
    return [(link, path) for link, path in paths if not path.is_relative_to(docs)]
