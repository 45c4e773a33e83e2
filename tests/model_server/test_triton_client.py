"""Triton's own HTTP client against our server, in a process of its own: it brings gevent."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model_server.test_process import LIMIT_S, ROOT, command, running

SCRIPT = """
import json, sys
import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(sys.argv[1])
VERSION = "tiny-7-bert1-float32"

def column(name, texts, *, binary=True, shape=None, datatype="BYTES"):
    tensor = triton.InferInput(name, shape or [len(texts), 1], datatype)
    if datatype == "BYTES":
        values = np.array([[text] for text in texts], object).reshape(shape or [len(texts), 1])
        tensor.set_data_from_numpy(values, binary_data=binary)
    else:
        tensor.set_data_from_numpy(np.zeros((len(texts), 1), np.float32), binary_data=binary)
    return tensor

QUERIES, TEXTS = ["ab", "ab", "cd"], ["ab", "h\\u00e4rte " * 30, ""]

def infer(*, binary=True, model="m", **options):
    inputs = [column("query", QUERIES, binary=binary), column("text", TEXTS, binary=binary)]
    return client.infer(model, inputs, **options)

def refused(call):
    try:
        call()
    except InferenceServerException as error:
        return [error.status(), error.message()]
    return "accepted"

def answer(found):
    return {
        "scores": found.as_numpy("score").ravel().tolist(),
        "tokens": found.as_numpy("tokens").ravel().tolist(),
        "response": found.get_response(),
    }

found = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready(),
    "model_ready": client.is_model_ready("m"),
    "version_ready": client.is_model_ready("m", VERSION),
    "other_ready": client.is_model_ready("other"),
    "server": client.get_server_metadata(),
    "metadata": client.get_model_metadata("m"),
    "config": client.get_model_config("m", VERSION),
    "index": client.get_model_repository_index(),
    "binary": answer(infer(request_id="r1", priority=1, timeout=60_000_000)),
    "json": answer(infer(binary=False)),
    "gzip": answer(infer(request_compression_algorithm="gzip")),
    "deflate": answer(infer(request_compression_algorithm="deflate")),
    "zipped_answer": answer(infer(response_compression_algorithm="gzip")),
    "named": infer(
        outputs=[triton.InferRequestedOutput("embedding", binary_data=True),
                 triton.InferRequestedOutput("score", binary_data=False)],
        model_version=VERSION,
    ).as_numpy("embedding").shape,
    "async": answer(client.async_infer("m", [column("query", QUERIES), column("text", TEXTS)])
                    .get_result()),
    "refused": {
        "model": refused(lambda: infer(model="other")),
        "metadata": refused(lambda: client.get_model_metadata("other")),
        "version": refused(lambda: infer(model_version="9")),
        "name": refused(lambda: client.infer("m", [column("query", ["a"]), column("page", ["a"])])),
        "missing": refused(lambda: client.infer("m", [column("query", ["a"])])),
        "shape": refused(lambda: client.infer(
            "m", [column("query", ["a", "b"], shape=[1, 2]), column("text", ["a"])])),
        "rows": refused(lambda: client.infer(
            "m", [column("query", ["a", "b"]), column("text", ["a"])])),
        "datatype": refused(lambda: client.infer(
            "m", [column("query", ["a"]), column("text", ["a"], datatype="FP32")])),
        "output": refused(lambda: infer(outputs=[triton.InferRequestedOutput("logits")])),
        "oversized": refused(lambda: client.infer(
            "m", [column("query", ["a"]), column("text", ["x" * 100_000])])),
        "many": refused(lambda: client.infer(
            "m", [column("query", ["a"] * 40), column("text", ["a"] * 40)])),
        "load": refused(lambda: client.load_model("m")),
    },
    "statistics": client.get_inference_statistics("m", VERSION),
}
client.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def seen(compilations: Path) -> dict[str, Any]:
    """What the client saw."""
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("needs Triton's client: pip install -r requirements-dev.txt")
    options = ("--cache-dir", compilations, "--max-body-bytes", 50_000, "--max-queue", 40)
    with running(command(*options)) as server:
        address = server.ready()["url"].removeprefix("http://")
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_health_is_understood(seen: dict[str, Any]) -> None:
    ready = [seen[name] for name in ("live", "ready", "model_ready", "version_ready")]

    assert ready == [True] * 4
    assert not seen["other_ready"]


