import pytest

from workers.model_server import arrays, reader
from workers.model_server.reader import TextReader


@pytest.fixture(scope="module")
def texts() -> TextReader:
    return TextReader(arrays.character_tokenizer(), max_tokens=8)


def test_counts_include_the_markers_and_precede_the_cut(texts: TextReader) -> None:
    short, exact, long = texts.read(["abc", "abcdef", "abcdefghij"])

    assert (short.count, len(short.ids)) == (5, 5)
    assert (exact.count, len(exact.ids)) == (8, 8)
    assert (long.count, len(long.ids)) == (12, 8)


def test_a_cut_text_keeps_its_head_and_the_closing_marker(texts: TextReader) -> None:
    whole, cut = texts.read(["abcdef", "abcdefghij"])

    assert cut.ids == whole.ids


def test_no_text_is_two_markers(texts: TextReader) -> None:
    (empty,) = texts.read([""])

    assert empty.count == len(empty.ids) == 2


def test_order_and_repeats_are_kept(texts: TextReader) -> None:
    found = texts.read(["b", "a", "b"])

    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("text", ["x" * 90 + " ", "ab " * 40])
def test_a_very_long_text_is_read_as_its_head(
    texts: TextReader, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (whole,) = texts.read([text])

    monkeypatch.setattr(reader, "HEAD_CHARACTERS", 30)
    (head,) = texts.read([text])

    assert head.ids == whole.ids
    assert 8 < head.count <= whole.count


def test_blanks_do_not_hide_what_follows_them(
    texts: TextReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "HEAD_CHARACTERS", 30)

    blank, plain = texts.read([" " * 40 + "abc", "abc"])

    assert blank == plain
