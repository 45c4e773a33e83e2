import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment import documents

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)


def exact(value: Any) -> str:
    """Return a text that tells 1, 1.0 and True apart."""
    return json.dumps(value)


@given(values)
def test_what_is_dumped_is_loaded_again_exactly(value: Any) -> None:
    assert exact(documents.load(documents.dump(value))) == exact(value)


@given(values)
def test_a_document_is_one_line_of_json(value: Any) -> None:
    document = documents.dump(value)

    assert b"\n" not in document
    assert exact(json.loads(document)) == exact(value)


@pytest.mark.parametrize("name", ["context", "extra", "n"])
@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63) - 1, 2**70 + 1, 10**400 + 1])
def test_integers_beyond_64_bits_survive_wherever_they_stand(name: str, number: int) -> None:
    value = {"context": {"a": 1.5}, name: [number]}

    assert documents.load(documents.dump(value)) == value
    assert documents.unpack(documents.pack([value, "x" * 5_000])) == [value, "x" * 5_000]


@given(st.lists(st.tuples(values, st.none() | st.text("0123456789abcdef", min_size=1)), max_size=4))
def test_pairs_of_documents_are_the_document_of_the_pairs(
    pairs: list[tuple[Any, str | None]],
) -> None:
    document = documents.pairs([(documents.dump(value), digits) for value, digits in pairs])

    assert exact(documents.load(document)) == exact([list(pair) for pair in pairs])
    assert documents.expanded(documents.compressed(document)) == document


@given(values, st.sampled_from([0, 1_000, 1_020, 1_030, 5_000]))
def test_what_is_packed_is_unpacked_again(value: Any, length: int) -> None:
    assert exact(documents.unpack(documents.pack([value, "x" * length]))) == exact(
        [value, "x" * length]
    )


def test_long_documents_are_compressed_and_short_ones_are_not() -> None:
    short, long = documents.pack("x" * 100), documents.pack("word " * 2_000)

    assert short == b'"' + b"x" * 100 + b'"'
    assert len(long) < 500
    assert json.loads(zlib.decompress(long)) == "word " * 2_000


def test_what_does_not_get_shorter_is_left_alone() -> None:
    noise = "".join(chr(0x4E00 + n * 7_919 % 20_000) for n in range(20_000))

    assert documents.unpack(documents.pack(noise)) == noise
    assert len(documents.pack(noise)) <= len(documents.dump(noise))
