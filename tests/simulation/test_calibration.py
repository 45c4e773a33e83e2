"""The policies on the calibrated trace, where it lies beside the project.

The whole trace at 1:100 takes a minute a policy (`manage.py simulate`); here it is cut to half its
days and 1:400. What polling costs grows with the number of batches, so that the bounds are those of
this size, wide enough for a change of luck and too narrow for a change of policy.
"""

import pytest

from airs_site.simulation.cell import figures_of
from airs_site.simulation.engine import Options
from airs_site.simulation.metrics import Figures
from airs_site.simulation.trace import Workload, expand, read_parameters, read_trace
from tests.simulation.small import SHIPPED

pytestmark = pytest.mark.skipif(
    not (SHIPPED / "trace.jsonl.gz").is_file(),
    reason="the calibrated trace (../shared/trace) is not beside the project",
)
HALF = Options(days=4)


@pytest.fixture(scope="module")
def calibrated() -> Workload:
    params = read_parameters(SHIPPED / "params.json")
    return expand(params, read_trace(SHIPPED / "trace.jsonl.gz", params), scale=400)


@pytest.fixture(scope="module")
def figures(calibrated: Workload) -> dict[str, Figures]:
    return {name: figures_of(calibrated, name, HALF) for name in ("paper", "fifo", "airs")}


def test_the_papers_policy_fails_a_fifth_of_the_evaluations(figures: dict[str, Figures]) -> None:
    paper = figures["paper"]

    assert paper.whole_in_time == pytest.approx(0.85, abs=0.05)
    assert paper.amplification > 10
    assert paper.hit_rate == pytest.approx(0.42, abs=0.03)


def test_first_in_first_out_fails_less_and_lets_short_work_wait(
    figures: dict[str, Figures],
) -> None:
    fifo = figures["fifo"]

    assert fifo.whole_in_time == pytest.approx(0.95, abs=0.03)
    assert fifo.amplification == 1.0
    assert fifo.latency_s["AR_1"]["high"]["p75"] > 45 * 60


def test_the_services_policies_keep_nearly_all_whole(figures: dict[str, Figures]) -> None:
    ours = figures["airs"]

    assert ours.whole_in_time >= 0.98
    assert ours.latency_s["AR_1"]["high"]["p75"] <= 15 * 60
    assert ours.jain > max(figures["paper"].jain, figures["fifo"].jain)
    assert ours.forecast_kept is not None
    assert ours.forecast_kept >= 0.98
