import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from airs_site.simulation.errors import BadWorkload
from airs_site.simulation.generator import generate
from airs_site.simulation.keys import fails_for_good, request_keys
from airs_site.simulation.trace import Workload, expand, read_parameters, read_trace, write_trace
from airs_site.simulation.workload import DAY_S, Churn, Evaluation, read_params, row_of
from tests.simulation.small import SHIPPED, document, evaluation, params, workload

SCALE = 1000
STILL = Churn(lives_s=(1e9,), life_p=(1.0,), bumps=())
needs_shipped = pytest.mark.skipif(
    not (SHIPPED / "trace.jsonl.gz").is_file(),
    reason="the calibrated trace (../shared/trace) is not beside the project",
)


def keys(one: Evaluation, *, rater_no: int = 0, churn: Churn = STILL, scale: int = 1) -> set[int]:
    return set(request_keys(one, rater_no=rater_no, churn=churn, scale=scale).tolist())


def test_an_evaluation_asks_for_each_result_of_each_query() -> None:
    assert len(keys(evaluation(1, 10, results=4, mode="prefix"))) == 40


@pytest.mark.parametrize(
    ("changed", "shared"),
    [
        pytest.param({}, 10, id="the same queries of a set"),
        pytest.param({"queries": 4}, 4, id="a prefix of them"),
        pytest.param({"mode": "window", "offset": 7}, 3, id="a window that overlaps"),
        pytest.param({"mode": "window", "offset": 19, "set_size": 20}, 9, id="it wraps around"),
        pytest.param({"query_set": 1}, 0, id="another set"),
        pytest.param({"mode": "private"}, 0, id="a set of its own"),
        pytest.param({"delta": 1.0}, 0, id="results that only the experiment shows"),
    ],
)
def test_what_two_evaluations_share(changed: dict[str, object], shared: int) -> None:
    first = evaluation(1, 10, mode="prefix")
    second = evaluation(2, 10, **{"mode": "prefix", **changed})

    assert len(keys(first) & keys(second)) == shared


def test_another_rater_shares_nothing() -> None:
    one = evaluation(1, 10, mode="prefix")

    assert not keys(one) & keys(one, rater_no=1)


def test_results_change_with_time_and_with_roll_outs() -> None:
    churn = params().churn
    before = evaluation(1, 2000, mode="prefix", at_s=99_000.0)

    def kept(at_s: float) -> float:
        after = evaluation(2, 2000, mode="prefix", at_s=at_s)
        return len(keys(before, churn=churn) & keys(after, churn=churn)) / 2000

    # Half of the slots live 12 hours, half three days; the roll-out at 100,000 s changes half.
    assert kept(99_001.0) > 0.98
    assert kept(100_001.0) == pytest.approx(0.5, abs=0.05)
    assert kept(99_000.0 + DAY_S) == pytest.approx(0.5 * 0.5 * 2 / 3, abs=0.05)


def test_a_smaller_scale_asks_for_fewer_queries() -> None:
    assert len(keys(evaluation(1, 250, mode="prefix"), scale=100)) == 2
    assert len(keys(evaluation(1, 5, mode="prefix"), scale=100)) == 1


def test_the_share_that_fails_for_good_is_the_rows() -> None:
    ids = np.arange(20_000, dtype=np.int32)

    assert fails_for_good(ids, evaluation(1, 1, permanent=0.05)).mean() == pytest.approx(
        0.05, abs=0.01
    )


def test_a_workload_numbers_equal_ratings_alike() -> None:
    jobs = workload(evaluation(1, 3), evaluation(2, 5, experiment=1))

    assert jobs.distinct == 5
    assert set(jobs.requests(0).tolist()) < set(jobs.requests(1).tolist())


def test_a_scale_below_one_is_refused() -> None:
    with pytest.raises(BadWorkload, match="scale of 1:0"):
        expand(params(), [evaluation(1, 1)], scale=0)


