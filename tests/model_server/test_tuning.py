"""The choice of serving figures, on devices whose cost is known."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.model_server import tuning
from workers.model_server.scheduler import Shaping
from workers.model_server.serving import LENGTHS, SERVING, Options, Serving
from workers.model_server.tuning import Machine, Trial

CPU = SERVING["cpu"]
# Its batches are large enough that smaller and larger ones can win.
TABLE = replace(CPU, shaping=replace(CPU.shaping, batch_tokens=1024))
TWO_CORES = Machine(platform="cpu", cores=2)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A device: seconds of a call are a fixed part and one a token, more of them past its cache."""

    fixed_s: float = 0.004
    token_s: float = 0.0001
    cache_tokens: int = 10**9
    past_cache: float = 2.0
    lanes: int = 2
    """Calls that it computes at a time without loss; more of them share it."""

    def seconds(self, trial: Trial) -> float:
        tokens = trial.rows * trial.step
        beyond = max(0, tokens - self.cache_tokens)
        alone_s = self.fixed_s + self.token_s * (tokens + (self.past_cache - 1) * beyond)
        return alone_s * max(1.0, trial.lanes / self.lanes)

    def of(self, servings: Iterable[Serving]) -> dict[Trial, float]:
        return {
            trial: self.seconds(trial) for serving in servings for trial in tuning.trials(serving)
        }

    def best(self, table: Serving = TABLE, options: Options = Options()) -> Serving:  # noqa: B008
        """What the warm-up finds."""
        found = table
        for rivals in (
            tuning.other_lanes(found, options, TWO_CORES),
            tuning.other_sizes(found, options),
        ):
            found = tuning.better(found, rivals, self.of([found, *rivals]))
        fixed = tuning.call_tokens(
            {trial: self.seconds(trial) for trial in tuning.call_trials(table)}
        )
        assert fixed is not None
        return tuning.refined(found, fixed)


costs = st.builds(
    Cost,
    fixed_s=st.floats(0, 0.1),
    token_s=st.floats(1e-6, 1e-3),
    cache_tokens=st.integers(1, 20_000),
    past_cache=st.floats(1, 10),
    lanes=st.integers(1, 4),
)


def test_the_table_stays_where_nothing_pays() -> None:
    assert Cost().best() == TABLE


def test_more_lanes_are_taken_where_the_device_has_room_for_them() -> None:
    assert Cost(lanes=3).best().lanes == 3


def test_one_lane_is_kept_if_it_is_as_fast_as_more() -> None:
    one = replace(TABLE, lanes=1)

    assert Cost(lanes=1).best(one).lanes == 1


def test_a_cache_that_batches_leave_makes_them_smaller() -> None:
    assert Cost(cache_tokens=512, past_cache=3).best().shaping.batch_tokens == 512


def test_a_costly_call_makes_batches_larger_and_fills_them() -> None:
    found = Cost(fixed_s=0.08).best()

    assert found.shaping.batch_tokens == 2048
    assert found.call_tokens == 800
    assert found.shaping.fill_tokens > 4 * TABLE.shaping.fill_tokens


def test_a_batch_that_keeps_urgent_work_waiting_is_not_taken() -> None:
    assert Cost(fixed_s=0.4, token_s=0.0004).best().shaping.batch_tokens == 1024


def test_row_counts_between_are_compiled_where_they_save_padding() -> None:
    assert Cost(fixed_s=0.01).best().row_counts == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("gain", [1.04, 1.06])
def test_five_percent_is_what_counts(gain: float) -> None:
    (rival, *_) = rivals = tuning.other_lanes(TABLE, Options(), TWO_CORES)
    seconds = {**Cost().of([TABLE]), **dict.fromkeys(tuning.trials(rivals[1]), 10.0)}
    for base, other in zip(tuning.trials(TABLE), tuning.trials(rival), strict=True):
        seconds[other] = seconds[base] / TABLE.lanes * rival.lanes / gain

    assert tuning.better(TABLE, rivals, seconds) == (rival if gain > 1.05 else TABLE)


def test_what_was_not_measured_is_not_chosen() -> None:
    rivals = tuning.other_lanes(TABLE, Options(), TWO_CORES)

    assert tuning.better(TABLE, rivals, Cost(lanes=3).of([TABLE])) == TABLE
    assert tuning.better(TABLE, rivals, Cost(lanes=3).of(rivals)) == TABLE


