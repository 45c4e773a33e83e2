"""What a rating costs to keep and to find: bytes, log, look-ups, and what 5.4 billion would cost.

Run by `inside`. Ratings are made by SQL with random fingerprints and digests, as hashes are; the
last ones are appended by the very statement of a finish. 5.4 billion live ratings are the paper's:
100 million requests a day of which 60 % are new, for 90 days.
"""

import math
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.db import connection, transaction

from fulfillment import archive, outcomes, scores
from fulfillment.clock import database_now
from fulfillment.scores import Scored, ScoredBatch
from tests.benchmarks import queue_rows
from tests.benchmarks.report import Figure, number

LIVE = 5_400_000_000
APPENDED = 96 * 400
A_MESSAGE = 96
"""Ratings of one transaction: eight batches of twelve."""
LOOKED_UP = 4_000
"""Fingerprints of one statement: a chunk of intake."""
ROUNDS = 20
HITS = 0.4
FIELD_BYTES = 8 + 16 + 8 + 8 + 8 + 16 + 8 + 1
"""id, fingerprint, rater version, workflow, score, digest of the url, produced_at, reusable."""
PAGE = 8_192
PAGE_READ_US = 100.0
"""One random read of an NVMe drive, nothing beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """Bytes a rating of the table and of each index."""

    heap: float
    indexes: dict[str, float]

    @property
    def total(self) -> float:
        return self.heap + sum(self.indexes.values())


def measure(*, quick: bool) -> Iterator[Figure]:
    """Measure an archive of ten million ratings (a million if quick)."""
    rows = 1_000_000 if quick else 10_000_000
    version = queue_rows.version().pk
    _load(rows, version)
    yield _storage(rows)
    yield from _appending(version)
    yield from _looking_up(rows)


def _load(rows: int, version: int) -> None:
    """Fill the table without its secondary indexes, and build them then: minutes less."""
    with connection.cursor() as cursor:
        cursor.execute("SET maintenance_work_mem = '512MB'")
        cursor.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'fulfillment_rating'"
            " AND indexname <> 'fulfillment_rating_pkey'"
        )
        indexes = cursor.fetchall()
        for name, _ in indexes:
            cursor.execute(f"DROP INDEX {name}")
        cursor.execute(
            """
            INSERT INTO fulfillment_rating (fingerprint, rater_version_id, workflow_id, score,
                                            url_digest, produced_at, reusable)
            SELECT gen_random_uuid(), %s, n / 5000, random() * 4, gen_random_uuid(),
                   now() - make_interval(secs => (%s - n) * 0.0001), true
            FROM generate_series(1, %s) n
            """,
            [version, rows, rows],
        )
        for _, definition in indexes:
            cursor.execute(definition)
        cursor.execute("VACUUM (ANALYZE) fulfillment_rating")


def _sizes(rows: int) -> _Table:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_relation_size('fulfillment_rating')")
        (heap,) = cursor.fetchone()
        cursor.execute(
            "SELECT indexrelid::regclass::text, pg_relation_size(indexrelid) FROM pg_index"
            " WHERE indrelid = 'fulfillment_rating'::regclass ORDER BY 1"
        )
        return _Table(
            heap=heap / rows, indexes={name: size / rows for name, size in cursor.fetchall()}
        )


def _storage(rows: int) -> Figure:
    table = _sizes(rows)
    parts = ", ".join(f"{name.removeprefix('fulfillment_')} {b:.0f}" for name, b in
                      table.indexes.items())  # fmt: skip
    return Figure(
        name="archive_bytes_per_rating",
        value=table.total,
        unit="bytes",
        ratio_to=f"the sum of its fields, {FIELD_BYTES} bytes",
        ratio=FIELD_BYTES / table.total,
        n=rows,
        note=f"table {table.heap:.0f}, {parts} (freshly built; random inserts widen those of"
        f" digests by up to 1.4); {LIVE / 1e9:.1f} billion: {table.total * LIVE / 1e12:.2f} TB",
    )


def _appending(version: int) -> Iterator[Figure]:
    """Append as a finish does: right after a checkpoint, and when its pages were logged whole."""
    with connection.cursor() as cursor:
        cursor.execute("CHECKPOINT")
    first = _append(version)
    second = _append(version)
    yield Figure(
        name="archive_wal_bytes_per_rating",
        value=second[0],
        unit="bytes",
        n=2 * APPENDED,
        note=f"right after a checkpoint {first[0]:,.0f}, the next as many {second[0]:,.0f}: whole"
        " pages of three random indexes, so long checkpoints pay",
    )
    yield Figure(
        name="archive_appends_per_s",
        value=APPENDED / second[1],
        unit="ratings/s",
        n=APPENDED,
        note=f"one connection, {A_MESSAGE} a transaction; right after a checkpoint"
        f" {APPENDED / first[1]:,.0f}",
    )


def _append(version: int) -> tuple[float, float]:
    """Return the bytes of log a rating and the seconds of all."""
    with connection.cursor() as cursor:
        now = database_now()
        messages = [_message(version) for _ in range(APPENDED // A_MESSAGE)]
        before = _log_position()
        began_at = time.perf_counter()
        for message in messages:
            with transaction.atomic():
                scores.write(cursor, [message], now=now, progress=outcomes.no_progress())
        took_s = time.perf_counter() - began_at
        return (_log_position() - before) / APPENDED, took_s


def _log_position() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        (position,) = cursor.fetchone()
    return int(position)


def _message(version: int) -> ScoredBatch:
    return ScoredBatch(
        batch_id=0,
        workflow_id=1,
        rater_version_id=version,
        reusable=True,
        fingerprints=[uuid.uuid4().hex for _ in range(A_MESSAGE)],
        items=[
            (n, Scored(score=1.0, url_digest=uuid.uuid4().hex), (), 1) for n in range(A_MESSAGE)
        ],
    )


def _looking_up(rows: int) -> Iterator[Figure]:
    now = database_now()
    after = now - timedelta(days=90)
    seeds = [_wanted(rows, seed) for seed in range(ROUNDS)]
    with connection.cursor() as cursor:
        times = []
        for wanted in (*seeds, *seeds):  # the second time all pages are in memory
            began_at = time.perf_counter()
            found = archive.look_up(cursor, wanted, produced_after=after, now=now)
            times.append(time.perf_counter() - began_at)
            assert len(found) == int(LOOKED_UP * HITS)
    cold, warm = sum(times[:ROUNDS]), sum(times[ROUNDS:])
    each_us = warm / ROUNDS / LOOKED_UP * 1e6
    yield Figure(
        name="archive_lookups_per_s",
        value=1e6 / each_us,
        unit="look-ups/s",
        n=ROUNDS * LOOKED_UP,
        note=f"one connection, {LOOKED_UP:,} a statement, {HITS:.0%} hits, {each_us:.1f} us each;"
        f" the first time {ROUNDS * LOOKED_UP / cold:,.0f}/s",
    )
    yield _projected(rows, each_us)


def _wanted(rows: int, seed: int) -> Sequence[str]:
    """Return fingerprints of which a share is in the archive."""
    chance = random.Random(seed)
    ids = chance.sample(range(1, rows + 1), int(LOOKED_UP * HITS))
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT replace(fingerprint::text, '-', '') FROM fulfillment_rating WHERE id = ANY(%s)",
            [ids],
        )
        wanted = [row[0] for row in cursor.fetchall()]
    wanted += (uuid.UUID(int=chance.getrandbits(128)).hex for _ in range(LOOKED_UP - len(wanted)))
    chance.shuffle(wanted)
    return wanted


def _projected(rows: int, each_us: float) -> Figure:
    """Project to the paper's archive, which no memory holds.

    The index grows by levels: its fan-out is measured, the levels above the leaves stay in memory
    (a few hundred megabytes), each level costs its share of what one look-up costs now. Every
    look-up reads a leaf from the disk, every hit a page of the table too.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT reltuples / relpages FROM pg_class WHERE relname = 'rating_fingerprint'"
        )
        (fan_out,) = cursor.fetchone()
    now_levels, then_levels = _levels(rows, fan_out), _levels(LIVE, fan_out)
    cpu_us = each_us * then_levels / now_levels
    reads = 1 + HITS
    disk_us = reads * PAGE_READ_US
    upper_mb = LIVE / fan_out / fan_out * PAGE / 1e6
    return Figure(
        name="archive_lookups_per_s_projected",
        value=1e6 / (cpu_us + disk_us),
        unit="look-ups/s",
        n=0,
        note=f"{LIVE / 1e9:.1f} billion, one connection: {then_levels} levels of {fan_out:.0f}"
        f" entries instead of {now_levels} ({upper_mb:,.0f} MB above the leaves in memory),"
        f" {cpu_us:.1f} us; and {reads:.1f} pages from a disk of {PAGE_READ_US:.0f} us one after"
        f" the other; in memory {number(1e6 / cpu_us)}/s; connections read beside each other",
    )


def _levels(rows: int, fan_out: float) -> int:
    return math.ceil(math.log(rows) / math.log(fan_out))
