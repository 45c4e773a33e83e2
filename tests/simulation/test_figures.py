import json
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from airs_site.simulation.bound import Task, bound, fluid, given_up
from airs_site.simulation.cell import figures_of
from airs_site.simulation.engine import Options
from airs_site.simulation.metrics import measure
from airs_site.simulation.policies.airs import Airs
from airs_site.simulation.published import ROWS, in_words, value_at
from airs_site.simulation.report import Result, as_text, document, table
from airs_site.simulation.trace import write_trace
from tests.simulation import small
from tests.simulation.small import evaluation, run, workload

HALF_LATE = (evaluation(1, 12, owner="ann"), evaluation(2, 24, owner="bob", deadline_s=20.0))


def task(at_s: float, deadline_s: float, work_s: float) -> Task:
    return Task(at_s=at_s, deadline_s=deadline_s, work_s=work_s, requests=work_s)


def test_figures_of_a_run_that_can_be_worked_out() -> None:
    figures = measure(run("fifo", *HALF_LATE, days=1))

    # The second evaluation has one of its two batches done by its deadline.
    assert figures.whole_in_time == 0.5
    assert figures.requests_in_time == pytest.approx(24 / 36)
    assert figures.capacity_failure["p50"] == pytest.approx(0.25)
    assert figures.latency_s["tiny"]["high"]["p50"] == pytest.approx((12 + 20) / 2)
    assert figures.funnel == {"received_batches": 3, "after_archive": 3, "model_calls": 2}
    assert (figures.amplification, figures.hit_rate) == (1.0, 0.0)
    assert figures.duty["peak_hour"] == pytest.approx(24 / (4 * 3600))
    assert figures.duty["mean"] == pytest.approx(24 / (4 * 86400))
    assert (figures.low_whole, figures.forecast_kept) == (None, None)


def test_what_fails_for_good_is_failure_but_not_of_capacity() -> None:
    figures = measure(run("fifo", evaluation(1, 12, permanent=1.0)))

    assert (figures.failure["p50"], figures.capacity_failure["p50"]) == (1.0, 0.0)
    assert (figures.whole_in_time, figures.requests_in_time) == (1.0, 1.0)


def test_a_hit_counts_whether_at_submit_or_later() -> None:
    jobs = (
        evaluation(1, 12),
        evaluation(2, 12, experiment=1),
        evaluation(3, 12, experiment=1, at_s=99.0),
    )

    assert measure(run("fifo", *jobs)).hit_rate == pytest.approx(2 / 3)


def test_owners_that_are_slowed_down_alike_have_an_index_of_one() -> None:
    alike = (evaluation(1, 1200, owner="ann"), evaluation(2, 1200, owner="bob", at_s=1200.0))
    unlike = (evaluation(1, 1200, owner="ann"), evaluation(2, 1200, owner="bob"))

    assert measure(run("fifo", *alike, replicas=(1, 1))).jain == pytest.approx(1.0)
    # Slowdowns of 1 and 2.
    assert measure(run("fifo", *unlike, replicas=(1, 1))).jain == pytest.approx(9 / 10)


def test_a_forecast_is_kept_where_all_was_expected_and_came() -> None:
    policy = Airs()
    world = run(policy, evaluation(1, 12), evaluation(2, 12, owner="bob"))

    assert measure(world, policy.expected).forecast_kept == 1.0
    assert measure(world, {0: True, 1: False}).forecast_kept == 1.0
    assert measure(world, {}).forecast_kept is None


def test_a_fluid_is_served_by_deadline_and_dropped_at_it() -> None:
    tasks = [task(0, 100, 60), task(10, 40, 30), task(20, 45, 30)]

    # 10 s of the first, the second until 40, 5 s of the third, the rest of the first.
    assert fluid(tasks, 1) == [0.0, 0.0, 25.0]
    assert fluid(tasks, 3) == [0.0, 0.0, 0.0]


def test_the_largest_in_the_way_is_given_up() -> None:
    tasks = [task(0, 50, 40), task(5, 60, 10), task(6, 60, 15), task(100, 150, 50)]

    assert given_up(tasks, 1) == {0}


