"""Urgent work beside a backlog: how long 120 requests take that a person waits for.

The floor is the same workflow alone on an idle stack, in the same run.
"""

from collections.abc import Iterator

from tests.acceptance.stack import Stack, Stub, until
from tests.benchmarks import running, texts
from tests.benchmarks.report import Figure, median, spread

RATER = "slow"
ROWS = 120
WINDOW = 16
BACKLOG_PRIORITY, URGENT_PRIORITY = 10, 90
ALONE = "the same workflow alone on the stack"
OPEN = """
    SELECT count(*) FROM fulfillment_batch b JOIN fulfillment_workflow w ON w.id = b.workflow_id
    WHERE w.public_id = %s AND b.state <> 4
"""


def urgent(stack: Stack, stub: Stub, *, backlog: int, rounds: int) -> Iterator[Figure]:
    """Measure urgent workflows while one of low priority keeps the model busy."""
    stack.register(stub, rater=RATER, max_concurrency=WINDOW)
    alone = [_seconds(stack, f"alone{i}") for i in range(rounds + 1)][1:]
    backlog_id = str(
        stack.submit(
            RATER, texts.bodies(backlog, seed=1, prefix="backlog"), priority=BACKLOG_PRIORITY
        )["id"]
    )
    until(
        lambda: stack.query(OPEN, backlog_id)[0][0] < backlog // 12 - 2 * WINDOW,
        timeout_s=30,
        what="the backlog is being rated",
    )
    beside = [_seconds(stack, f"urgent{i}") for i in range(rounds)]
    ((left,),) = stack.query(OPEN, backlog_id)
    assert left > WINDOW, "the backlog was too short"
    running.wait_completed(stack, backlog_id)
    yield Figure(
        name="urgent_seconds_beside_backlog",
        value=median(beside),
        unit="s",
        ratio_to=ALONE,
        ratio=median(alone) / median(beside),
        n=ROWS * rounds,
        note=f"{ROWS} requests of priority {URGENT_PRIORITY} until COMPLETED, upload included,"
        f" beside {backlog:,} of priority {BACKLOG_PRIORITY}; model: {WINDOW} calls of 50 ms at a"
        f" time; beside {spread(beside)}, alone {median(alone):.2f} s",
    )


def _seconds(stack: Stack, prefix: str) -> float:
    body = texts.bodies(ROWS, seed=2, prefix=prefix)
    return running.rate(stack, RATER, body, priority=URGENT_PRIORITY).finished_s
