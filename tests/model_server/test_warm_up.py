"""The warm-up's choice, on a device that takes time only by its own clock."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.model_server.test_tuning import Cost
from workers.model_server import device, tuning
from workers.model_server import warm_up as warming
from workers.model_server.device import LoadedModel
from workers.model_server.kept_figures import KeptFigures
from workers.model_server.serving import SERVING, Options, Serving
from workers.model_server.tuning import Machine, Trial
from workers.model_server.warm_up import Chosen, WarmupStopped, warm_up

CPU = SERVING["cpu"]
# Its batches are large enough that smaller and larger ones can win.
TABLE = replace(CPU, shaping=replace(CPU.shaping, batch_tokens=1024))
LIMIT_S = 20.0
SMALL_BATCHES = Cost(fixed_s=0.001, token_s=2.5e-5, cache_tokens=512, past_cache=4, lanes=1)
"""Of a device that is faster with half of the table's tokens."""


@dataclass(kw_only=True)
class VirtualDevice:
    """Computes one call at a time; its clock moves by what they cost."""

    cost: Cost = SMALL_BATCHES
    memory_tokens: int = 10**9
    now: float = 0.0
    runs: int = 0
    compiled: set[tuple[int, int]] = field(default_factory=set)
    serving: Serving = TABLE
    lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(
        self, stopping: Callable[[], bool], shapes: Sequence[tuple[int, int]] | None = None
    ) -> None:
        wanted = self.serving.shapes() if shapes is None else shapes
        if any(rows * step > self.memory_tokens for rows, step in wanted):
            raise MemoryError
        self.compiled |= set(wanted)

    def run(self, rows: int, step: int) -> None:
        assert (rows, step) in self.compiled
        with self.lock:
            self.runs += 1
            self.now += self.cost.seconds(Trial(rows=rows, step=step, lanes=1))

    def adopt(self, serving: Serving) -> None:
        self.serving = serving
        self.compiled &= set(serving.shapes())

    def warm_up(
        self,
        kept: KeptFigures | None,
        options: Options = Options(),  # noqa: B008 - frozen
        stopping: Callable[[], bool] = lambda: False,
    ) -> Chosen:
        chosen = warm_up(
            self,
            self.serving,
            options,
            kept=kept,
            machine=Machine(platform="cpu", cores=2),
            stopping=stopping,
            limit_s=LIMIT_S,
            clock=lambda: self.now,
        )
        assert self.compiled == set(chosen.serving.shapes())
        return chosen


@pytest.fixture
def kept(tmp_path: Path) -> KeptFigures:
    return KeptFigures(tmp_path / "figures", {"checkpoint": "abc", "cores": 2})


def test_the_first_start_measures_and_a_restart_does_not(kept: KeptFigures) -> None:
    first, again = VirtualDevice(), VirtualDevice()

    chosen, later = first.warm_up(kept), again.warm_up(kept)

    assert chosen.serving.shaping.batch_tokens == 512
    assert "times as fast as the table's" in chosen.reason
    assert later.serving == chosen.serving
    assert later.reason == f"{chosen.reason} (kept from an earlier start)"
    assert first.now <= LIMIT_S + 1
    assert (again.runs, again.now) == (0, 0)


def test_what_it_depends_on_has_a_file_of_its_own(tmp_path: Path, kept: KeptFigures) -> None:
    VirtualDevice().warm_up(kept)
    other = VirtualDevice(cost=Cost())

    other.warm_up(KeptFigures(tmp_path / "figures", {"checkpoint": "abc", "cores": 4}))

    assert other.runs > 0
    assert other.serving == replace(TABLE, shaping=other.serving.shaping)


def test_a_device_too_slow_to_measure_keeps_the_table_within_the_limit(kept: KeptFigures) -> None:
    device = VirtualDevice(cost=Cost(token_s=0.01))

    chosen = device.warm_up(kept)

    assert chosen.serving == TABLE
    assert "too slow" in chosen.reason
    longest_s = 1024 * 0.01 * TABLE.lanes
    assert device.now <= LIMIT_S + 4 * longest_s
    assert not kept.path.exists(), "it may have been others that made it slow"


@dataclass(kw_only=True)
class FlatteringDevice(VirtualDevice):
    """Some shapes take half of their time at first."""

    flattered: set[tuple[int, int]]
    seen: Counter[tuple[int, int]] = field(default_factory=Counter)

    def run(self, rows: int, step: int) -> None:
        before = self.now
        super().run(rows, step)
        self.seen[rows, step] += 1
        if (rows, step) in self.flattered and self.seen[rows, step] <= 4:
            self.now -= 0.5 * (self.now - before)


def test_a_winner_has_to_win_again(kept: KeptFigures) -> None:
    (half, _) = tuning.other_sizes(TABLE, Options())
    shapes = {(trial.rows, trial.step) for trial in tuning.trials(half)}
    device = FlatteringDevice(cost=Cost(fixed_s=0.001, lanes=1), flattered=shapes)

    chosen = device.warm_up(kept)

    assert all(device.seen[shape] > 8 for shape in shapes)  # they met the table's again
    assert chosen.serving.shaping.batch_tokens == 1024


