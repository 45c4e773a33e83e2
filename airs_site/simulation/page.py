"""A simulation as one page: tables and plots in a single HTML file that needs no network."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

from airs_site.simulation.plots.style import Plot
from airs_site.simulation.report import MET, MISSED
from airs_site.simulation.tables import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
p { max-width: 50rem } img { max-width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.86rem }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd;
         white-space: nowrap }
th:first-child, td:first-child { text-align: left }
td.met { color: #00664a } td.missed { color: #b00020 }
"""


def page(*, title: str, about: str, tables: Sequence[Table], pictures: Mapping[Plot, bytes]) -> str:
    """Return the page: the first table, the pictures, then all other tables."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(about)}</p>",
        *(_table(table) for table in tables[:1]),
        *(_picture(plot, png) for plot, png in pictures.items()),
        *(_table(table) for table in tables[1:]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _table(table: Table) -> str:
    head, *lines = table.lines
    rows = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    rows += ["".join(_cell(cell) for cell in line) for line in lines]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n{body}\n</table></div>'


def _cell(text: str) -> str:
    mark = "met" if text.endswith(MET) else "missed" if text.endswith(MISSED) else ""
    return f'<td class="{mark}">{escape(text)}</td>' if mark else f"<td>{escape(text)}</td>"


def _picture(plot: Plot, png: bytes) -> str:
    data = b64encode(png).decode()
    return (
        f"<h2>{escape(plot.title)}</h2>\n<p>{escape(plot.text)}</p>\n"
        f'<img alt="{escape(plot.title)}" src="data:image/png;base64,{data}">'
    )
