"""Ingest and archive hits, against a COPY of the same bytes on the same server.

Ingest goes into a paused rater: nothing of it is rated while it is measured. Hits send a workflow
again that has just been rated.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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
    for uploads in (1, 2):
        yield from _ingest(stack, rows=rows, rounds=rounds, uploads=uploads)


def _ingest(stack: Stack, *, rows: int, rounds: int, uploads: int) -> Iterator[Figure]:
    copied, taken, web_us, postgres_us, foreign = [], [], [], [], []
    for round_ in range(rounds):
        bodies = [
            texts.bodies(rows, seed=round_ * 10 + n, prefix=f"ingest{uploads}-{round_}-{n}")
            for n in range(uploads)
        ]
        copied.append(floors.copy_bytes(stack, bodies[0]).rate)
        meter = Meter(stack.home)
        began_at = time.perf_counter()
        with ThreadPoolExecutor(uploads) as clients:
            answers = list(clients.map(lambda body: stack.submit("held", body), bodies))
        taken.append(rows * uploads / (time.perf_counter() - began_at))
        cost = meter.read()
        assert [answer["pending"] for answer in answers] == [rows] * uploads, answers
        each = cost.us_each(rows * uploads)
        web_us.append(each["web"])
        postgres_us.append(each["postgres"])
        foreign.append(cost.foreign_cores)
    label = "ingest" if uploads == 1 else f"ingest_{uploads}_at_once"
    kilobytes = len(bodies[0]) / rows / 1_000
    yield Figure(
        name=f"{label}_rows_per_s",
        value=median(taken),
        unit="rows/s",
        ratio_to=COPY,
        ratio=median(taken) / median(copied),
        n=rows * rounds * uploads,
        note=f"{kilobytes:.2f} kB a row; rounds {spread(taken)};"
        f" COPY {number(median(copied))} rows/s; foreign load {max(foreign):.1f} cores at most",
    )
    yield Figure(
        name=f"{label}_cpu_us_per_row",
        value=median(web_us) + median(postgres_us),
        unit="us CPU",
        n=rows * rounds * uploads,
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
