"""Ingest and archive hits, against a COPY of the same bytes on the same server.

Ingest goes into a paused rater: nothing of it is rated while it is measured. Hits send a workflow
again that has just been rated.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from tests.acceptance.stack import Stack, Stub
from tests.benchmarks import floors, running, texts
from tests.benchmarks.costs import Meter
from tests.benchmarks.report import Figure, median, number, parts, spread

COPY = "bare COPY of the same bytes, one connection"
PAUSED = "UPDATE fulfillment_rater SET paused_at = now(), paused_code = 'bench' WHERE id = %s"


def ingest(stack: Stack, stub: Stub, *, rows: int, rounds: int) -> Iterator[Figure]:
    """Measure the way from a body to rows and batches, new rows only, in turns with the floor."""
    stack.register(stub, rater="held")
    with stack.database() as connection, connection.cursor() as cursor:
        cursor.execute(PAUSED, ["held"])
    copied, taken, web_us, postgres_us, foreign = [], [], [], [], []
    for round_ in range(rounds):
        body = texts.bodies(rows, seed=round_, prefix=f"ingest{round_}")
        copied.append(floors.copy_bytes(stack, body).rate)
        meter = Meter(stack.home)
        began_at = datetime.now(UTC)
        answer = stack.submit("held", body)
        taken.append(rows / (datetime.now(UTC) - began_at).total_seconds())
        cost = meter.read()
        assert answer["pending"] == rows, answer
        each = cost.us_each(rows)
        web_us.append(each["web"])
        postgres_us.append(each["postgres"])
        foreign.append(cost.foreign_cores)
    kilobytes = len(body) / rows / 1_000
    yield Figure(
        name="ingest_rows_per_s",
        value=median(taken),
        unit="rows/s",
        ratio_to=COPY,
        ratio=median(taken) / median(copied),
        n=rows * rounds,
        note=f"{kilobytes:.2f} kB a row, one upload; rounds {spread(taken)};"
        f" COPY {number(median(copied))} rows/s; foreign load {max(foreign):.1f} cores at most",
    )
    yield Figure(
        name="ingest_cpu_us_per_row",
        value=median(web_us) + median(postgres_us),
        unit="us CPU",
        n=rows * rounds,
        note=f"web {median(web_us):.0f}, postgres {median(postgres_us):.0f}",
    )


def archive_hits(stack: Stack, rater: str, body: bytes, *, rounds: int) -> Iterator[Figure]:
    """Measure a workflow whose rows were all rated before, until it is COMPLETED."""
    rows = body.count(b"\n")
    copied, done, cpu_us, foreign = [], [], [], []
    for _ in range(rounds):
        copied.append(floors.copy_bytes(stack, body).rate)
        run = running.rate(stack, rater, body)
        sources = stack.workflow(run.workflow_id)["sources"]
        assert sources["archive"] == rows, sources
        done.append(rows / run.finished_s)
        cpu_us.append(run.cost.us(rows))
        foreign.append(run.cost.foreign_cores)
    yield Figure(
        name="archive_hits_rows_per_s",
        value=median(done),
        unit="rows/s",
        ratio_to=COPY,
        ratio=median(done) / median(copied),
        n=rows * rounds,
        note=f"{median(cpu_us):.0f} us CPU a row ({parts(run.cost.us_each(rows))});"
        f" rounds {spread(done)}; foreign load {max(foreign):.1f} cores at most",
    )
