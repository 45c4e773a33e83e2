"""Results as files: rows a second in each format, and what memory they take.

Run by `inside`: the writers of the REST view, without HTTP. The floor is a COPY of the same columns
to the same process.
"""

import io
import time
from collections.abc import Callable, Iterable, Iterator

import psutil
from django.db import connection

from fulfillment import results
from fulfillment.exports import text
from fulfillment.exports.parquet import parquet
from fulfillment.models import Workflow
from fulfillment.policy.lifecycle import WorkflowState
from fulfillment.results import Page
from tests.benchmarks import floors, queue_rows
from tests.benchmarks.report import Figure, number

COPY = "COPY of the same columns as CSV"
WRITERS: dict[str, Callable[[Iterable[Page]], Iterator[bytes]]] = {
    "jsonl": text.jsonl,
    "jsonl_gzip": lambda pages: text.gzipped(text.jsonl(pages)),
    "csv": lambda pages: text.delimited(pages, header=True),
    "parquet": parquet,
}


def measure(*, quick: bool) -> Iterator[Figure]:
    """Measure each format on one workflow."""
    rows = 100_000 if quick else 1_000_000
    workflow = _workflow(rows)
    floor = rows / _copy(workflow)
    for name, writer in WRITERS.items():
        process = psutil.Process()
        list(writer([results.page(workflow, after=None, limit=5_000, state=None)]))
        before, most, size = process.memory_info().rss, 0, 0
        began_at = time.perf_counter()
        for part in writer(results.everything(workflow, after=None, state=None)):
            size += len(part)
            most = max(most, process.memory_info().rss - before)
        rate = rows / (time.perf_counter() - began_at)
        yield Figure(
            name=f"export_{name}_rows_per_s",
            value=rate,
            unit="rows/s",
            ratio_to=COPY,
            ratio=rate / floor,
            n=rows,
            note=f"{size / rows:.0f} bytes a row; memory grows by {most / 2**20:.1f} MiB at most;"
            f" the floor: {number(floor)} rows/s",
        )


def _workflow(rows: int) -> Workflow:
    version = queue_rows.version()
    (workflow_id,) = queue_rows.workflows(1, version=version, state=WorkflowState.COMPLETED)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO fulfillment_ratingrequest
                (id, workflow_id, request_id, request_digest, query_id, result_id, side,
                 fingerprint, state, source, score, label, output, rated_at, attempts)
            SELECT (%(id)s::bigint << 31) | n, %(id)s, 'request-' || n, gen_random_uuid(),
                   'query-' || n / 10, 'document-' || n, 1 + n %% 2, gen_random_uuid(), 1, 2,
                   random() * 4, 'fairly relevant',
                   jsonb_build_object('why', md5(n::text)), now(), 1
            FROM generate_series(0, %(rows)s - 1) AS n
            """,
            {"id": workflow_id, "rows": rows},
        )
    queue_rows.analyze()
    return Workflow.objects.select_related("rater", "rater_version").get(pk=workflow_id)


def _copy(workflow: Workflow) -> float:
    """Return the seconds of a COPY."""

    class Sink(io.RawIOBase):
        def write(self, data: object) -> int:
            return len(data)  # type: ignore[arg-type]

    began_at = time.perf_counter()
    with connection.cursor() as cursor:
        cursor.cursor.copy_expert(
            f"COPY (SELECT {floors.RESULT_COLUMNS} FROM fulfillment_ratingrequest"
            f" WHERE workflow_id = {workflow.pk:d}) TO STDOUT (FORMAT csv)",
            Sink(),
        )
    return time.perf_counter() - began_at