def test_of_settings_alike_the_one_with_the_least_on_the_device_wins() -> None:
    rivals = tuning.other_sizes(TABLE, Options())
    fast = {trial: 0.5 * s for trial, s in Cost(fixed_s=0.0).of(rivals).items()}

    found = tuning.better(TABLE, rivals, {**Cost(fixed_s=0.0).of([TABLE]), **fast})

    assert found.shaping.batch_tokens == 512


def test_what_the_operator_chose_is_not_tried() -> None:
    options = Options(lanes=2, batch_tokens=1024)

    assert tuning.other_lanes(TABLE, options, TWO_CORES) == []
    assert tuning.other_sizes(TABLE, options) == []


def test_lanes_are_bounded_by_the_cores_of_a_cpu() -> None:
    def lanes(machine: Machine) -> list[int]:
        return [each.lanes for each in tuning.other_lanes(TABLE, Options(), machine)]

    assert lanes(TWO_CORES) == [1, 3]
    assert lanes(Machine(platform="cpu", cores=16)) == [1, 3, 4, 8]
    assert lanes(Machine(platform="gpu", cores=16)) == [1, 3]


def test_one_disturbed_measurement_does_not_move_the_fixed_cost() -> None:
    seconds = {trial: Cost().seconds(trial) for trial in tuning.call_trials(TABLE)}
    disturbed = {**seconds, tuning.call_trials(TABLE)[1]: 1.0}

    assert tuning.call_tokens(seconds) == 40
    assert tuning.call_tokens(disturbed) == pytest.approx(40, abs=15)


def test_time_that_does_not_grow_with_tokens_gives_no_fixed_cost() -> None:
    assert tuning.call_tokens({Trial(rows=4, step=32, lanes=1): 0.1}) is None


@given(cost=costs)
def test_whatever_the_device_costs_the_choice_can_be_served(cost: Cost) -> None:
    found = cost.best()

    assert found.shaping.batch_tokens in (512, 1024, 2048)
    assert found.lanes in (1, 2, 3)
    assert 1 <= found.shaping.fill_tokens <= found.shaping.batch_tokens
    assert found.shaping.steps == TABLE.shaping.steps
    assert set(TABLE.row_counts) <= set(found.row_counts)
    for step in found.shaping.steps:
        for rows in range(1, found.shaping.rows(step) + 1):
            assert sum(found.calls(rows, step)) >= rows
            assert set(found.calls(rows, step)) <= set(found.counts(step))


@given(cost=costs)
def test_the_choice_is_at_least_as_fast_as_the_table(cost: Cost) -> None:
    found = cost.best()

    fast, base = (tuning.rate(each, cost.of([each])) for each in (found, TABLE))
    assert fast is not None
    assert base is not None
    assert fast >= 0.999 * base


@given(cost=costs, more_s=st.floats(0.0, 0.1))
def test_the_more_a_call_costs_the_larger_its_batch(cost: Cost, more_s: float) -> None:
    rivals = tuning.other_sizes(TABLE, Options())

    def rates(fixed_s: float) -> list[float]:
        device = replace(cost, fixed_s=fixed_s, past_cache=1.0)
        found = [tuning.rate(each, device.of([each])) for each in (TABLE, *rivals)]
        return [rate or 0.0 for rate in found]

    table, half, twice = rates(cost.fixed_s)
    table_more, half_more, twice_more = rates(cost.fixed_s + more_s)
    assert half_more / table_more <= half / table + 1e-9
    assert twice_more / table_more >= twice / table - 1e-9


@given(few=st.integers(0, 5_000), more=st.integers(0, 5_000))
def test_the_more_a_call_costs_the_fuller_less_urgent_work_makes_it(few: int, more: int) -> None:
    less, greater = (
        tuning.refined(TABLE, fixed).shaping.fill_tokens for fixed in (few, few + more)
    )

    # Where the table's own is near enough it stays, which is within a few percent of the rate.
    assert less <= 1.5 * greater


def test_several_devices_are_measured_with_rows_for_each() -> None:
    shaping = Shaping(steps=LENGTHS, batch_tokens=1024, fill_tokens=256, devices=4)
    serving = replace(TABLE, shaping=shaping)

    assert all(trial.rows % 4 == 0 for trial in tuning.call_trials(serving))
    assert tuning.refined(serving, 40).row_counts == tuning.refined(TABLE, 40).row_counts
