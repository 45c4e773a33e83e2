"""Options of a model's `serving`, and the flags of the model server that they become."""

from typing import Any

import pytest

from models_admin import serving
from workers.model_server.__main__ import parse

GOOD = {
    "batch_tokens": 1024,
    "cached_queries": 0,
    "dtype": "bf16",
    "headroom": 16,
    "lanes": 2,
    "lengths": [32, 64],
    "max_queue": 512,
    "tuned": "off",
}


def test_each_option_is_a_flag_that_the_server_knows() -> None:
    known = vars(parse(["--model-name", "m", "--checkpoint", "tiny:0", "--port", "0"]))

    assert set(serving.OPTIONS) <= set(known)
    assert serving.problems(GOOD) == []
    assert set(GOOD) == set(serving.OPTIONS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_tokens", 0),
        ("batch_tokens", True),
        ("batch_tokens", "1024"),
        ("cached_queries", -1),
        ("dtype", "float64"),
        ("dtype", ["f32"]),
        ("lanes", 0),
        ("lanes", 65),
        ("lengths", []),
        ("lengths", [64, 64]),
        ("lengths", [4]),
        ("lengths", [32, "64"]),
        ("max_queue", 1.5),
        ("tuned", "no"),
    ],
)
def test_a_bad_value_is_named_with_what_the_option_takes(name: str, value: Any) -> None:
    (problem,) = serving.problems({name: value})

    assert problem.startswith(f"{name} is ")
    assert serving.OPTIONS[name].meaning in problem
    assert "leave it out" in problem


def test_room_for_urgent_calls_is_less_than_the_queue() -> None:
    assert "lower it" in serving.problems({"max_queue": 8, "headroom": 8})[0]
    assert "2048" in serving.problems({"headroom": 2048})[0]
