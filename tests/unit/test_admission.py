"""Whether a new upload may come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulfillment.policy.admission import Admission, Disk, admit

sizes = st.integers(min_value=0, max_value=1 << 50)
disks = st.none() | st.builds(Disk, free_bytes=sizes, floor_bytes=sizes)


@pytest.mark.parametrize(
    ("stored", "free", "named"),
    [
        (100, 10, None),
        (101, 10, "AIRS_MAX_BACKLOG_BYTES"),
        (0, 9, "AIRS_MIN_FREE_BYTES"),
        (101, 9, "AIRS_MAX_BACKLOG_BYTES"),
    ],
)
def test_a_refusal_names_the_setting_and_what_it_met(
    stored: int, free: int, named: str | None
) -> None:
    found = admit(stored_bytes=stored, limit_bytes=100, disk=Disk(free_bytes=free, floor_bytes=10))

    assert found.admitted == (named is None)
    if named is not None:
        assert (found.code, found.retry_after_s) == ("backlog_full", 60.0)
        assert named in found.reason
        assert str(stored if named == "AIRS_MAX_BACKLOG_BYTES" else free) in found.reason


def test_the_disk_of_somebody_elses_database_is_not_judged() -> None:
    assert admit(stored_bytes=0, limit_bytes=1, disk=None).admitted


@given(stored=sizes, limit=sizes, disk=disks)
def test_who_is_refused_is_told_when_to_come_back_and_who_comes_in_is_not(
    stored: int, limit: int, disk: Disk | None
) -> None:
    found = admit(stored_bytes=stored, limit_bytes=limit, disk=disk)

    assert found.reason
    assert bool(found.code) == (found.retry_after_s > 0) == (not found.admitted)


@given(stored=sizes, limit=sizes, disk=disks, less=sizes, more=sizes)
def test_less_work_and_more_room_refuse_nobody_who_came_in(
    stored: int, limit: int, disk: Disk | None, less: int, more: int
) -> None:
    before = admit(stored_bytes=stored, limit_bytes=limit, disk=disk)
    roomier = disk and Disk(free_bytes=disk.free_bytes + more, floor_bytes=disk.floor_bytes)

    after = admit(stored_bytes=max(0, stored - less), limit_bytes=limit + more, disk=roomier)

    assert after.admitted or not before.admitted


@given(stored=sizes, limit=sizes, disk=disks)
def test_backlog_and_disk_are_judged_each_for_itself(
    stored: int, limit: int, disk: Disk | None
) -> None:
    both: Admission = admit(stored_bytes=stored, limit_bytes=limit, disk=disk)
    backlog = admit(stored_bytes=stored, limit_bytes=limit, disk=None)
    room = admit(stored_bytes=0, limit_bytes=limit, disk=disk)

    assert both.admitted == (backlog.admitted and room.admitted)