def test_a_written_trace_reads_the_same(tmp_path: Path) -> None:
    written = [
        evaluation(1, 10),
        evaluation(2, 4, at_s=5.5, low=True, mode="window", offset=3),
        listed(3, (0, 4), (9, 2), at_s=7.0),
    ]
    path = tmp_path / "trace.jsonl.gz"

    write_trace(path, written)

    assert read_trace(path, params()) == written


def test_rows_are_read_in_the_order_of_their_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [row_of(evaluation(n, 1, at_s=at_s)) for n, at_s in ((1, 9.0), (2, 3.0))]
    path.write_text("\n".join(json.dumps(row) for row in rows))

    assert [row.id for row in read_trace(path, params())] == [2, 1]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"nq": None}, "line 2: does not read"),
        ({"rater": "none"}, "line 2: asks rater 'none', which the parameters do not have"),
        ({"mode": "suffix"}, "line 2: has the mode 'suffix'"),
        ({"R": 65}, "line 2: needs nq and qset_size of at least 1, and R of 1 to 64"),
        ({"deadline": 0}, "line 2: needs a positive deadline"),
        ({"mode": "listed"}, "line 2: needs ids in the mode"),
        ({"mode": "listed", "ids": [[3, 0]]}, "line 2: needs ids in the mode"),
        ({"ids": [[0, 3]]}, "line 2: needs ids in the mode"),
    ],
)
def test_a_bad_row_is_named(changed: dict[str, object], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    good = row_of(evaluation(1, 1))
    path.write_bytes(gzip.compress(f"{json.dumps(good)}\n{json.dumps(good | changed)}\n".encode()))

    with pytest.raises(BadWorkload, match=problem):
        read_trace(path, params())


def test_a_row_that_lacks_a_field_and_a_file_without_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"id": 1}\n')
    with pytest.raises(BadWorkload, match=r"trace.jsonl, line 1: lacks the field 't'"):
        read_trace(path, params())

    path.write_text("")
    with pytest.raises(BadWorkload, match="has no rows"):
        read_trace(path, params())


def test_parameters_that_lack_something_are_named(tmp_path: Path) -> None:
    lacking = document()
    del lacking["churn"]["bumps"]
    with pytest.raises(BadWorkload, match="lack 'bumps'"):
        read_params(lacking)
    with pytest.raises(BadWorkload, match="23 numbers where 24 belong"):
        read_params(document(hour_human=[1] * 23))

    path = tmp_path / "params.json"
    path.write_text("{")
    with pytest.raises(BadWorkload, match=r"params.json is not JSON"):
        read_parameters(path)


def listed(number: int, *runs: tuple[int, int], **changed: object) -> Evaluation:
    requests = sum(count for _, count in runs)
    return evaluation(number, requests, mode="listed", ids=runs, **changed)


def test_listed_ratings_coincide_where_their_numbers_do() -> None:
    rows = [listed(1, (0, 10)), listed(2, (5, 10), (0, 1)), listed(3, (5, 10), rater="big")]

    jobs = expand(params(), rows, scale=1)

    first, second, third = (set(jobs.requests(place).tolist()) for place in range(3))
    assert jobs.distinct == 15
    assert len(first & second) == 6
    assert second > third


def test_listed_ratings_are_thinned_alike_and_no_evaluation_is_empty() -> None:
    rows = [listed(1, (0, 4000)), listed(2, (0, 4000)), listed(3, (7, 1))]

    jobs = expand(params(), rows, scale=10)

    assert jobs.requests(0).tolist() == jobs.requests(1).tolist()
    assert len(jobs.requests(0)) == pytest.approx(400, rel=0.2)
    assert len(jobs.requests(2)) == 1


def test_a_sampled_trace_is_simulated_at_its_scale_or_a_multiple() -> None:
    sampled = params(sample=10)

    assert len(expand(sampled, [listed(1, (0, 50))], scale=10).ids) == 50
    assert len(expand(sampled, [listed(1, (0, 5000))], scale=20).ids) == pytest.approx(2500, 0.1)
    with pytest.raises(BadWorkload, match="one in 10 requests: give that scale or a multiple"):
        expand(sampled, [listed(1, (0, 50))], scale=15)


