import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model_server.conftest import REAL_SHA256
from tests.model_server.derive_vectors import DIMENSIONS_KEPT, VECTORS
from workers.model_server import device, loader
from workers.model_server.bert.sizes import SIZES
from workers.model_server.device import LoadedModel
from workers.model_server.files import CheckpointRefused, Memory
from workers.model_server.headers import weights_digest
from workers.model_server.reader import Ids, Tokens
from workers.model_server.scheduler import step_for
from workers.model_server.warm_up import WarmupStopped

WIDTH = SIZES["tiny"].width
EXPECTED = json.loads(VECTORS.read_text(encoding="utf-8"))


def alone(model: LoadedModel, ids: Ids) -> np.ndarray:
    """The vector of one sequence in the smallest shape that holds it."""
    step = step_for(len(ids), model.serving.shaping.steps)
    vector: np.ndarray = model.device.embed([ids], step)[0]
    return vector


def sequences(model: LoadedModel, texts: Sequence[str]) -> Sequence[Tokens]:
    return model.read({"query": texts, "text": texts}).once


def test_the_expected_vectors_are_about_these_weights() -> None:
    assert EXPECTED["sha256"].startswith(REAL_SHA256)


def test_real_weights_count_tokens_as_the_independent_tokenizer(real: LoadedModel) -> None:
    assert [tokens.count for tokens in sequences(real, EXPECTED["texts"])] == EXPECTED["tokens"]


@pytest.mark.parametrize("padded", [False, True])
def test_real_weights_give_the_independent_implementations_vectors(
    real: LoadedModel, padded: bool
) -> None:
    found = [tokens.ids for tokens in sequences(real, EXPECTED["texts"])]

    if padded:
        vectors = real.device.embed(found, real.max_tokens)
    else:
        vectors = np.stack([alone(real, ids) for ids in found])

    assert np.abs(vectors[:, :DIMENSIONS_KEPT] - EXPECTED["head"]).max() <= 1e-5
    assert np.abs(np.abs(vectors).sum(1) - EXPECTED["l1"]).max() <= 1e-4  # a sum over 384
    assert np.abs(vectors @ vectors.T - EXPECTED["pair_scores"]).max() <= 1e-5


@settings(max_examples=30)
@given(
    sequences=st.lists(
        st.lists(st.integers(0, 127), min_size=1, max_size=64).map(tuple), min_size=1, max_size=20
    )
)
def test_a_vector_does_not_depend_on_its_batch(tiny: LoadedModel, sequences: list[Ids]) -> None:
    together = tiny.device.embed(sequences, tiny.max_tokens)

    assert together.shape == (len(sequences), WIDTH)
    assert together.dtype == np.float32
    for vector, ids in zip(together, sequences, strict=True):
        assert np.abs(vector - alone(tiny, ids)).max() <= 1e-5
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_the_tiny_model_tells_sequences_apart(tiny: LoadedModel) -> None:
    first, second = (alone(tiny, ids) for ids in ((2, 10, 3), (2, 11, 3)))

    assert np.abs(first - second).max() > 1e-3


def test_a_seed_gives_the_same_model_and_another_seed_another(tiny: LoadedModel) -> None:
    ids = (2, 10, 11, 12, 3)
    again, other = (
        device.load(f"tiny:{seed}", root=None, sha256=None, version=None, stopping=lambda: False)
        for seed in (7, 8)
    )

    assert np.array_equal(alone(tiny, ids), alone(again, ids))
    assert np.abs(alone(tiny, ids) - alone(other, ids)).max() > 1e-2
    assert again.version == tiny.version != other.version


def test_every_served_shape_is_compiled_beforehand(tiny: LoadedModel) -> None:
    assert tiny.serving.shaping.steps == (32, 48, 64)
    for step in tiny.serving.shaping.steps:
        for rows in range(1, tiny.serving.shaping.rows(step) + 1):
            assert tiny.device.embed([(2, 3)] * rows, step).shape == (rows, WIDTH)


def test_weights_of_another_digest_are_refused() -> None:
    digest = weights_digest(Memory(loader.find(loader.DEFAULT).random(7)))

    def load(sha256: str) -> LoadedModel:
        return device.load(
            "tiny:7", root=None, sha256=sha256, version=None, stopping=lambda: False,
            only_smallest=True,
        )  # fmt: skip

    assert load(digest[:12].upper()).version
    with pytest.raises(CheckpointRefused, match="digest_mismatch"):
        load("0" * 12)


def test_warming_up_can_be_stopped() -> None:
    with pytest.raises(WarmupStopped):
        device.load("tiny:7", root=None, sha256=None, version=None, stopping=lambda: True)
