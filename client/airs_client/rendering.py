"""Values as text for people. Pure: what is written where is left to others."""

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.cells import cell_len

from airs_client.errors import AirsError, ApiError, ProblemItem
from airs_client.results import (
    Decision,
    Distributions,
    Estimate,
    Eta,
    Remedy,
    RowProblem,
    Submission,
    Workflow,
)

_SHOWN_ITEMS = 10


def problem(error: AirsError) -> str:
    """An error with its first faults and what to do about it."""
    lines = [f"error: {error}"]
    if isinstance(error, ApiError):
        lines += _some([_fault(item) for item in error.items])
        origin = f"HTTP {error.status}"
        if error.request_id:
            origin += f", request {error.request_id}"
        lines[0] += f" ({origin})"
    if error.remedy:
        lines.append(error.remedy)
    return "\n".join(printable(line) for line in lines)


def submission(sent: Submission) -> str:
    """What became of an upload, as talk."""
    lines = [f"{sent.accepted:,} rows accepted"]
    if sent.replayed:
        lines = [
            "These rows were sent before; this is the workflow of that time.",
            "Send them with --again to have them rated in a new one.",
        ]
    if sent.workflow.priority_clipped:
        lines.append(sent.workflow.priority_reason)
    if sent.rejected:
        lines += _refused(sent.rejected)
    if sent.warnings:
        lines.append(f"{len(sent.warnings):,} warnings:")
        lines += _some([_row(row) for row in sent.warnings])
    if sent.webhook and sent.webhook.secret:
        lines.append(f"{sent.webhook.url} is signed with {sent.webhook.secret}")
    return "\n".join(printable(line) for line in lines)


def refused(rows: Sequence[RowProblem]) -> str:
    """Rows that were not taken, the first of them with the reason."""
    return "\n".join(printable(line) for line in _refused(rows))


def estimate(found: Estimate) -> str:
    """What rows would bring and cost, and what would have them done in time."""
    sample = f" (scaled from {found.accepted:,})" if found.sample_of is not None else ""
    accelerator = "not known"
    if found.accelerator_seconds is not None:
        accelerator = f"{found.accelerator_seconds:,.1f} s"
    deadline = duration(found.deadline_s or 0)
    in_time = {
        True: f"yes, within {deadline}",
        False: f"no, not within {deadline}",
        None: "nobody knows",
    }
    share = None if found.share_in_time is None else _share(found.share_in_time)
    block = fields(
        {
            "rater": found.rater,
            "rows": f"{found.rows:,}{sample}",
            "archive hits": _of(found.hits, found.rows),
            "equal rows": f"{found.coalesced:,}",
            "to be rated": f"{found.items:,} in {found.batches:,} batches",
            "model calls": f"{found.model_calls:,}",
            "accelerator": accelerator,
            "priority": None if found.priority is None else str(found.priority),
            "ETA": eta(found.eta) if found.eta else "not known",
            "in time": in_time[found.feasible],
            "share in time": share,
            "why": found.reason,
            "takes from": f"{found.displaces:,} other workflows" if found.displaces else None,
        }
    )
    if not found.remedies:
        return block
    changes = table(
        ("ENOUGH ALONE", "", ""),
        [(each.change, _amount(each), each.detail) for each in found.remedies],
    )
    return f"{block}\n\n{changes}"


def progress_line(workflow: Workflow) -> str:
    """One line that says how far a workflow is."""
    counts = workflow.counts
    parts = [f"{workflow.state} {counts.ended:,}/{counts.total:,}"]
    if counts.total:
        parts[0] += f" ({counts.ended / counts.total:.0%})"
    parts += _faults(workflow)
    if (hit_rate := workflow.sources.hit_rate) is not None:
        parts.append(f"hits {hit_rate:.0%}")
    if workflow.eta and not workflow.finished:
        parts.append(f"ETA {eta(workflow.eta)}")
    return ", ".join(parts)


