"""The text a rater reads of a row: title and text, or the text of its HTML page.

Pages come from the open web, so everything here is linear in their length: a page can be cut
(which is always reported, never silent), but it cannot hold an executor for long. Ruby, forms and
hidden elements are kept as text; nothing is laid out or run.
"""

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from selectolax.lexbor import LexborHTMLParser, LexborNode

from workers.autoraters.protocol import Item

MAX_HTML_CHARS = 4 * 1024 * 1024
MAX_HTML_TAGS = 10_000
"""The parser walks up its open elements at each tag: 10,000 nested ones take 0.1 s, ten times as
many a hundred times as long."""

INVISIBLE = "script, style, noscript, template, head, iframe, svg, canvas, object"
BLOCKS = (
    "address, article, aside, blockquote, br, caption, center, dd, details, dialog, div, dl, dt,"
    "fieldset, figcaption, figure, footer, form, h1, h2, h3, h4, h5, h6, header, hr, legend, li,"
    "main, menu, nav, ol, option, p, pre, section, summary, table, tr, ul"
)
CELLS = "td, th"

BREAK = "\N{PARAGRAPH SEPARATOR}"
"""Marks block borders while a page is read: line breaks in the source are only white space."""

TAG = re.compile(
    r"""<(/?[a-zA-Z][^\s/>]*+)"""
    r"""(?:[^>=]++|=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z)|[^\s>"'][^\s>]*+)?+)*+(?:>|\Z)"""
)
"""A whole tag, as the HTML standard ends it; possessive, so that no page makes it backtrack."""

ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"


class PageText(NamedTuple):
    """What the model gets to read, and by how much it was shortened (never, for most rows)."""

    text: str
    lengths: Mapping[str, Mapping[str, int]]
    """By unit, `{"original": n, "used": m}`; empty when nothing was cut."""

    @property
    def blank(self) -> bool:
        return is_blank(self.text)


def page_text(item: Item, *, max_chars: int) -> PageText:
    """Return the row's title and text; its HTML counts only where it has no text."""
    title, body = _string(item, "title"), _string(item, "text")
    lengths: dict[str, Mapping[str, int]] = {}
    if (textless := is_blank(body)) and not is_blank(html := _string(item, "html")):
        page = bounded(html)
        if len(page) < len(html):
            lengths["html_characters"] = {"original": len(html), "used": len(page)}
        page_title, body = read_html(page)
        title = page_title if is_blank(title) else title
        textless = is_blank(body)
    if is_blank(title):
        text = "" if textless else body
    else:
        text = title if textless else f"{title}\n{body}"
    if len(text) > max_chars:
        lengths["characters"] = {"original": len(text), "used": max_chars}
        text = text[:max_chars]
    return PageText(text, lengths)


def bounded(html: str) -> str:
    """Return the part of a page that is read at all: its first `MAX_HTML_TAGS` tags."""
    html = html[:MAX_HTML_CHARS]
    if html.count("<") <= MAX_HTML_TAGS:
        return html
    beyond = next(islice(TAG.finditer(html), MAX_HTML_TAGS, None), None)
    return html if beyond is None else html[: beyond.start()]


def read_html(html: str) -> tuple[str, str]:
    """Return a page's title and its visible text, one line a block.

    Attributes go first: a tag with 100,000 of them keeps the parser busy for 40 s.
    """
    document = LexborHTMLParser(TAG.sub(r"<\1>", html))
    title = document.css_first("title")
    title_text = collapse(title.text()) if title is not None else ""
    if document.body is None:
        return title_text, ""
    for node in document.css(INVISIBLE):
        node.decompose()
    for node in document.css(BLOCKS):
        _surround(node, BREAK)
    for node in document.css(CELLS):
        _surround(node, " ")
    lines = (collapse(line) for line in document.body.text().split(BREAK))
    return title_text, "\n".join(line for line in lines if line)


def collapse(text: str) -> str:
    """Return the text with each run of white space as one blank."""
    return " ".join(text.split())


def is_blank(text: str) -> bool:
    """Say whether a reader would see nothing."""
    # Nearly every text shows it by its first character; stripping may copy all of it.
    return not text[:1].isalnum() and not text.strip().strip(ZERO_WIDTH).strip()


def _string(item: Item, field: str) -> str:
    value: Any = item.get(field)
    return value if isinstance(value, str) else ""


def _surround(node: LexborNode, separator: str) -> None:
    node.insert_before(separator)
    node.insert_after(separator)
