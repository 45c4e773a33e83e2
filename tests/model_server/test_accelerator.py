"""The script that is run where there is an accelerator, here on a CPU with tiny sizes."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import accelerator


@pytest.mark.acceptance
def test_the_script_measures_everything_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"

    status = accelerator.main(
        ["--quick", "--checkpoint", "tiny:7", "--platform", "cpu", "--output", str(output)]
    )

    found = json.loads(output.read_text())
    assert status == 0, found
    assert found["parity"]["f32"]["largest"] <= 1e-6
    assert found["parity"]["auto"]["rows"] == 24
    assert {(cell["rows"], cell["length"]) for cell in found["throughput"]["cells"]} == {
        (rows, length) for rows in (1, 16) for length in (32, 64)
    }
    assert all(cell["rows_per_s"] > 0 for cell in found["throughput"]["cells"])
    assert 0 < found["duty"]["duty_cycle"] <= 1
    assert found["duty"]["rows_per_s"] > 0
    shown = capsys.readouterr().out
    assert "parity auto (float32 on cpu, 24 rows)" in shown
    assert "FAILED" not in shown


@pytest.mark.acceptance
def test_a_part_that_fails_says_why_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_child", lambda *_: {"devices": 1, "cells": []})

    status = accelerator.main(
        ["--quick", "--checkpoint", "tiny:no", "--platform", "cpu", "--output", str(tmp_path / "f")]
    )

    found = json.loads((tmp_path / "f").read_text())
    assert status == 1
    assert "KeyError" in found["parity"]["failed"]
    assert found["throughput"] == {"devices": 1, "cells": []}
    assert "did not become ready" in found["duty"]["failed"]
    assert capsys.readouterr().out.count("FAILED") == 2
