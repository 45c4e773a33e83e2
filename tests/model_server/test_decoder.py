"""The second architecture, against numpy code in double precision that shares nothing with it."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as read_safetensors

from workers.model_server import loader
from workers.model_server.arrays import character_tokenizer
from workers.model_server.device import LoadedModel
from workers.model_server.reader import Ids, PairReader
from workers.model_server.scheduler import step_for

FILES = loader.find("decoder_score").random(7)
CONFIG = json.loads(FILES["config.json"])
TENSORS = {
    name: tensor.astype(np.float64)
    for name, tensor in read_safetensors(FILES["model.safetensors"]).items()
}
SEQUENCES = [(2, 3, 3), (2, 10, 11, 3, 12, 13, 14, 3), tuple(range(60)), (5,), (127,) * 64]


def expected_logit(ids: Ids) -> float:
    """One sequence, token after token, head after head, as a textbook has it."""
    heads, key_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    size = CONFIG["hidden_size"] // heads
    x = TENSORS["model.embed_tokens.weight"][list(ids)]
    for number in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{number}"
        inputs = rms(x, TENSORS[f"{at}.input_layernorm.weight"])
        query, key, value = (
            inputs @ TENSORS[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkv"
        )
        mixed = np.zeros_like(x)
        for head in range(heads):
            shared = head // (heads // key_heads)
            own, other = (
                slice(head * size, head * size + size),
                slice(shared * size, shared * size + size),
            )
            for i in range(len(ids)):
                turned = turn(query[i, own], i)
                scores = np.array([turned @ turn(key[j, other], j) for j in range(i + 1)])
                weights = np.exp(scores / np.sqrt(size) - (scores / np.sqrt(size)).max())
                mixed[i, own] = weights / weights.sum() @ value[: i + 1, other]
        x = x + mixed @ TENSORS[f"{at}.self_attn.o_proj.weight"].T
        inputs = rms(x, TENSORS[f"{at}.post_attention_layernorm.weight"])
        gate = inputs @ TENSORS[f"{at}.mlp.gate_proj.weight"].T
        up = inputs @ TENSORS[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ TENSORS[f"{at}.mlp.down_proj.weight"].T
    last = rms(x[-1], TENSORS["model.norm.weight"])
    return float(TENSORS["score.weight"][0] @ last)


def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    mean = (x**2).mean(axis=-1, keepdims=True)
    normed: np.ndarray = x / np.sqrt(mean + CONFIG["rms_norm_eps"]) * scale
    return normed


def turn(vector: np.ndarray, position: int) -> np.ndarray:
    """Coordinates k and k + half as a complex number, turned by position times frequency k."""
    half = len(vector) // 2
    frequencies = [CONFIG["rope_theta"] ** (-k / half) for k in range(half)]
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * np.array(frequencies))
    return np.concatenate([turned.real, turned.imag])


def logits(model: LoadedModel, sequences: Sequence[Ids], step: int) -> np.ndarray:
    return model.device.embed(sequences, step)[:, 0]


def test_logits_are_the_independent_implementations(decoder: LoadedModel) -> None:
    found = logits(decoder, SEQUENCES, 64)

    expected = [expected_logit(ids) for ids in SEQUENCES]
    assert np.abs(found - expected).max() <= 1e-5
    assert np.ptp(expected) > 0.1


@settings(max_examples=20)
@given(
    sequences=st.lists(
        st.lists(st.integers(0, 127), min_size=1, max_size=64).map(tuple), min_size=1, max_size=20
    )
)
def test_a_logit_does_not_depend_on_its_batch(decoder: LoadedModel, sequences: list[Ids]) -> None:
    together = logits(decoder, sequences, 64)
    backwards = logits(decoder, sequences[::-1], 64)[::-1]
    steps = decoder.serving.shaping.steps
    alone = [logits(decoder, [ids], step_for(len(ids), steps))[0] for ids in sequences]

    assert np.abs(together - alone).max() <= 1e-5
    assert np.abs(together - backwards).max() <= 1e-5


def score(model: LoadedModel, query: str, text: str) -> Mapping[str, np.ndarray]:
    rows = model.read({"query": [query], "text": [text]})
    (pair,) = rows.once
    vectors = model.device.embed([pair.ids], step_for(len(pair.ids), (32, 64)))
    return model.combine(rows, np.empty((0, 0)), vectors)


def test_a_score_is_the_sigmoid_and_query_and_text_are_told_apart(decoder: LoadedModel) -> None:
    found, other = score(decoder, "ab", "cd"), score(decoder, "cd", "ab")

    # [CLS] a ##b [SEP] c ##d [SEP]
    vocabulary = character_tokenizer().get_vocab()
    pieces = ("[CLS]", "a", "##b", "[SEP]", "c", "##d", "[SEP]")
    ids = tuple(vocabulary[piece] for piece in pieces)
    logit = expected_logit(ids)
    assert found["logit"].shape == found["score"].shape == (1, 1)
    assert found["logit"][0, 0] == pytest.approx(logit, abs=1e-5)
    assert found["score"][0, 0] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)
    assert abs(found["logit"] - other["logit"])[0, 0] > 1e-3


def test_no_logit_is_too_large_for_the_sigmoid(decoder: LoadedModel) -> None:
    rows = decoder.read({"query": ["a"] * 2, "text": ["b"] * 2})

    found = decoder.combine(rows, np.empty((0, 0)), np.array([[-1e4], [1e4]], np.float32))

    assert found["score"].ravel().tolist() == [0, 1]


READER = PairReader(character_tokenizer(), max_tokens=13, begin=(2,), separator=(3,), end=(3,))


@pytest.mark.parametrize(
    ("query", "text", "parts"),
    [
        ("ab", "abcd", (2, 4)),
        ("", "", (0, 0)),
        ("a" * 3, "b" * 20, (3, 7)),
        ("a" * 20, "b" * 3, (7, 3)),
        ("a" * 20, "b" * 20, (5, 5)),
        ("a" * 5, "b" * 5, (5, 5)),
    ],
)
def test_of_a_long_pair_the_text_gets_at_least_half(
    query: str, text: str, parts: tuple[int, int]
) -> None:
    ((pair, query_tokens),) = READER.read([query], [text])

    separator = pair.ids.index(3)
    assert (separator - 1, len(pair.ids) - separator - 2) == parts
    assert pair.ids[0] == 2
    assert pair.ids[-1] == 3
    assert pair.count == 3 + len(query) + len(text)
    assert query_tokens == len(query)
    assert len(pair.ids) == min(pair.count, 13)
