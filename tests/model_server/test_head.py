"""A head beside the encoder: its sum, its range, and what it leaves alone."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.model_server.conftest import load
from workers.model_server import device, loader
from workers.model_server.device import LoadedModel

PAIRS = {"query": ["ab", "ab", "some query"], "text": ["ab", "cd efg", "text " * 30]}


@pytest.fixture(scope="module")
def headed(compilations: Path) -> LoadedModel:
    return load("tiny:7", loader="embedding_head")


def outputs(model: LoadedModel, pairs: dict[str, list[str]]) -> dict[str, np.ndarray]:
    rows = model.read(pairs)
    kept, once = (
        model.device.embed([tokens.ids for tokens in part], 64) for part in (rows.kept, rows.once)
    )
    return model.combine(rows, kept, once)


def with_head(tmp_path: Path, **tensors: object) -> LoadedModel:
    directory = tmp_path / "headed"
    directory.mkdir()
    files = {**loader.find("bert_encoder").random(7)}
    files["head.safetensors"] = save(
        {name: np.array(values, np.float32) for name, values in tensors.items()}
    )
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return device.load(
        "headed",
        root=tmp_path,
        sha256=None,
        version=None,
        loader_name="embedding_head",
        stopping=lambda: False,
        only_smallest=True,
    )


def test_a_score_is_the_weighed_sum(tiny: LoadedModel, compilations: Path, tmp_path: Path) -> None:
    query, text = np.linspace(-1, 1, 32), np.linspace(2, 0, 32)
    headed = with_head(
        tmp_path,
        bias=[0.5],
        range=[-100, 100],
        cosine=[2],
        log_tokens=[0.1],
        query=query,
        text=text,
    )
    rows = tiny.read(PAIRS)
    kept, once = (
        tiny.device.embed([tokens.ids for tokens in part], 64) for part in (rows.kept, rows.once)
    )

    found = headed.combine(rows, kept, once)

    counts = np.array(rows.counts["tokens"])
    assert counts.max() > 64  # length before the cut
    expected = 0.5 + 2 * (kept * once).sum(1) + 0.1 * np.log(1 + counts)
    expected += kept @ query + once @ text
    assert np.abs(found["score"][:, 0] - expected).max() <= 1e-5
    assert np.abs(found["cosine"][:, 0] - (kept * once).sum(1)).max() <= 1e-6
    assert found["score"].dtype == np.float32


def test_weights_that_are_left_out_are_zero_and_the_range_cuts(
    compilations: Path, tmp_path: Path
) -> None:
    headed = with_head(tmp_path, bias=[0.0], range=[0, 0.9], cosine=[1])
    rows = headed.read({"query": ["a", "a"], "text": ["b", "c"]})
    unit = np.eye(32, dtype=np.float32)

    found = headed.combine(rows, unit[[0, 0]], np.stack([unit[0], -unit[0]]))

    assert found["score"].ravel().tolist() == pytest.approx([0.9, 0])


def test_a_score_does_not_depend_on_the_rows_beside_it(headed: LoadedModel) -> None:
    together = outputs(headed, PAIRS)["score"]
    backwards = outputs(headed, {name: texts[::-1] for name, texts in PAIRS.items()})["score"]
    alone = [
        outputs(headed, {name: [texts[i]] for name, texts in PAIRS.items()})["score"][0]
        for i in range(3)
    ]

    assert np.abs(together - alone).max() <= 1e-5
    assert np.abs(together - backwards[::-1]).max() <= 1e-5
    assert np.ptp(together) > 1e-2
