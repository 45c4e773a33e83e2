import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.model_server.gated import SERVING, GatedDevice, vector
from workers.model_server.batcher import (
    Batcher,
    Closed,
    DeadlinePassed,
    DeviceFailed,
    Vectors,
)
from workers.model_server.meter import Meter
from workers.model_server.reader import Ids, Tokens


@dataclass
class Bench:
    """A batcher over a gated device, with a clock that the test moves."""

    lanes: int = 1
    devices: int = 1
    floor_every: int = 0
    device: GatedDevice = field(default_factory=GatedDevice)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.meter = Meter(started_at=0.0)
        shaping = replace(SERVING.shaping, devices=self.devices, floor_every=self.floor_every)
        serving = replace(SERVING, lanes=self.lanes, shaping=shaping)
        self.batcher = Batcher(self.device, serving, self.meter, clock=lambda: self.now)

    def call(
        self, query: Ids, *texts: Ids, priority: int = 51, deadline_at: float | None = None
    ) -> "asyncio.Task[Vectors]":
        return asyncio.create_task(
            self.batcher.embed(
                [tokens(query)] * len(texts),
                [tokens(text) for text in texts],
                priority=priority,
                deadline_at=deadline_at,
            )
        )


def tokens(ids: Ids) -> Tokens:
    return Tokens(ids=ids, count=len(ids))


def ids(number: int, length: int = 3) -> Ids:
    return tuple([number] * length)


def trial(
    scenario: Callable[[Bench], Awaitable[None]],
    *,
    lanes: int = 1,
    devices: int = 1,
    floor_every: int = 0,
) -> Bench:
    """Run a scenario to its end, and end its lanes whatever happens."""

    async def played() -> Bench:
        bench = Bench(lanes=lanes, devices=devices, floor_every=floor_every)
        try:
            await scenario(bench)
        finally:
            bench.device.let(100)
            bench.batcher.close()
        return bench

    return asyncio.run(played())


def test_vectors_come_back_in_the_order_of_the_rows() -> None:
    async def scenario(bench: Bench) -> None:
        bench.device.let(9)
        found = await bench.call(ids(1), ids(2), ids(3, 20), ids(2))

        assert np.array_equal(found.kept, np.stack([vector(ids(1))] * 3))
        assert np.array_equal(
            found.once, np.stack([vector(i) for i in (ids(2), ids(3, 20), ids(2))])
        )

    trial(scenario)


def test_equal_sequences_of_calls_that_meet_are_computed_once() -> None:
    async def scenario(bench: Bench) -> None:
        first = bench.call(ids(9, 20), ids(8, 20))
        await bench.device.started()
        others = [bench.call(ids(1), ids(2)), bench.call(ids(1), ids(2))]
        await asyncio.sleep(0)  # lets both calls enter the queue

        bench.device.let(9)
        await asyncio.gather(first, *others)

    bench = trial(scenario)
    assert [sorted(batch) for batch in bench.device.batches] == [
        [ids(8, 20), ids(9, 20)],
        [ids(1), ids(2)],
    ]


def test_a_query_is_kept_for_later_calls_and_the_oldest_goes() -> None:
    async def scenario(bench: Bench) -> None:
        bench.device.let(99)
        for query in (1, 2, 3, 1, 4, 1, 2):  # three are kept; 2 goes when 4 comes
            await bench.call(ids(query), ids(100))

    bench = trial(scenario)
    computed = [sequence for batch in bench.device.batches for sequence in batch]
    assert [computed.count(ids(query)) for query in (1, 2, 3, 4)] == [1, 2, 1, 1]
    assert computed.count(ids(100)) == 7  # texts are the archive's business


def test_a_kept_query_as_text_needs_no_second_vector() -> None:
    async def scenario(bench: Bench) -> None:
        bench.device.let(9)
        await bench.call(ids(1), ids(2))
        found = await bench.call(ids(1), ids(1))

        assert np.array_equal(found.kept, found.once)

    assert len(trial(scenario).device.batches) == 1


