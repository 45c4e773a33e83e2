from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.batching import (
    MAX_BATCH_SIZE,
    cut,
    halves,
    indices_of,
    mask_of,
    merge_equal,
)

fingerprints = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]))
index_sets = st.sets(st.integers(0, MAX_BATCH_SIZE - 1))


def test_equal_rows_become_one_item_at_the_place_of_the_first() -> None:
    assert merge_equal([b"x", b"y", b"x", b"z", b"y"]) == [[0, 2], [1, 4], [3]]


@given(chunk=fingerprints)
def test_merging_puts_every_row_into_exactly_one_item(chunk: list[bytes]) -> None:
    merged = merge_equal(chunk)

    assert sorted(position for item in merged for position in item) == list(range(len(chunk)))


@given(chunk=fingerprints)
def test_rows_share_an_item_exactly_if_they_are_equal(chunk: list[bytes]) -> None:
    merged = merge_equal(chunk)

    assert [{chunk[position] for position in item} for item in merged] == [
        {fingerprint} for fingerprint in dict.fromkeys(chunk)
    ]


@given(chunk=fingerprints)
def test_the_first_row_of_an_item_comes_first(chunk: list[bytes]) -> None:
    merged = merge_equal(chunk)

    assert all(item == sorted(item) for item in merged)
    assert merged == sorted(merged)


@given(items=st.lists(st.integers(), max_size=200), size=st.integers(1, MAX_BATCH_SIZE))
def test_only_the_last_batch_may_be_short(items: list[int], size: int) -> None:
    batches = cut(items, size)

    assert [item for batch in batches for item in batch] == items
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(1 <= len(batch) <= size for batch in batches[-1:])


@pytest.mark.parametrize("size", [0, MAX_BATCH_SIZE + 1])
def test_a_batch_size_that_no_mask_can_hold_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"batch size {size} is outside"):
        cut([1], size)


@given(indices=st.lists(st.integers(), min_size=2))
def test_halves_are_a_fair_cut(indices: Sequence[int]) -> None:
    first, second = halves(indices)

    assert [*first, *second] == list(indices)
    assert 0 <= len(first) - len(second) <= 1


@given(batch=st.integers(1, MAX_BATCH_SIZE), bad=st.integers(0))
def test_bisecting_finds_the_bad_item_in_few_steps(batch: int, bad: int) -> None:
    bad %= batch
    suspects: Sequence[int] = range(batch)
    steps = 0

    while len(suspects) > 1:
        suspects = next(half for half in halves(suspects) if bad in half)
        steps += 1

    assert list(suspects) == [bad]
    assert steps <= 6


@pytest.mark.parametrize("indices", [[], [3]])
def test_what_stands_alone_is_not_bisected(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot be bisected"):
        halves(indices)


@given(indices=index_sets)
def test_a_mask_says_which_items_it_was_made_of(indices: set[int]) -> None:
    assert indices_of(mask_of(indices)) == sorted(indices)


@given(mask=st.integers(0, (1 << MAX_BATCH_SIZE) - 1))
def test_items_make_the_mask_that_they_were_read_from(mask: int) -> None:
    assert mask_of(indices_of(mask)) == mask


@given(one=index_sets, other=index_sets)
def test_masks_combine_as_sets_do(one: set[int], other: set[int]) -> None:
    assert mask_of(one) & mask_of(other) == mask_of(one & other)
    assert mask_of(one) & ~mask_of(other) == mask_of(one - other)


def test_the_fullest_mask_fits_a_signed_bigint() -> None:
    assert mask_of(range(MAX_BATCH_SIZE)) < 2**63


@pytest.mark.parametrize("index", [-1, MAX_BATCH_SIZE])
def test_an_item_outside_the_mask_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"item {index} is outside"):
        mask_of([index])


@pytest.mark.parametrize("mask", [-1, 1 << MAX_BATCH_SIZE])
def test_a_number_that_is_no_mask_is_refused(mask: int) -> None:
    with pytest.raises(ValueError, match="is no mask"):
        indices_of(mask)
