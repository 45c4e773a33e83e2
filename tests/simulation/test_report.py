import json
from collections.abc import Mapping
from typing import Any

import pytest

from airs_site.simulation.bound import bound
from airs_site.simulation.campaign import Plan, plain, simulate_all
from airs_site.simulation.cells import Cells
from airs_site.simulation.engine import Options
from airs_site.simulation.page import page
from airs_site.simulation.plots import PLOTS
from airs_site.simulation.plots.style import png
from airs_site.simulation.published import (
    DISTURBANCE_ROWS,
    ROWS,
    Row,
    for_raters,
    in_words,
    value_at,
)
from airs_site.simulation.report import Result, as_text, document, goal_of, marked, table
from airs_site.simulation.scenes import ABLATIONS, DISTURBANCES
from airs_site.simulation.tables import Hour, enough, tables
from airs_site.simulation.trace import Workload, expand
from airs_site.simulation.workload import read_params
from tests.simulation import small
from tests.simulation.small import evaluation

HALF_LATE = (evaluation(1, 12, owner="ann"), evaluation(2, 24, owner="bob", deadline_s=20.0))
FIGURES = {
    *("duty", "hit_rate", "funnel", "failure", "capacity_failure", "whole_in_time"),
    *("requests_in_time", "latency_s", "low_whole", "small_raters_whole", "amplification"),
    *("jain", "forecast_kept"),
}
"""Those that others rely on (docs/simulation.md)."""


def results_of(plan: Plan, *workloads: Workload) -> list[Result]:
    seeded = list(enumerate(workloads, start=1))
    return simulate_all(seeded, [plan, plain(plan)], Options(days=2), Cells(lambda n, share: None))


def a_workload(*raters: str) -> Workload:
    """Some hours of work of three raters, named as the paper's where nothing else is asked for."""
    names = raters or ("AR_1", "AR_2", "small")
    description = small.document((4, 3, 1), batch_service_s_full_scale=0.12)
    for rater, name in zip(description["raters"], names, strict=True):
        rater["id"] = name
    rows = [
        evaluation(
            n, 4000 * n, rater=names[n % 3], owner=f"u{n % 4}", at_s=900.0 * n, low=n % 4 == 0
        )
        for n in range(1, 20)
    ]
    return expand(read_params(description), rows, scale=100)


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    workload = a_workload()
    plan = Plan(
        policies=["paper", "fifo", "airs"],
        disturbances=["pool_loss", "flood", "stale_signal", "overload", "hit_rate"],
        ablations=["archive", "rebalancing"],
        factors=[0.5, 1.0, 2.0],
    )
    return document(
        trace="small", scale=100, results=results_of(plan, workload), params=workload.params
    )


def test_a_document_has_all_that_others_rely_on(written: Mapping[str, Any]) -> None:
    assert {
        *("trace", "scale", "seeds", "policies", "bound", "published", "disturbances", "ablation")
    } <= set(written)
    for figures in written["policies"].values():
        assert set(figures) >= FIGURES
        assert set(figures["duty"]) == {"mean", "peak_hour"}
        assert set(figures["funnel"]) == {"received_batches", "after_archive", "model_calls"}
        for name in ("failure", "capacity_failure"):
            assert set(figures[name]) == {"p50", "p80", "p90", "p95", "p99"}
        assert set(figures["latency_s"]["AR_1"]["high"]) == {"p50", "p75", "p95", "p99"}
    assert set(written["bound"]) == {"whole_in_time", "requests_in_time"}
    assert set(written["published"]) >= {"failure", "latency_s", "amplification", "hit_rate"}
    bad = written["disturbances"]
    assert 0 <= bad["pool_loss"]["airs"]["whole_in_time"] <= 1
    assert set(bad["pool_loss"]["airs"]["day"]) >= {"whole_in_time", "requests_in_time"}
    assert set(bad["flood"]["paper"]) == {"others_whole", "others_requests", "others_p75_s"}
    assert set(bad["stale_signal"]["airs"]) == {"30 s", "120 s", "300 s", "wrong"}
    assert set(bad["overload"]["airs"]) >= {"during", "after", "end_backlog_s", "recovered_s"}
    assert set(written["ablation"]) == {"archive", "rebalancing"}
    assert json.loads(json.dumps(written)) == written