def test_whoever_waited_longest_leads_once_it_was_passed_over_often_enough() -> None:
    async def scenario(bench: Bench) -> None:
        calls = [bench.call(ids(1, 20), ids(2, 20))]
        await bench.device.started()
        calls.append(bench.call(ids(3), ids(4), priority=101))
        for number in range(5, 17, 2):
            calls.append(bench.call(ids(number, 20), ids(number + 1, 20), priority=1))
        await asyncio.sleep(0)
        bench.device.let(99)
        await asyncio.gather(*calls)

    bench = trial(scenario, floor_every=3)
    assert [ids(3) in batch for batch in bench.device.batches].index(True) == 3


def test_the_batch_is_formed_when_the_device_becomes_free() -> None:
    async def scenario(bench: Bench) -> None:
        calls = [bench.call(ids(1, 20), ids(2, 20))]
        await bench.device.started()
        calls += [bench.call(ids(3), ids(4)), bench.call(ids(5), ids(6))]
        await asyncio.sleep(0)

        bench.device.let()
        assert set(await bench.device.started()) == {ids(3), ids(4), ids(5), ids(6)}
        bench.device.let()
        await asyncio.gather(*calls)

    trial(scenario)


def test_urgent_calls_overtake() -> None:
    finished = []

    async def scenario(bench: Bench) -> None:
        async def note(priority: int, call: Awaitable[Vectors]) -> None:
            await call
            finished.append(priority)

        first = bench.call(ids(1, 20), ids(2, 20))
        await bench.device.started()
        calls = [
            asyncio.create_task(
                note(priority, bench.call(ids(number, 20), ids(number + 1, 20), priority=priority))
            )
            for number, priority in ((10, 101), (20, 51), (30, 1))
        ]
        for _ in range(3):
            await asyncio.sleep(0)
        bench.device.let(9)
        await asyncio.gather(first, *calls)

    trial(scenario)
    assert finished == [1, 51, 101]


def test_a_call_past_its_deadline_is_not_computed() -> None:
    async def scenario(bench: Bench) -> None:
        running = bench.call(ids(1), ids(2))
        await bench.device.started()
        late = bench.call(ids(3, 20), ids(4), ids(5), deadline_at=5.0)
        timely = bench.call(ids(6), ids(7), deadline_at=50.0)
        await asyncio.sleep(0)

        bench.now = 10.0
        bench.device.let(9)
        with pytest.raises(DeadlinePassed):
            await late
        await asyncio.gather(running, timely)

    bench = trial(scenario)
    assert [sorted(batch) for batch in bench.device.batches] == [
        [ids(1), ids(2)],
        [ids(6), ids(7)],
    ]


def test_a_call_whose_client_went_away_is_not_computed() -> None:
    async def scenario(bench: Bench) -> None:
        running = bench.call(ids(1), ids(2))
        await bench.device.started()
        gone = bench.call(ids(3), ids(4))
        await asyncio.sleep(0)

        gone.cancel()
        await asyncio.sleep(0)
        bench.device.let(9)
        await running
        await bench.call(ids(5), ids(6))

    bench = trial(scenario)
    assert ids(3) not in [sequence for batch in bench.device.batches for sequence in batch]


def test_a_device_fault_fails_its_calls_and_no_other() -> None:
    async def scenario(bench: Bench) -> None:
        failing = bench.call(ids(1), ids(2))
        await bench.device.started()
        other = bench.call(ids(3), ids(4))
        await asyncio.sleep(0)

        bench.device.let(instead=RuntimeError("out of memory"))
        bench.device.let(9)
        with pytest.raises(DeviceFailed, match="out of memory"):
            await failing
        await other
        assert not bench.batcher.broken.is_set()

    trial(scenario)


def test_a_vector_that_is_not_finite_is_no_answer() -> None:
    async def scenario(bench: Bench) -> None:
        bench.device.let(instead=np.full((2, 4), np.nan, np.float32))
        with pytest.raises(DeviceFailed, match="not finite"):
            await bench.call(ids(1), ids(2))

    trial(scenario)


def test_a_device_that_only_fails_is_broken() -> None:
    async def scenario(bench: Bench) -> None:
        for _ in range(3):
            assert not bench.batcher.broken.is_set()
            bench.device.let(instead=RuntimeError("lost"))
            with pytest.raises(DeviceFailed):
                await bench.call(ids(1), ids(2))
        assert bench.batcher.broken.is_set()

    trial(scenario)


