"""Pages of HTML that need nothing else: no network, no script."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

STYLE = """
:root{color-scheme:light dark;--text:#1c2024;--faint:#666e78;--back:#fff;--panel:#f5f6f8;--grid:#d9dde2}
:root{--mark:#c2185b}
@media(prefers-color-scheme:dark){:root{--text:#e6e8eb;--faint:#9aa3ad;--back:#14171a;--panel:#1d2125;--grid:#363c43;
--mark:#ff6f9f}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1rem;background:var(--back);color:var(--text);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem;margin:.2rem 0}h2{font-size:1.05rem;margin:0}
p,li{margin:.3rem 0}.faint,figcaption p,.y,.x,.key{color:var(--faint);font-size:.85rem}
figure,section{margin:1rem 0;padding:.8rem;background:var(--panel);border-radius:.5rem}
.plot{display:flex;gap:.5rem}.plot svg{flex:1;min-width:0;height:12rem;overflow:visible}
.y{display:flex;flex-direction:column;justify-content:space-between;text-align:right;min-width:3.2rem}
.x{position:relative;height:1.3rem;margin-left:3.7rem}.x span{position:absolute;white-space:nowrap}
.key{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem;
border-radius:2px;background:var(--color)}
path{fill:none;vector-effect:non-scaling-stroke}.line{stroke:var(--color);stroke-width:2}.area{fill:var(--color)}
.grid{stroke:var(--grid);stroke-width:1}.mark{stroke:var(--mark);stroke-width:2;stroke-dasharray:5 4}
pre{overflow-x:auto;font-size:.85rem;margin:.3rem 0}summary{cursor:pointer}
.table{overflow-x:auto;white-space:nowrap}table{border-collapse:collapse;width:100%}
th,td{padding:.2rem .6rem;text-align:right}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}tr+tr{border-top:1px solid var(--grid)}
.c0{--color:#8a9099}.c1{--color:#2a9d63}.c2{--color:#e6a700}.c3{--color:#d1495b}.c4{--color:#9b5de5}.c5{--color:#2f7fd6}
.c6{--color:#e4762b}.c7{--color:#00a0a8}.c8{--color:#b05a8c}
"""


def document(title: str, body: Iterable[str], refresh: int = 0) -> str:
    """Return a page. title: a text. body: HTML. refresh: seconds after which browsers load it again; 0: never."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1"><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none';img-src data:;style-src 'unsafe-inline'\">"
        + (f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "")
        + f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def head(title: str, words: Sequence[str]) -> str:
    """Return the title of a page, and facts below it."""
    return f'<h1>{escape(title)}</h1>\n<p class="faint">{escape(" · ".join(words))}</p>'


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a section with a table of texts."""
    names = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section><h2>{escape(title)}</h2><div class="table"><table><tr>{names}</tr>{lines}</table></div></section>'
    )


def listed(title: str, texts: Iterable[str]) -> str:
    """Return a section with a list of texts; nothing without one."""
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<section><h2>{escape(title)}</h2><ul>{lines}</ul></section>" if lines else ""


def write_page(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, whole.

    Raises:
        OSError: it cannot be written; the old one is as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        with suppress(OSError):
            beside.unlink()
