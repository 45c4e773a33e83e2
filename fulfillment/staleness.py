"""Reading what shadow refresh has found: how scores differ by the age of the archive's answer."""

from dataclasses import asdict
from typing import Any

from django.db import connection

from fulfillment import raters
from fulfillment.policy.staleness import AGE_BOUNDS_S, Sums, drift


def report(rater_id: str) -> dict[str, Any]:
    """Return the differences of all versions of a rater by age bucket; raise NotFound.

    A version is compared with itself only: what differs is chance in the model, pages that an
    autorater fetches, or a model that changed behind its name.
    """
    rater = raters.find(rater_id)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT width_bucket(s.age_s, %s::int[]) AS bucket, count(*), sum(d.by), sum(abs(d.by)),
                   sum(d.by * d.by), count(*) FILTER (WHERE abs(d.by) > 0.01 * d.scale),
                   count(*) FILTER (WHERE abs(d.by) > 0.1 * d.scale), min(s.recorded_at),
                   max(s.recorded_at)
            FROM fulfillment_shadowscore s
            JOIN fulfillment_raterversion v ON v.id = s.rater_version_id
            CROSS JOIN LATERAL (
                SELECT s.new_score - s.old_score AS by,
                       (v.spec->>'score_max')::float8 - (v.spec->>'score_min')::float8 AS scale
            ) AS d
            WHERE v.rater_id = %s GROUP BY 1 ORDER BY 1
            """,
            [list(AGE_BOUNDS_S), rater.pk],
        )
        rows = cursor.fetchall()
    ends = (0, *AGE_BOUNDS_S, None)
    return {
        "rater": rater.pk,
        "since": min((row[7] for row in rows), default=None),
        "until": max((row[8] for row in rows), default=None),
        "buckets": [
            {
                "age_from_s": ends[bucket],
                "age_to_s": ends[bucket + 1],
                **asdict(
                    drift(
                        Sums(
                            n=n,
                            total=total,
                            total_absolute=absolute,
                            total_squared=squared,
                            over_1_percent=over_1,
                            over_10_percent=over_10,
                        )
                    )
                ),
            }
            for bucket, n, total, absolute, squared, over_1, over_10, _, _ in rows
        ],
    }