def test_the_bound_is_above_any_policy() -> None:
    limit = bound(workload(*HALF_LATE))
    figures = figures_of(workload(*HALF_LATE), "airs", Options())

    assert (limit.whole_in_time, limit.requests_in_time) == (1.0, 1.0)
    assert figures.whole_in_time <= limit.whole_in_time


def test_a_bound_knows_what_must_be_given_up() -> None:
    # Four replicas have 48 s of work until the deadlines: 60 and 12 are asked for.
    jobs = (evaluation(1, 60, deadline_s=12.0), evaluation(2, 12, deadline_s=12.0))

    assert bound(workload(*jobs)).whole_in_time == 0.5
    assert bound(workload(*jobs)).requests_in_time == pytest.approx(48 / 72)


def test_a_document_has_the_published_names_and_medians_over_seeds() -> None:
    one = workload(*HALF_LATE)
    figures = {"fifo": figures_of(one, "fifo", Options())}
    other = {"fifo": figures_of(workload(evaluation(1, 12)), "fifo", Options())}
    results = [
        Result(seed=1, figures=figures, bound=bound(one)),
        Result(seed=2, figures=other, bound=bound(one)),
    ]

    written = document(trace="small", scale=1, results=results)

    assert set(written["policies"]["fifo"]) == {
        *("duty", "hit_rate", "funnel", "failure", "capacity_failure", "whole_in_time"),
        *("requests_in_time", "latency_s", "low_whole", "small_raters_whole"),
        *("amplification", "jain", "forecast_kept"),
    }
    assert written["policies"]["fifo"]["whole_in_time"] == 0.75
    assert written["spread"]["fifo"]["min"]["whole_in_time"] == 0.5
    assert written["seeds"] == [1, 2]
    assert written["published"]["amplification"] == 10.0


def test_a_table_holds_figures_against_published_goal_and_bound() -> None:
    one = workload(*HALF_LATE)
    result = Result(
        seed=None, figures={"fifo": figures_of(one, "fifo", Options())}, bound=bound(one)
    )

    lines = table(document(trace="small", scale=1, results=[result]))

    assert lines[0] == ["figure", "fifo", "published", "goal", "bound"]
    assert ["whole in time", "50.0 %", "-", "≥ 99.5 %", "100.0 %"] in lines
    assert ["attempts a model call", "1.00", "10.00", "≤ 1.05", "-"] in lines
    assert len(as_text(lines).splitlines()) == len(ROWS) + 1


def test_figures_are_put_into_words() -> None:
    assert [in_words(*each) for each in ((5400.0, "min"), (5400.0, "h"), (None, "%"))] == [
        "90.0 min",
        "1.5 h",
        "-",
    ]
    assert value_at({"a": {"b": 1}}, ("a", "c")) is None


def test_the_command_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "params.json").write_text(json.dumps(small.document()))
    write_trace(tmp_path / "trace.jsonl.gz", HALF_LATE)
    out = tmp_path / "simulation.json"

    call_command(
        "simulate",
        *("--params", tmp_path / "params.json", "--trace", tmp_path / "trace.jsonl.gz"),
        *("--scale", "1", "--policies", "fifo,airs", "--disturb", "pool_loss", "--out", out),
    )

    written = json.loads(out.read_text())
    assert list(written["policies"]) == ["fifo", "airs"]
    assert set(written["disturbances"]["pool_loss"]) == {"fifo", "airs"}
    assert (written["trace"], written["scale"], written["seeds"]) == ("trace.jsonl.gz", 1, [])
    assert "whole in time" in capsys.readouterr().out


def test_the_command_simulates_generated_workloads(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(small.document()))
    out = tmp_path / "simulation.json"

    call_command(
        "simulate",
        *("--params", tmp_path / "params.json", "--seeds", "1,2", "--scale", "4"),
        *("--policies", "fifo", "--days", "1", "--out", out),
    )

    assert json.loads(out.read_text())["seeds"] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give --trace, or --seeds"),
        (["--trace", "nowhere.gz"], "nowhere.gz"),
        (["--seeds", "1", "--policies", "lifo"], "no policy lifo; there are paper"),
        (["--seeds", "1", "--scale", "0"], "0 is not a whole number from 1"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text(json.dumps(small.document()))

    with pytest.raises(CommandError, match=problem):
        call_command("simulate", "--params", path, *arguments)
