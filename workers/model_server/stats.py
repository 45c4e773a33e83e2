"""The account of `GET /v2/models/{m}/stats`: what the host agent reads, and Triton's statistics."""

from typing import Any

from workers.model_server.metadata import model_statistics
from workers.model_server.meter import Meter
from workers.model_server.scoring import Model


def account(
    meter: Meter,
    now: float,
    *,
    name: str,
    model: Model | None,
    calls_ok: int,
    calls_failed: int,
) -> dict[str, Any]:
    """Totals since the start, and the ratios that follow from them (None before any batch)."""
    busy_s, lane_s, uptime_s = (
        meter.busy_seconds(now),
        meter.lane_seconds(now),
        meter.uptime_seconds(now),
    )
    lanes = 0 if model is None else model.serving.lanes
    statistics = model_statistics(
        name,
        "" if model is None else model.version,
        calls_ok=calls_ok,
        calls_failed=calls_failed,
        rows=meter.predictions,
        batches=meter.batches,
        busy_s=busy_s,
        queue_s=meter.waits.total_s,
        waits=meter.waits.count,
    )
    return {
        "model_version": None if model is None else model.version,
        "devices": 0 if model is None else model.serving.shaping.devices,
        "lanes": lanes,
        "figures": None if model is None else model.chosen.account,
        "busy_seconds": busy_s,
        "lane_seconds": lane_s,
        "uptime_seconds": uptime_s,
        "duty_cycle": meter.duty_cycle(now),
        "slot_occupancy": ratio(lane_s, lanes * uptime_s),
        "rows_total": meter.predictions,
        "predictions_total": meter.predictions,
        "sequences_total": meter.sequences,
        "batches_total": meter.batches,
        "batch_fill": ratio(meter.sequences, meter.full_rows),
        "real_tokens_total": meter.real_tokens,
        "padded_tokens_total": meter.padded_tokens,
        "padding_waste": ratio(meter.padded_tokens - meter.real_tokens, meter.padded_tokens),
        "queue_wait_seconds_mean": ratio(meter.waits.total_s, meter.waits.count),
        "model_stats": [statistics],
    }


def ratio(part: float, whole: float) -> float | None:
    """A share, unless there is nothing that it could be a share of."""
    return part / whole if whole else None