def test_lanes_compute_side_by_side_and_busy_time_counts_once() -> None:
    async def scenario(bench: Bench) -> None:
        calls = [bench.call(ids(1), ids(2)), bench.call(ids(3, 20), ids(4, 20))]
        await bench.device.started()
        await bench.device.started()

        bench.now = 3.0
        assert bench.meter.busy_seconds(bench.now) == 3.0
        bench.device.let(9)
        await asyncio.gather(*calls)

    bench = trial(scenario, lanes=2)
    assert bench.meter.busy_seconds(100.0) == 3.0
    assert (bench.meter.batches, bench.meter.sequences) == (2, 4)


def test_closing_fails_what_waits_and_what_still_comes() -> None:
    async def scenario(bench: Bench) -> None:
        computing = bench.call(ids(1), ids(1))
        await bench.device.started()
        waiting = bench.call(ids(2), ids(2))
        await asyncio.sleep(0)  # lets the call enter the queue

        bench.batcher.close()
        with pytest.raises(Closed):
            await waiting
        with pytest.raises(Closed):  # its texts were being read meanwhile
            await bench.call(ids(3), ids(3))

        bench.device.let()
        await computing
        assert len(bench.device.batches) == 1

    trial(scenario)


def test_a_call_is_charged_its_share_of_each_batch() -> None:
    async def scenario(bench: Bench) -> None:
        first = bench.call(ids(1), ids(2), ids(3))
        await bench.device.started()  # three of one step
        other = bench.call(ids(4, 20), ids(5, 20))
        bench.now += 6
        bench.device.let()
        await bench.device.started()
        bench.now += 3
        bench.device.let()

        assert (await first).compute_s == pytest.approx(6)
        assert (await other).compute_s == pytest.approx(3)

    assert trial(scenario).meter.busy_seconds(9) == 9


def test_those_who_share_a_batch_share_its_cost() -> None:
    async def scenario(bench: Bench) -> None:
        occupied = bench.call(ids(9, 20), ids(9, 20))
        await bench.device.started()
        calls = [bench.call(ids(1), ids(2)), bench.call(ids(3), ids(3))]
        await asyncio.sleep(0)
        bench.device.let()
        await bench.device.started()
        bench.now += 6
        bench.device.let()

        assert [(await call).compute_s for call in calls] == pytest.approx([4, 2])
        assert (await occupied).compute_s == 0

    trial(scenario)


def test_what_is_kept_costs_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        bench.device.let()
        await bench.call(ids(1), ids(1))

        assert (await bench.call(ids(1), ids(1))).compute_s == 0

    trial(scenario)


def test_all_devices_of_a_batch_are_charged() -> None:
    async def scenario(bench: Bench) -> None:
        call = bench.call(ids(1), ids(1))
        await bench.device.started()
        bench.now += 2
        bench.device.let()

        assert (await call).compute_s == pytest.approx(8)

    trial(scenario, devices=4)


def test_fill_padding_and_waits_are_counted() -> None:
    async def scenario(bench: Bench) -> None:
        first = bench.call(ids(1), ids(2, 7))
        await bench.device.started()  # 3 and 7 tokens, padded to 16; up to four rows fit
        second = bench.call(ids(3, 20), ids(3, 20))
        await asyncio.sleep(0)
        bench.now += 2
        bench.device.let(2)
        await asyncio.gather(first, second)

    meter = trial(scenario).meter
    assert (meter.sequences, meter.full_rows) == (3, 4 + 2)
    assert (meter.real_tokens, meter.padded_tokens) == (30, 2 * 16 + 32)
    assert (meter.waits.count, meter.waits.total_s) == (3, 2)


def test_sequences_that_are_never_kept_come_back_alone() -> None:
    async def scenario(bench: Bench) -> None:
        bench.device.let(9)
        for _ in range(2):
            found = await bench.batcher.embed(
                (), [tokens(ids(1)), tokens(ids(2))], priority=1, deadline_at=None
            )

            assert len(found.kept) == 0
            assert np.array_equal(found.once, np.stack([vector(ids(1)), vector(ids(2))]))

    assert len(trial(scenario).device.batches) == 2