def test_a_seed_gives_the_same_evaluations_and_another_others() -> None:
    described = params()

    assert generate(described, 1) == generate(described, 1)
    assert generate(described, 1) != generate(described, 2)


def test_generated_evaluations_are_rows_that_read(tmp_path: Path) -> None:
    described = params()
    rows = generate(described, 1)

    write_trace(tmp_path / "trace.jsonl.gz", rows)

    assert read_trace(tmp_path / "trace.jsonl.gz", described) == rows
    assert [row.id for row in rows] == list(range(len(rows)))
    assert all(-DAY_S <= row.at_s < 2 * DAY_S for row in rows)
    assert all(row.queries <= row.set_size for row in rows)


def test_generated_arrivals_follow_days_bursts_and_priorities() -> None:
    busy = document()
    for rater in busy["raters"]:
        rater["arrivals"]["human_per_day"] = 4000
    rows = generate(read_params(busy), 1)
    people = [row for row in rows if not row.automatic and row.rater == "big"]

    def within(start_s: float, end_s: float) -> int:
        return sum(start_s <= row.at_s < end_s for row in people)

    # Day 0 is a Saturday of half the work; Sunday has a burst at 14 h on top of its half.
    assert within(0, DAY_S) == pytest.approx(2000, rel=0.1)
    assert within(DAY_S, 2 * DAY_S) == pytest.approx(2000 * 26 / 24, rel=0.1)
    burst = DAY_S + 14 * 3600
    assert within(burst, burst + 3600) == pytest.approx(3 * 2000 / 24, rel=0.25)
    assert np.mean([row.low for row in people]) == pytest.approx(0.1, abs=0.03)


@pytest.fixture(scope="module")
def shipped() -> Workload:
    described = read_parameters(SHIPPED / "params.json")
    return expand(described, read_trace(SHIPPED / "trace.jsonl.gz", described), scale=SCALE)


def aggregates(of: Workload) -> dict[str, float]:
    """Return what a workload amounts to against an archive that has all that was asked before."""
    stored = np.zeros(of.distinct, dtype=bool)
    requests: dict[str, int] = {}
    hits = high = evaluations = 0
    for place, row in enumerate(of.evaluations):
        ids = of.requests(place)
        if row.at_s >= 0:
            name = row.rater if row.rater in {"AR_1", "AR_2"} else "small"
            requests[name] = requests.get(name, 0) + len(ids)
            hits += int(stored[ids].sum())
            high += len(ids) * (not row.low)
            evaluations += 1
        stored[ids] = True
    total = sum(requests.values())
    return {
        **{name: n * SCALE / 1e6 / of.params.days for name, n in requests.items()},
        "hits": hits / total,
        "high": high / total,
        "evaluations": evaluations,
    }


@needs_shipped
def test_the_calibrated_trace_is_what_it_says(shipped: Workload) -> None:
    found = aggregates(shipped)

    assert found["AR_1"] == pytest.approx(103, rel=0.1)
    assert found["hits"] == pytest.approx(0.39, abs=0.03)
    assert found["high"] == pytest.approx(0.83, abs=0.03)


@needs_shipped
def test_generated_workloads_amount_to_what_the_calibrated_one_does(shipped: Workload) -> None:
    wanted = aggregates(shipped)
    found = aggregates(expand(shipped.params, generate(shipped.params, 2), scale=SCALE))

    assert found["evaluations"] == pytest.approx(wanted["evaluations"], rel=0.1)
    # A few large evaluations carry much of the work: sums differ by seed.
    assert found["AR_1"] == pytest.approx(wanted["AR_1"], rel=0.25)
    assert found["hits"] == pytest.approx(wanted["hits"], abs=0.06)
    assert found["high"] == pytest.approx(wanted["high"], abs=0.06)