def test_what_a_disturbance_costs_stands_beside_its_figures(written: Mapping[str, Any]) -> None:
    undisturbed = written["policies"]["airs"]["whole_in_time"]

    stale = written["disturbances"]["stale_signal"]["airs"]["wrong"]
    assert stale["whole_lost"] == pytest.approx(undisturbed - stale["whole_in_time"])


def test_what_a_layer_adds_stands_beside_its_figures(written: Mapping[str, Any]) -> None:
    without, full = written["ablation"]["archive"], written["policies"]["airs"]

    assert without["gain"]["whole_in_time"] == pytest.approx(
        full["whole_in_time"] - without["whole_in_time"]
    )
    assert without["gain"]["model_calls_factor"] == pytest.approx(
        without["funnel"]["model_calls"] / full["funnel"]["model_calls"]
    )


def test_a_pool_as_it_is_has_the_figures_of_the_policy(written: Mapping[str, Any]) -> None:
    of = written["pool_scale"]["airs"]

    assert list(of) == ["0.5", "1", "2"]
    assert [of[factor]["replicas"] for factor in of] == [4, 8, 16]
    assert of["1"]["whole_in_time"] == written["policies"]["airs"]["whole_in_time"]


def test_the_fewest_replicas_that_meet_the_goal_are_found() -> None:
    of = {
        factor: {"replicas": n, "whole_in_time": whole}
        for factor, n, whole in (("0.5", 4, 0.9), ("1", 8, 0.996), ("2", 16, 1.0))
    }

    assert enough({"pool_scale": {"airs": of}}, "airs") == 8
    assert enough({"pool_scale": {"airs": {"0.5": of["0.5"]}}}, "airs") is None


def test_figures_of_several_seeds_are_medians_with_their_range() -> None:
    first, second = small.workload(*HALF_LATE), small.workload(evaluation(1, 12))

    document_ = document(
        trace="small", scale=1, results=results_of(Plan(policies=["fifo"]), first, second)
    )

    assert document_["policies"]["fifo"]["whole_in_time"] == 0.75
    assert document_["spread"]["fifo"]["min"]["whole_in_time"] == 0.5
    assert document_["spread"]["fifo"]["max"]["whole_in_time"] == 1.0
    assert document_["seeds"] == [1, 2]
    assert document_["published"]["amplification"] == 10.0
    spread = next(t for t in tables(document_ | {"first_weekday": 5}) if "Least" in t.title)
    assert ["whole in time", "50.0 - 100.0 %"] in [list(line) for line in spread.lines]


def test_only_the_first_workload_is_disturbed_where_the_others_have_a_plain_plan() -> None:
    workload = a_workload()
    plan = Plan(policies=["fifo"], disturbances=["wrong_costs"])

    first, second = results_of(plan, workload, workload)

    assert (set(first.disturbances), set(second.disturbances)) == ({"wrong_costs"}, set())
    other = small.workload(*HALF_LATE)
    written = document(trace="small", scale=1, results=results_of(plan, workload, other))
    assert written["undisturbed"]["fifo"] == first.figures["fifo"] != written["policies"]["fifo"]


def test_what_runs_for_minutes_is_left_out_of_further_workloads() -> None:
    workload = a_workload()

    results = results_of(Plan(policies=["paper-tuned-2", "fifo"]), workload, workload)
    written = document(trace="small", scale=1, results=results)

    assert [set(result.figures) for result in results] == [{"paper-tuned-2", "fifo"}, {"fifo"}]
    assert set(written["policies"]) == {"paper-tuned-2", "fifo"}
    assert set(written["spread"]) == {"fifo"}


def test_a_brief_plan_leaves_out_what_says_little() -> None:
    plan = Plan(
        policies=["paper", "isolated", "airs"], disturbances=["flood", "window"], briefly=True
    )

    disturbed = {(cell.name, cell.policy) for cell in plan.cells() if cell.kind != "policy"}

    assert disturbed == {("flood", "paper"), ("flood", "airs"), ("window", "airs")}


