"""What a rater reads of a row."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.autoraters.page_text import MAX_HTML_TAGS, PageText, page_text, read_html


def text_of(**fields: object) -> str:
    return page_text(fields, max_chars=10_000).text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"title": "T", "text": "body"}, "T\nbody"),
        ({"text": "body"}, "body"),
        ({"title": "T"}, "T"),
        ({}, ""),
        ({"title": None, "text": None, "html": None}, ""),
        ({"title": "T", "text": "body", "html": "<p>page"}, "T\nbody"),
        ({"title": "T", "text": " \u200b\n", "html": "<p>page"}, "T\npage"),
        ({"title": " ", "html": "<title>Page's own</title><p>page"}, "Page's own\npage"),
        ({"title": "T", "html": "<title>Page's own</title><p>page"}, "T\npage"),
        ({"text": "  as\t sent\n"}, "  as\t sent\n"),
    ],
)
def test_title_and_text_count_and_html_only_without_text(
    fields: dict[str, object], text: str
) -> None:
    assert text_of(**fields) == text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("Hi <b>bo</b>ld<div>a</div>b<br>c", "Hi bold\na\nb\nc"),
        ("<p>one\n   two&nbsp;three</p>\n\n<p>four</p>", "one two three\nfour"),
        ("<table><tr><td>1<td>2<tr><td>3</table>", "1 2\n3"),
        ("<ul><li>x<li>y</ul>", "x\ny"),
        ("<p>a &amp; b &#x263A;", "a & b \u263a"),
        ("<script>no()</script><style>p{}</style>yes<noscript>no</noscript>", "yes"),
        ("<template><p>no</template><svg><text>no</text></svg>yes<!-- no -->", "yes"),
        ("<svg><svg><p></svg>yes", "yes"),
        ('<a title="a > b" href=x>link</a>', "link"),
        ("<p class='x\" y'>quoted", "quoted"),
        ("<div", ""),
        ("a < b and c > d", "a < b and c > d"),
        ("<frameset><frame></frameset>", ""),
        ("", ""),
    ],
)
def test_visible_text_is_kept_block_by_block(html: str, text: str) -> None:
    assert read_html(html)[1] == text


def test_what_is_too_long_is_cut_and_said() -> None:
    page = page_text({"title": "T", "text": "x" * 100}, max_chars=50)

    assert page == PageText(
        text="T\n" + "x" * 48, lengths={"characters": {"original": 102, "used": 50}}
    )


def test_a_page_with_too_many_tags_is_cut_and_said() -> None:
    html = "<p>x" * (MAX_HTML_TAGS + 1)

    page = page_text({"html": html}, max_chars=1_000_000)

    assert page.lengths == {"html_characters": {"original": len(html), "used": len(html) - 4}}
    assert page.text.count("x") == MAX_HTML_TAGS


@pytest.mark.parametrize(
    "html",
    [
        pytest.param("<div>" * 200_000 + "x", id="deeply nested"),
        pytest.param("<b><i><u><a><p>" * 40_000, id="misnested"),
        pytest.param(f"<div {' '.join(f'a{i}' for i in range(100_000))}>x", id="attributes"),
        pytest.param(f"x</div {' '.join(f'a{i}' for i in range(100_000))}>", id="at a closing tag"),
        pytest.param("<a" * 1_000_000, id="tags without end"),
        pytest.param("<a ='" * 500_000, id="quotes without end"),
        pytest.param("<" * 2_000_000, id="angles"),
        pytest.param("<!--" * 500_000, id="comments"),
        pytest.param("<svg>" * 200_000, id="invisible, nested"),
    ],
)
def test_a_hostile_page_costs_less_than_a_second(html: str) -> None:
    began = time.process_time()

    page_text({"html": html}, max_chars=1_000)

    assert time.process_time() - began < 1.0


@given(st.text(alphabet="<>/ab =\"'!-\n&;\u2029", max_size=200))
def test_no_page_raises_or_leaves_blank_lines(html: str) -> None:
    title, text = read_html(html)

    assert "\u2029" not in title + text
    assert all(line.strip() for line in text.split("\n") if text)
