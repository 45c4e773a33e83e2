"""Queues of any size by SQL: workflows, batches and payloads as intake and executors leave them."""

import uuid
from datetime import timedelta

from django.db import connection

from fulfillment.clock import database_now
from fulfillment.models import Mode, Rater, RaterVersion, Workflow
from fulfillment.policy.lifecycle import FINISHED, BatchState, WorkflowState

ITEMS = 12


def version(
    rater: str = "bench", *, model_id: str = "bench", mode: str = Mode.ISOLATED
) -> RaterVersion:
    """Store a rater with one version, of a plug-in named `bench`."""
    now = database_now()
    made = Rater.objects.create(
        id=rater, autorater="bench", model_id=model_id, mode=mode, created_at=now
    )
    return RaterVersion.objects.create(
        rater=made,
        number=1,
        digest=uuid.uuid4(),
        spec={
            "model_id": model_id,
            "model_version": "",
            "autorater": "bench",
            "plugin_version": "1",
        },
        created_at=now,
    )


def workflows(
    count: int, *, version: RaterVersion, state: WorkflowState, ago: timedelta = timedelta(hours=1)
) -> list[int]:
    """Store workflows of fifty owners with their stats, closed `ago`; finished ones ended then."""
    at = database_now() - ago
    is_finished = state in FINISHED
    pattern = Workflow.objects.create(
        rater=version.rater,
        rater_version=version,
        owner="bench",
        state=state,
        next_position=ITEMS,
        created_at=at,
        closed_at=at,
        finished_at=at if is_finished else None,
        deadline_at=at + timedelta(days=1),
        ends_at=at + timedelta(days=1),
    )
    changed = {
        "public_id": "'wf_' || replace(gen_random_uuid()::text, '-', '')",
        "owner": "'owner-' || n % 50",
    }
    columns = [f.column for f in Workflow._meta.local_concrete_fields if f.column != "id"]
    values = ", ".join(changed.get(column, column) for column in columns)
    with connection.cursor() as cursor:
        # Copies of one row, so that columns to come need no word here.
        cursor.execute(
            f"""
            WITH made AS (
                INSERT INTO fulfillment_workflow ({", ".join(columns)})
                SELECT {values} FROM fulfillment_workflow, generate_series(1, %s::int) n
                WHERE id = %s::int RETURNING id
            ), counted AS (
                INSERT INTO fulfillment_workflowstats (workflow_id, received, completed)
                SELECT id, {ITEMS}, {ITEMS if is_finished else 0} FROM made
            )
            SELECT id FROM made
            """.replace("n % 50", "n %% 50"),
            [count, pattern.pk],
        )
        made = [row[0] for row in cursor.fetchall()]
    pattern.delete()
    return made


def batches(
    workflow_ids: list[int], each: int, *, state: BatchState = BatchState.READY, payload: int = 200
) -> None:
    """Give each workflow `each` batches of 12 items with payloads of so many bytes."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH made AS (
                INSERT INTO fulfillment_batch
                    (workflow_id, position, positions, item_of, fingerprints, open_mask, state)
                SELECT w, (b - 1) * {ITEMS},
                       ARRAY(SELECT (b - 1) * {ITEMS} + i FROM generate_series(0, {ITEMS - 1}) i),
                       '{{0,1,2,3,4,5,6,7,8,9,10,11}}',
                       ARRAY[{", ".join(["gen_random_uuid()"] * ITEMS)}],
                       CASE WHEN %s = {BatchState.DONE:d} THEN 0 ELSE {(1 << ITEMS) - 1} END, %s
                FROM unnest(%s::bigint[]) w, generate_series(1, %s) b
                RETURNING id, workflow_id
            )
            INSERT INTO fulfillment_batchpayload (batch_id, workflow_id, data)
            SELECT id, workflow_id, decode(repeat('5a', %s), 'hex') FROM made
            """,
            [state, state, workflow_ids, each, payload],
        )


def enter(database: str) -> None:
    """Go on in another database of the server."""
    connection.close()
    connection.settings_dict["NAME"] = database


def copy_database(name: str) -> None:
    """Create a database like this one, to which nobody else may be connected."""
    this = connection.settings_dict["NAME"]
    enter("postgres")
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} TEMPLATE {this}")
    enter(this)


def analyze() -> None:
    """Let the planner know, as autovacuum would within a minute."""
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