def test_a_table_holds_figures_against_published_goal_and_bound() -> None:
    one = small.workload(*HALF_LATE)

    lines = table(
        document(trace="small", scale=1, results=results_of(Plan(policies=["fifo"]), one))
    )

    assert lines[0] == ["figure", "fifo", "published", "goal", "bound"]
    assert ["whole in time", "50.0 % ✗", "-", "≥ 99.5 %", "100.0 %"] in lines
    assert ["attempts a model call", "1.00 ✓", "10.00", "≤ 1.05", "-"] in lines
    assert ["requests in time", "66.7 % ✗", "-", "≥ 95.0 % of bound, fifo", "100.0 %"] in lines
    assert len(as_text(lines).splitlines()) == len(ROWS) + 1


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (Row(label="", path=("x",), goal=2.0), "1.00 ✓"),
        (Row(label="", path=("x",), goal=2.0, at_most=False), "1.00 ✗"),
        (Row(label="", path=("x",)), "1.00"),
        (Row(label="", path=("none",), goal=2.0), "-"),
        (Row(label="", path=("x",), at_most=False, least_is_fifo=True), "1.00 ✗"),
        (Row(label="", path=("x",), goal=0.5, at_most=False, of_bound=True), "1.00 ✗"),
    ],
)
def test_a_figure_says_whether_it_meets_its_goal(row: Row, shown: str) -> None:
    document_ = {"policies": {"fifo": {"x": 1.5}}, "bound": {"x": 4.0}}

    assert marked(row, {"x": 1.0}, document_) == shown


def test_a_goal_that_depends_on_others_is_named() -> None:
    assert goal_of(Row(label="", path=("x",), least_is_fifo=True)) == "≥ fifo"


def test_raters_of_other_names_have_rows_without_what_was_published() -> None:
    rows = for_raters(ROWS, ["needs_met", "lexical"])

    (named,) = [row for row in rows if row.label == "needs_met latency p75"]
    assert named.path == ("latency_s", "needs_met", "all", "p75")
    assert (named.published, named.goal) == (None, None)
    assert for_raters(ROWS, ["AR_1", "AR_2"]) == list(ROWS)


def test_figures_are_put_into_words() -> None:
    assert [in_words(*each) for each in ((5400.0, "min"), (5400.0, "h"), (None, "%"))] == [
        "90.0 min",
        "1.5 h",
        "-",
    ]
    assert [in_words(-0.0001, "%"), in_words(12345.0, "n")] == ["0.0 %", "12,345"]
    assert value_at({"a": {"b": 1}}, ("a", "c")) is None


def test_each_thing_that_was_asked_has_a_table(written: Mapping[str, Any]) -> None:
    found = {table.title.split(":")[0]: table for table in tables(written, Hour(weekday=5, hour=2))}

    assert set(written["disturbances"]) < set(found)
    assert {"Larger and smaller pools", "Each layer of airs switched off"} < set(found)
    assert all(len({len(line) for line in table.lines}) == 1 for table in found.values())


def test_an_hour_of_the_week_is_told(written: Mapping[str, Any]) -> None:
    (told,) = [
        t for t in tables(written, Hour(weekday=5, hour=2)) if t.title.startswith("Sat 2:00")
    ]

    # Evaluations come each quarter of an hour from 0:15 on.
    assert ["evaluations submitted", "4", "4", "4"] in [list(line) for line in told.lines]


def test_every_plot_is_drawn_where_there_is_something_to_show(written: Mapping[str, Any]) -> None:
    pictures = {plot.name: plot.draw(written) for plot in PLOTS}

    assert all(drawn is not None for drawn in pictures.values())
    drawn = pictures["bad_days"]
    assert drawn is not None
    assert png(drawn, "Bad days").startswith(b"\x89PNG")
    assert PLOTS[-1].draw({**written, "disturbances": {}}) is None


def test_the_page_needs_nothing_else(written: Mapping[str, Any]) -> None:
    drawn = PLOTS[0].draw(written)
    assert drawn is not None

    html = page(
        title="A & B",
        about="about",
        tables=tables(written),
        pictures={PLOTS[0]: png(drawn, PLOTS[0].title)},
    )

    assert "A &amp; B" in html
    assert html.count('src="data:image/png;base64,') == html.count("<img") == 1
    assert "http" not in html
    assert 'class="met"' in html


def test_every_disturbance_and_layer_has_rows_of_its_own() -> None:
    assert set(DISTURBANCE_ROWS) == set(DISTURBANCES)
    assert {"archive", "coalescing", "batching", "quota", "priorities", "rebalancing"} <= set(
        ABLATIONS
    )


def test_a_bound_stands_in_the_document(written: Mapping[str, Any]) -> None:
    assert written["bound"]["whole_in_time"] == bound(a_workload(), 2).whole_in_time