def workflow_block(workflow: Workflow) -> str:
    """All that a person wants to know of one workflow."""
    sources, counts = workflow.sources, workflow.counts
    mean = "none yet"
    if workflow.mean_score is not None:
        mean = f"{workflow.mean_score:.4f} over {workflow.scored:,} scored of {counts.total:,}"
    hit_rate = "" if sources.hit_rate is None else f" (hit rate {sources.hit_rate:.0%})"
    waiting = f"{counts.pending:,} pending, {counts.running:,} running"
    if counts.retrying:
        waiting += f", {counts.retrying:,} retrying"
    return fields(
        {
            "id": workflow.id,
            "name": workflow.name,
            "rater": workflow.rater,
            "state": workflow.state,
            "priority": _priority(workflow),
            "requests": f"{counts.total:,}: {', '.join([_completed(workflow), waiting])}",
            "not rated": ", ".join(_faults(workflow)) or None,
            "answered by": f"archive {sources.archive:,}, coalesced {sources.coalesced:,}, "
            f"model {sources.model:,}{hit_rate}",
            "model calls": f"{workflow.model_calls:,} (accelerator "
            f"{workflow.accelerator_seconds:,.1f} s)",
            "mean score": mean,
            "ETA": eta(workflow.eta) if workflow.eta and not workflow.finished else None,
            "in time": _in_time(workflow),
            "standing": workflow.standing or None,
            "created": _instant(workflow.created_at),
            "first dispatch": _instant(workflow.timeline.first_dispatch_at),
            "first result": _instant(workflow.timeline.first_result_at),
            "last result": _instant(workflow.timeline.last_result_at),
            "deadline": _instant(workflow.deadline_at) if not workflow.finished else None,
            "finished": _instant(workflow.finished_at),
        }
    )


def distributions_block(of: Distributions) -> str:
    """How long requests waited and how often they were tried; nothing if none did."""
    rows = [
        ("waited for a rating", of.waited_s, _wait),
        ("still waiting since", of.open_s, _wait),
        ("attempts", of.attempts, lambda value: f"{value:g}"),
    ]
    shown = [
        (
            name,
            f"{spread.n:,}",
            *(show(v) for v in (spread.p50, spread.p90, spread.p99, spread.max)),
        )
        for name, spread, show in rows
        if spread is not None
    ]
    if not shown:
        return ""
    lines = table(("", "REQUESTS", "P50", "P90", "P99", "MAX"), shown)
    if not of.exact:
        lines += f"\n(of {of.looked_at:,} requests spread over all {of.requests:,})"
    return lines


def workflow_table(workflows: Iterable[Workflow]) -> str:
    return table(
        ("ID", "STATE", "RATER", "ENDED", "NOT RATED", "HITS", "CREATED", "NAME"),
        [
            (
                workflow.id,
                workflow.state,
                workflow.rater,
                f"{workflow.counts.ended:,}/{workflow.counts.total:,}",
                f"{workflow.counts.ended - workflow.counts.completed:,}",
                "" if (rate := workflow.sources.hit_rate) is None else f"{rate:.0%}",
                _instant(workflow.created_at) or "",
                workflow.name,
            )
            for workflow in workflows
        ],
    )


def decision_table(decisions: Iterable[Decision]) -> str:
    """Rounds of the rebalancer; moves that were only thought of stand in brackets."""
    return table(
        ("AT", "MODE", "OUTCOME", "MOVES", "WHY"),
        [
            (
                _instant(decision.at) or "",
                decision.mode,
                decision.outcome,
                _moves(decision),
                decision.reason,
            )
            for decision in decisions
        ],
    )


def trial(tried: Mapping[str, Any], texts: Sequence[str]) -> str:
    """What a model answered when it was tried: each text with its numbers, or its words."""
    facts = {name: tried.get(name) for name in ("version", "address", "latency_s")}
    if tried.get("truncated"):
        facts["truncated"] = "something was cut"
    lines = [fields(facts)]
    answered = [row for row in tried.get("rows") or () if isinstance(row, dict)]
    names = list(dict.fromkeys(name for row in answered for name in row if name != "truncated"))
    if names:
        rows = [
            (_short(text), *(_cell(row.get(name, "")) for name in names))
            for text, row in zip(texts, answered, strict=False)
        ]
        lines.append(table(("TEXT", *(name.upper() for name in names)), rows))
    if content := tried.get("content"):
        lines.append("\n".join(printable(line) for line in str(content).splitlines()))
    return "\n\n".join(lines)


