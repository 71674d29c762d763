"""The tables of figures in the READMEs, docs/differs.md and docs/figures.md, out of benchmarks/results.

`python -m benchmarks --readme` writes them anew. figures.toml says what the README shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomllib

from benchmarks import results
from benchmarks.results import Measured, Results
from benchmarks.table import Finding, Row

ROOT = Path(__file__).parents[1]
FIGURES, SAME_RESULT, END = "<!-- figures -->", "<!-- same result -->", "<!-- end -->"
LANGUAGES = ("english", "chinese")


def shown() -> dict[str, Any]:
    return tomllib.loads((ROOT / "benchmarks/figures.toml").read_text())


def pages(found: Sequence[Results]) -> Iterator[tuple[Path, str]]:
    """Every page with tables, as it should be.

    Raises:
        LookupError: figures.toml names a row that its benchmark no longer has.
    """
    words = shown()
    check(words, found)
    for language in LANGUAGES:
        page = ROOT / words[language]["page"]
        yield page, renewed(page.read_text(), FIGURES, figures(found, words, language))
    page = ROOT / "docs/differs.md"
    yield page, renewed(page.read_text(), SAME_RESULT, same_result(found))
    page = ROOT / "docs/figures.md"
    yield page, renewed(page.read_text(), FIGURES, all_rows(found))


def write() -> None:
    """Renew the tables of all pages."""
    for page, text in pages(results.read_all()):
        page.write_text(text)


def renewed(text: str, begin: str, lines: Iterator[str]) -> str:
    """The page with other lines between a mark and the next end."""
    before, mark, rest = text.partition(f"{begin}\n")
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise LookupError(f"a page has no {begin} or no {END} after it")
    return "\n".join([before + begin, *lines, END + after])


def check(words: dict[str, Any], found: Sequence[Results]) -> None:
    """Every row that is shown is there, where its benchmark has found something.

    Raises:
        LookupError: one is not.
    """
    for figure in words["figure"]:
        name, row = figure["benchmark"], figure["row"]
        there = {it.what for one in found if name in one.benchmarks for it in one.benchmarks[name].found}
        if there and row not in there:
            raise LookupError(f"figures.toml shows {row!r} of {name}, which has {sorted(there)}")


def figures(found: Sequence[Results], words: dict[str, Any], language: str) -> Iterator[str]:
    """The README's table line by line, with a column for each machine."""
    mine = words[language]
    for one in found:
        day = max(measured.day for measured in one.benchmarks.values())
        yield mine["measured"].format(day=day, machine=one.machine, versions=_versions(one))
        yield ""
    what, against, time = mine["head"]
    times = [time] if len(found) == 1 else [f"{time}: {one.machine.name}" for one in found]
    lines = [
        [*figure[language], *(_ratio(one.row(figure["row"]), mine["missing"]) for one in found)]
        for figure in words["figure"]
    ]
    yield from _table([what, against, *times], lines)


def same_result(found: Sequence[Results]) -> Iterator[str]:
    """A line for each library, with what it did of 103 samples in order and of 96 shuffled."""
    measured = next((one.benchmarks["same_result"] for one in found if "same_result" in one.benchmarks), None)
    if measured is None:
        return
    by_library: dict[str, list[str]] = {}
    cases = "103 samples, in order", "96 samples, shuffled"
    for case in cases:
        for it in measured.found:
            if isinstance(it, Finding) and it.what == case:
                by_library.setdefault(it.who, []).append(it.found)
    yield from _table(["", *cases], [[who, *cells] for who, cells in by_library.items()])


def all_rows(found: Sequence[Results]) -> Iterator[str]:
    """Every row of every machine, with medians, ranges and bars."""
    for one in found:
        yield f"## {one.machine.name}\n"
        yield f"{one.machine}; {_versions(one)}.\n"
        for name, measured in one.benchmarks.items():
            yield f"**{name}**: {measured.day}, {measured.seconds:.0f} s" + (
                "" if measured.found else "; needs a GPU"
            )
            yield ""
            yield from _rows(measured)


def _rows(measured: Measured) -> Iterator[str]:
    rows = [row for row in measured.found if isinstance(row, Row)]
    if rows:
        cells = [[row.what, str(row.this), str(row.against), _ratio(row, ""), *row.cells()[-2:]] for row in rows]
        yield from _table(["what", "this", "against", "ratio", "bar", ""], cells)
        yield ""
    findings = [it for it in measured.found if isinstance(it, Finding)]
    if findings:
        yield from _table(["what", "who", "found"], [[it.what, it.who, it.found] for it in findings])
        yield ""


def _ratio(row: Row | None, missing: str) -> str:
    if row is None:
        return missing
    low, high = row.spread
    return f"{row.ratio:.2f} [{low:.2f}-{high:.2f}]"


def _versions(one: Results) -> str:
    newest = max(one.benchmarks.values(), key=lambda measured: measured.day)
    return ", ".join(f"{name} {number}" for name, number in newest.versions.items())


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for cells in lines:
        yield f"| {' | '.join(cells)} |"
