import json
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from airs_site.management.commands import simulate
from airs_site.simulation.trace import read_parameters, write_trace
from tests.simulation import small
from tests.simulation.small import evaluation

JOBS = (evaluation(1, 12, owner="ann"), evaluation(2, 24, owner="bob", deadline_s=20.0))


@pytest.fixture
def params(tmp_path: Path) -> Path:
    path = tmp_path / "params.json"
    path.write_text(json.dumps(small.document()))
    return path


def run(*arguments: Any, out: Path) -> dict[str, Any]:
    call_command("simulate", *(str(a) for a in arguments), "--out", str(out), "--jobs", "1")
    written: dict[str, Any] = json.loads(out.read_text())
    return written


def test_a_trace_is_simulated_with_the_parameters_beside_it(
    tmp_path: Path, params: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "trace.jsonl.gz", JOBS)

    written = run(
        *("--trace", tmp_path / "trace.jsonl.gz", "--scale", "1", "--policies", "fifo,airs"),
        *("--disturb", "pool_loss", "--pool-scale", "1,2", "--at", "sat-0"),
        out=tmp_path / "made" / "simulation.json",
    )

    assert list(written["policies"]) == ["fifo", "airs"]
    assert set(written["disturbances"]["pool_loss"]) == {"fifo", "airs"}
    assert (written["trace"], written["scale"], written["seeds"]) == ("trace.jsonl.gz", 1, [])
    said = capsys.readouterr().out
    assert "whole in time" in said
    assert "Sat 0:00" in said
    assert "airs: 8 replicas are enough for 99.5 % whole in time" in said
    made = {path.name for path in (tmp_path / "made").iterdir()}
    assert {"simulation.json", "simulation.html", "duty.png", "latency.png", "pools.png"} <= made


def test_workloads_are_generated_alike_each_time_and_in_any_number_of_processes(
    tmp_path: Path, params: Path
) -> None:
    arguments = (
        *("--params", params, "--seeds", "1,2", "--scale", "200", "--policies", "fifo,airs"),
        *("--days", "1", "--no-plots", "--disturb", "wrong_costs"),
    )

    first = run(*arguments, out=tmp_path / "first.json")
    second = run(*arguments, out=tmp_path / "second.json")
    call_command(
        "simulate", *map(str, arguments), "--out", str(tmp_path / "third.json"), "--jobs", "2"
    )

    assert first["seeds"] == [1, 2]
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "third.json").read_bytes()
    assert first == second


def test_a_layer_is_held_against_the_full_service(tmp_path: Path, params: Path) -> None:
    written = run(
        *("--params", params, "--seeds", "1", "--scale", "200", "--policies", "fifo"),
        *("--days", "1", "--no-plots", "--ablate"),
        out=tmp_path / "simulation.json",
    )

    assert list(written["policies"]) == ["fifo", "airs"]
    assert "gain" in written["ablation"]["archive"]


def test_the_projects_own_parameters_read_and_are_the_default() -> None:
    options = {"params": None, "trace": None}

    assert simulate._params_path(options) == simulate.SAMPLE
    described = read_parameters(simulate.SAMPLE)
    assert sum(rater.default_replicas for rater in described.raters) == described.replicas


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--trace", "nowhere.gz"], "nowhere.gz"),
        (["--seeds", "1", "--policies", "lifo"], "no policy lifo; there are paper"),
        (["--seeds", "1", "--scale", "0"], "0 is not a whole number from 1"),
        (["--seeds", "1", "--disturb", "rain"], "invalid choice: 'rain'"),
        (["--seeds", "1", "--pool-scale", "1,-1"], "'1,-1' has a number that is not above 0"),
        (["--seeds", "1", "--at", "noon"], "'noon' is no hour of the week such as mon-10"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], problem: str, params: Path) -> None:
    with pytest.raises(CommandError, match=problem):
        call_command("simulate", "--params", params, "--jobs", "1", *arguments)


def test_without_matplotlib_there_are_figures_and_a_hint(
    tmp_path: Path,
    params: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.startswith("airs_site.simulation.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "airs_site.simulation.page", raising=False)
    monkeypatch.delitem(sys.modules, "matplotlib.axes", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    run(
        *("--params", params, "--seeds", "1", "--scale", "200", "--policies", "fifo"),
        *("--days", "1"),
        out=tmp_path / "simulation.json",
    )

    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "simulation.html").exists()


def test_fewer_days_are_the_first_of_all(params: Path) -> None:
    described = read_parameters(params)
    options = {"trace": None, "seeds": [1]}

    ((_, shorter),) = simulate._workloads(described, simulate._shortened(described, 1), 40, options)
    ((_, longer),) = simulate._workloads(described, described, 40, options)

    count = len(shorter.evaluations)
    assert 0 < count < len(longer.evaluations)
    assert shorter.evaluations == longer.evaluations[:count]
    assert shorter.params.days == 1