def test_a_model_that_takes_no_time_keeps_the_table(kept: KeptFigures) -> None:
    chosen = VirtualDevice(cost=Cost(fixed_s=0.0001, token_s=1e-7)).warm_up(kept)

    assert chosen.serving == TABLE
    assert "takes 0.2 ms" in chosen.reason


def test_batches_that_the_memory_does_not_hold_are_not_taken(
    kept: KeptFigures, caplog: pytest.LogCaptureFixture
) -> None:
    device = VirtualDevice(cost=Cost(fixed_s=0.02, token_s=2e-5, lanes=1), memory_tokens=1024)

    chosen = device.warm_up(kept)

    assert chosen.serving.shaping.batch_tokens == 1024
    assert "shapes not tried" in caplog.messages


def test_what_the_operator_chose_stays(kept: KeptFigures) -> None:
    table = TABLE.chosen(Options(batch_tokens=1024), max_tokens=256, devices=1)

    chosen = VirtualDevice(serving=table).warm_up(kept, Options(batch_tokens=1024))

    assert chosen.serving.shaping.batch_tokens == 1024


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        json.dumps({"figures": {"lanes": 2}, "reason": ""}).encode(),
        json.dumps({"figures": {**TABLE.figures, "lanes": 0}, "reason": ""}).encode(),
        json.dumps({"figures": {**TABLE.figures, "row_counts": []}, "reason": ""}).encode(),
        json.dumps({"figures": {**TABLE.figures, "fill_tokens": 9999}, "reason": ""}).encode(),
    ],
)
def test_a_file_that_makes_no_sense_is_made_anew(
    content: bytes, kept: KeptFigures, caplog: pytest.LogCaptureFixture
) -> None:
    kept.path.parent.mkdir()
    kept.path.write_bytes(content)

    chosen = VirtualDevice().warm_up(kept)

    assert "kept figures ignored" in caplog.messages
    assert kept.read(TABLE) == (chosen.serving, chosen.reason)


def test_figures_that_cannot_be_kept_serve_nevertheless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").write_text("no directory")

    chosen = VirtualDevice().warm_up(KeptFigures(tmp_path / "full", {}))

    assert chosen.serving.shaping.batch_tokens == 512
    assert "figures not kept" in caplog.messages


def test_no_two_servers_measure_at_a_time(kept: KeptFigures) -> None:
    other = VirtualDevice()

    with kept.measuring() as alone:
        chosen = other.warm_up(kept)

    assert alone
    reason = "the table's: another server is measuring"
    assert chosen == Chosen(serving=TABLE, reason=reason, is_final=False)
    assert other.runs == 0
    assert kept.read(TABLE) is None


def test_measuring_ends_when_the_process_is_told_to(kept: KeptFigures) -> None:
    device = VirtualDevice()

    with pytest.raises(WarmupStopped):
        device.warm_up(kept, stopping=lambda: device.runs > 20)

    assert kept.read(TABLE) is None
    with kept.measuring() as alone:
        assert alone


def test_nothing_is_measured_where_it_is_off_or_cannot_be_kept(kept: KeptFigures) -> None:
    off, homeless = VirtualDevice(), VirtualDevice()

    assert off.warm_up(kept, Options(tuned="off")).serving == TABLE
    assert homeless.warm_up(None).serving == TABLE
    assert (off.runs, homeless.runs) == (0, 0)


def test_no_choice_moves_a_score(tiny: LoadedModel) -> None:
    sequences = [tuple(range(2, 2 + length)) for length in (1, 3, 9, 20, 31, 2, 30, 8, 12)]
    before = tiny.device.embed(sequences, 32)
    try:
        for tokens, counts in ((128, (1, 2)), (256, (1,)), (2048, (1, 2, 4, 8, 16))):
            shaping = replace(tiny.serving.shaping, batch_tokens=tokens, steps=(32,))
            tiny.device.adopt(replace(tiny.serving, shaping=shaping, row_counts=counts))
            tiny.device.compile(lambda: False)

            assert np.abs(tiny.device.embed(sequences, 32) - before).max() <= 1e-5
    finally:
        tiny.device.adopt(tiny.serving)
        tiny.device.compile(lambda: False)


@pytest.mark.usefixtures("compilations")
def test_a_real_device_is_measured_and_a_restart_serves_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tiny: LoadedModel
) -> None:
    monkeypatch.setattr(warming, "_WORTH_S", 0.0)

    def start() -> LoadedModel:
        return device.load(
            "tiny:7",
            root=None,
            sha256=None,
            version=None,
            options=Options(batch_tokens=512),
            stopping=lambda: False,
            tuning_limit_s=3.0,
        )

    first, again = start(), start()

    assert first.chosen.reason.startswith("a call costs ")
    assert again.chosen.reason == f"{first.chosen.reason} (kept from an earlier start)"
    assert again.serving == first.serving
    assert first.serving.shaping.batch_tokens == 512
    assert first.version == tiny.version
    texts = [tuple(range(2, 2 + length)) for length in (1, 9, 20, 31)]
    assert np.abs(again.device.embed(texts, 32) - tiny.device.embed(texts, 32)).max() <= 1e-5
