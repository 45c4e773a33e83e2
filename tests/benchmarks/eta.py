"""How far off the ETA is: workflows of several owners, classes and sizes, looked at till they end.

A model of fixed speed, so that the machine's mood is not what is measured. Each look at a workflow
is compared with what was then really left of it.
"""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from tests.acceptance.stack import Stack, Stub
from tests.benchmarks import running, texts
from tests.benchmarks.report import Figure, median, number

RATER = "paced"
WINDOW = 6
OWNERS = ("ada", "ben", "cleo")
SIZES = (300, 600, 1_200, 2_400, 4_800)
PRIORITIES = (10, 50, 50, 50, 90)
LOOK_EVERY_S = 0.5
LEAST_LEFT_S = 1.0
"""Looks with less left are not counted: an ETA has whole seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """What was said of a workflow, and when."""

    at_s: float
    said: tuple[float, float, float] | None


def eta(stack: Stack, stub: Stub, *, workflows: int, over_s: float) -> Iterator[Figure]:
    """Submit workflows at random moments within a span; yield error and coverage."""
    stack.register(stub, rater=RATER, max_concurrency=WINDOW)
    clients = [_client(stack, owner) for owner in OWNERS]
    chance = random.Random(7)
    moments = sorted(chance.uniform(0, over_s) for _ in range(workflows))
    running.rate(stack, RATER, texts.bodies(120, seed=0, prefix="warm"))
    looks: dict[str, list[_Look]] = {}
    ended: dict[str, float] = {}
    began = time.monotonic()

    def submit() -> None:
        for n, moment in enumerate(moments):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            answer = clients[n % len(clients)].post(
                "/api/v1/workflows",
                params={"rater": RATER, "priority": chance.choice(PRIORITIES)},
                content=texts.bodies(chance.choice(SIZES), seed=n, prefix=f"eta{n}"),
                headers={"Content-Type": "application/x-ndjson"},
            )
            assert answer.status_code == 202, answer.text
            looks[answer.json()["id"]] = []

    with contextlib.ExitStack() as leave:
        for client in clients:
            leave.enter_context(client)
        submitting = threading.Thread(target=submit)
        submitting.start()
        while submitting.is_alive() or len(ended) < len(looks):
            assert time.monotonic() - began < running.PATIENCE_S
            for workflow_id in [w for w in list(looks) if w not in ended]:
                document = stack.workflow(workflow_id)
                at_s = time.monotonic() - began
                if document["finished_at"]:
                    ended[workflow_id] = at_s
                elif document["eta"] is None:
                    looks[workflow_id].append(_Look(at_s=at_s, said=None))
                else:
                    said = tuple(document["eta"][name] for name in ("seconds", "low", "high"))
                    looks[workflow_id].append(_Look(at_s=at_s, said=said))
            time.sleep(LOOK_EVERY_S)
        submitting.join()
    yield from _figures(looks, ended)


def _client(stack: Stack, owner: str) -> httpx.Client:
    answer = stack.client.post("/api/v1/tokens", json={"user": owner, "role": "submitter"})
    assert answer.status_code == 201, answer.text
    headers = {"Authorization": f"Bearer {answer.json()['secret']}"}
    return httpx.Client(base_url=stack.client.base_url, headers=headers, timeout=60)


def _figures(looks: dict[str, list[_Look]], ended: dict[str, float]) -> Iterator[Figure]:
    errors, ratios, inside, told, silent = [], [], 0, 0, 0
    for workflow_id, of in looks.items():
        for look in of:
            left_s = ended[workflow_id] - look.at_s
            if left_s < LEAST_LEFT_S:
                continue
            if look.said is None:
                silent += 1
                continue
            seconds, low, high = look.said
            told += 1
            errors.append(abs(seconds - left_s))
            ratios.append(abs(seconds - left_s) / left_s)
            # The end is known to a look, the ETA to a second.
            inside += low - LOOK_EVERY_S <= left_s <= high + LOOK_EVERY_S
    note = (
        f"{len(looks)} workflows of {min(SIZES)}-{max(SIZES)} requests, {len(OWNERS)} owners, three"
        f" classes; left when asked: median {number(median(_lefts(looks, ended)))} s"
    )
    yield Figure(
        name="eta_median_absolute_error_s",
        value=median(errors),
        unit="s",
        n=told,
        note=f"{note}; {silent} looks without an ETA",
    )
    yield Figure(
        name="eta_median_relative_error",
        value=median(ratios),
        unit="of what was left",
        n=told,
        note=f"worst tenth from {number(sorted(ratios)[int(0.9 * len(ratios))])}",
    )
    yield Figure(
        name="eta_range_coverage",
        value=inside / told,
        unit="of looks",
        n=told,
        ratio_to="the four in five that it promises",
        ratio=inside / told / 0.8,
        note="share of looks whose range held the true end",
    )


def _lefts(looks: dict[str, list[_Look]], ended: dict[str, float]) -> list[float]:
    return [ended[w] - look.at_s for w, of in looks.items() for look in of if look.said]
