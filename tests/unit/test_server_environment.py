"""What a model server gets of the environment."""

import pytest

from models_admin import server_environment


@pytest.mark.parametrize(
    "name", ["PATH", "LC_ALL", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "AIRS_HOME", "PYTHONPATH"]
)
def test_a_server_gets_what_its_device_and_its_language_need(name: str) -> None:
    assert server_environment.of({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    ["OPENAI_KEY", "VLLM", "DATABASE_URL", "REDIS_URL", "AIRS_API_TOKEN", "AIRS_SECRET_KEY"],
)
def test_a_server_gets_nothing_that_may_be_a_key(name: str) -> None:
    assert server_environment.of({name: "x"}) == {}