def _cell(value: Any) -> str:
    """What a model says as float32 is not known to more digits than six."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:59]}…"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns side by side, two blanks between; wide characters count as two."""
    lines = [[printable(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(cell_len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def fields(values: Mapping[str, Any]) -> str:
    """Names and values in two columns; what has no value is left out."""
    shown = {name: value for name, value in values.items() if value not in (None, "")}
    width = max(map(cell_len, shown), default=0)
    return "\n".join(
        printable(f"{name}{' ' * (width - cell_len(name))}  {_plain(value)}")
        for name, value in shown.items()
    )


def eta(estimate: Eta) -> str:
    text = duration(estimate.seconds)
    if estimate.low is not None and estimate.high is not None:
        text += f" ({duration(estimate.low)} to {duration(estimate.high)})"
    return text if estimate.in_time else f"{text}, not all in time"


def duration(seconds: float) -> str:
    """Two units at most: `42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _moves(decision: Decision) -> str:
    moves = ", ".join(f"{move.model} {move.before} → {move.after}" for move in decision.moves)
    return moves if decision.applied or not moves else f"({moves})"


def _wait(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def printable(text: str) -> str:
    """The text without what could steer a terminal: it comes from files and servers."""
    return "".join(
        "\ufffd" if unicodedata.category(character) in ("Cc", "Cs") else character
        for character in text
    )


def _fault(item: ProblemItem) -> str:
    where = f"line {item.line}: " if item.line is not None else ""
    where = f"{item.field}: " if item.field and not where else where
    return f"{where}{item.code}" + (f": {item.detail}" if item.detail else "")


def _row(row: RowProblem) -> str:
    return _fault(ProblemItem(code=row.code, detail=row.detail, line=row.line))


def _refused(rows: Sequence[RowProblem]) -> list[str]:
    return [f"{len(rows):,} rows refused:", *_some([_row(row) for row in rows])]


def _some(lines: Sequence[str]) -> list[str]:
    shown = [f"  {line}" for line in lines[:_SHOWN_ITEMS]]
    if len(lines) > _SHOWN_ITEMS:
        shown.append(f"  … and {len(lines) - _SHOWN_ITEMS:,} more")
    return shown


def _in_time(workflow: Workflow) -> str | None:
    said = workflow.forecast
    if said is None or workflow.finished:
        return None
    why = "" if said.share_in_time >= 1 else f": {said.reason}"
    return f"{_share(said.share_in_time)} expected{why}"


def _share(share: float) -> str:
    """A share in percent; only all of it is 100 %."""
    return "100 %" if share >= 1 else f"{min(share * 100, 99.9):.3g} %"


def _of(count: int, rows: int) -> str:
    return f"{count:,} ({count / rows:.0%})" if rows else f"{count:,}"


def _amount(remedy: Remedy) -> str:
    if remedy.change == "deadline_s" and isinstance(remedy.to, int):
        return f"{remedy.to:,} ({duration(remedy.to)})"
    return f"{remedy.to:,}" if type(remedy.to) is int else _plain(remedy.to)


def _priority(workflow: Workflow) -> str | None:
    if workflow.priority is None:
        return None
    why = f" ({workflow.priority_reason})" if workflow.priority_clipped else ""
    return f"{workflow.priority}{why}"


def _completed(workflow: Workflow) -> str:
    return f"{workflow.counts.completed:,} completed"


def _faults(workflow: Workflow) -> list[str]:
    counts = workflow.counts
    named = {
        "failed": counts.failed,
        "timed out": counts.timed_out,
        "cancelled": counts.cancelled,
    }
    return [f"{count:,} {name}" for name, count in named.items() if count]


def _instant(instant: datetime | None) -> str | None:
    return instant.strftime("%Y-%m-%d %H:%M:%S UTC") if instant else None


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