def test_metadata_and_configuration_describe_the_same_tensors(seen: dict[str, Any]) -> None:
    metadata, config = seen["metadata"], seen["config"]
    names = {"input": ["query", "text"], "output": ["score", "tokens", "query_tokens", "embedding"]}

    assert set(seen["server"]["extensions"]) >= {
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "schedule_policy",
        "statistics",
    }
    assert metadata["versions"] == ["tiny-7-bert1-float32"]
    for kind, expected in names.items():
        assert [tensor["name"] for tensor in metadata[f"{kind}s"]] == expected
        assert [tensor["name"] for tensor in config[kind]] == expected
    assert config["input"][0] == {"name": "query", "data_type": "TYPE_STRING", "dims": [1]}
    assert config["output"][3] == {"name": "embedding", "data_type": "TYPE_FP32", "dims": [32]}
    assert config["max_batch_size"] == 30
    assert seen["index"] == [
        {"name": "m", "version": "tiny-7-bert1-float32", "state": "READY", "reason": ""}
    ]


def test_all_ways_of_asking_get_the_same_scores(seen: dict[str, Any]) -> None:
    first = seen["binary"]

    assert first["scores"][0] == pytest.approx(1)
    assert first["tokens"][2] == 2
    assert first["tokens"][1] > 64
    assert first["response"]["id"] == "r1"
    assert first["response"]["model_version"] == "tiny-7-bert1-float32"
    for way in ("json", "gzip", "deflate", "zipped_answer", "async"):
        assert seen[way]["scores"] == pytest.approx(first["scores"], abs=1e-6)
        assert seen[way]["tokens"] == first["tokens"]
    assert seen["named"] == [3, 32]


@pytest.mark.parametrize(
    ("mistake", "status", "text"),
    [
        ("model", "404", "this server has the model 'm'"),
        ("metadata", "404", "this server has the model 'm'"),
        ("version", "404", "served is version 'tiny-7-bert1-float32'"),
        ("name", "400", "inputs[1].name: 'page' is unknown or given twice"),
        ("missing", "400", "inputs.text: missing"),
        ("shape", "400", "inputs.query.shape: must be [N,1] or [N]"),
        ("rows", "400", "inputs: they differ in their numbers of rows"),
        ("datatype", "400", "inputs.text.datatype: must be BYTES"),
        ("output", "400", "outputs[0].name: 'logits' is none of score"),
        ("oversized", "413", "the body: Maximum request body size 50000 exceeded"),
        ("many", "413", "inputs: 40 rows, at most 30 a call"),
        ("load", "404", "Not Found"),
    ],
)
def test_a_mistake_is_an_exception_that_names_it(
    mistake: str, status: str, text: str, seen: dict[str, Any]
) -> None:
    told, message = seen["refused"][mistake]

    assert told == status
    assert message.startswith(text)


def test_statistics_count_what_was_asked(seen: dict[str, Any]) -> None:
    (statistics,) = seen["statistics"]["model_stats"]
    successes = statistics["inference_stats"]["success"]

    assert (statistics["name"], statistics["version"]) == ("m", "tiny-7-bert1-float32")
    assert successes["count"] == 7
    assert successes["ns"] > 0
    assert statistics["inference_count"] == 3 * 7
    assert 1 <= statistics["execution_count"] <= 3 * 7
    assert statistics["inference_stats"]["fail"]["count"] == 8
