import json
from typing import Any

import numpy as np
import pytest

from workers.model_server.bert.loader import BertEncoder
from workers.model_server.protocol import (
    DEFAULT_PRIORITY,
    BadRequest,
    InferRequest,
    RequestedOutput,
    parse_infer,
    render_infer,
)

SIGNATURE = BertEncoder().signature(3)


def tensor(name: str, data: Any, shape: Any = None, **changes: Any) -> dict[str, Any]:
    shape = [len(data), 1] if shape is None else shape
    return {"name": name, "datatype": "BYTES", "shape": shape, "data": data, **changes}


def document(**changes: Any) -> dict[str, Any]:
    return {"inputs": [tensor("query", ["q", "r"]), tensor("text", ["a", "b"])], **changes}


def parse(value: Any) -> InferRequest:
    return parse_infer(json.dumps(value).encode(), signature=SIGNATURE)


def test_a_plain_request_gets_the_default_outputs() -> None:
    request = parse(document())

    assert request.inputs["query"] == ["q", "r"]
    assert request.inputs["text"] == ["a", "b"]
    assert [output.name for output in request.outputs] == ["score", "tokens", "query_tokens"]
    assert not any(output.binary for output in request.outputs)
    assert (request.id, request.priority, request.timeout_s) == (None, DEFAULT_PRIORITY, None)


@pytest.mark.parametrize(
    ("shape", "data"),
    [([2, 1], ["a", "b"]), ([2], ["a", "b"]), ([2, 1], [["a"], ["b"]]), ([2], [["a"], ["b"]])],
)
def test_shapes_and_nested_data_mean_the_same(shape: list[int], data: Any) -> None:
    request = parse(document(inputs=[tensor("text", data, shape), tensor("query", ["q", "r"])]))

    assert request.inputs["text"] == ["a", "b"]


def test_id_priority_timeout_and_outputs_are_taken_over() -> None:
    request = parse(
        document(
            id="call-7",
            parameters={"priority": 3, "timeout": 2_500_000, "unknown": "ignored"},
            outputs=[{"name": "embedding"}, {"name": "score", "parameters": {"binary_data": True}}],
        )
    )

    assert (request.id, request.priority, request.timeout_s) == ("call-7", 3, 2.5)
    assert request.outputs == [
        RequestedOutput(name="embedding", binary=False),
        RequestedOutput(name="score", binary=True),
    ]


def test_zero_means_the_default() -> None:
    request = parse(document(parameters={"priority": 0, "timeout": 0}))

    assert (request.priority, request.timeout_s) == (DEFAULT_PRIORITY, None)


QUERY = tensor("query", ["q", "r"])


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "body"),
        ("x", "body"),
        ({}, "inputs"),
        ({"inputs": {}}, "inputs"),
        ({"inputs": ["x"]}, "inputs[0]"),
        ({"inputs": [QUERY]}, "inputs.text"),
        ({"inputs": [QUERY, QUERY]}, "inputs[1].name"),
        ({"inputs": [QUERY, tensor("page", ["a"])]}, "inputs[1].name"),
        ({"inputs": [QUERY, tensor("text", ["a"])]}, "inputs"),
        ({"inputs": [QUERY, tensor("text", ["a"], [2, 1])]}, "inputs.text.data"),
        ({"inputs": [QUERY, tensor("text", ["a", "b"], [1, 2])]}, "inputs.text.shape"),
        ({"inputs": [QUERY, tensor("text", [], [0, 1])]}, "inputs.text.shape"),
        ({"inputs": [QUERY, tensor("text", ["a"], [True, 1])]}, "inputs.text.shape"),
        ({"inputs": [QUERY, tensor("text", ["a"], [-1])]}, "inputs.text.shape"),
        ({"inputs": [QUERY, tensor("text", ["a"], 2)]}, "inputs.text.shape"),
        ({"inputs": [QUERY, tensor("text", ["a", 1])]}, "inputs.text.data[1]"),
        ({"inputs": [QUERY, tensor("text", [["a", "b"]])]}, "inputs.text.data[0]"),
        ({"inputs": [QUERY, tensor("text", None, [2])]}, "inputs.text.data"),
        ({"inputs": [QUERY, tensor("text", ["a", "\ud800"])]}, "inputs.text.data[1]"),
        ({"inputs": [QUERY, tensor("text", ["a"], datatype="FP32")]}, "inputs.text.datatype"),
        ({"inputs": [QUERY, tensor("text", ["a"], parameters=[])]}, "inputs.text.parameters"),
        (document(id=5), "id"),
        (document(outputs="score"), "outputs"),
        (document(outputs=["score"]), "outputs[0]"),
        (document(outputs=[{"name": "logits"}]), "outputs[0].name"),
        (document(outputs=[{"name": "score"}, {"name": "score"}]), "outputs[1].name"),
        (document(parameters=[]), "parameters"),
        (document(parameters={"priority": -1}), "parameters.priority"),
        (document(parameters={"priority": True}), "parameters.priority"),
        (document(parameters={"priority": "1"}), "parameters.priority"),
        (document(parameters={"timeout": 1.5}), "parameters.timeout"),
        (document(parameters={"timeout": 10**30}), "parameters.timeout"),
    ],
)
def test_what_cannot_be_understood_names_the_field(value: Any, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(value)

    assert str(refused.value).startswith(f"{field}: ")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="body: not JSON"):
        parse_infer(body, signature=SIGNATURE)


def binary_request(texts: bytes, *, size: int | None = None) -> tuple[bytes, str]:
    raw = tensor("text", None, [2, 1], parameters={"binary_data_size": size or len(texts)})
    del raw["data"]
    head = json.dumps({"inputs": [raw, QUERY]}).encode()
    return head + texts, str(len(head))


def packed(*strings: str) -> bytes:
    encoded = [string.encode() for string in strings]
    return b"".join(len(one).to_bytes(4, "little") + one for one in encoded)


def test_raw_tensors_are_read() -> None:
    request = parse_infer(*binary_request(packed("härte", "")), signature=SIGNATURE)

    assert request.inputs["text"] == ["härte", ""]
    assert request.inputs["query"] == ["q", "r"]


@pytest.mark.parametrize(
    ("texts", "size", "field"),
    [
        (packed("a", "b")[:-1], None, "inputs.text.data[1]"),
        (packed("a") + b"\1\0\0", None, "inputs.text.data[1]"),
        (packed("a"), None, "inputs.text.data"),
        (packed("a", "b"), 100, "inputs.text.parameters.binary_data_size"),
        (packed("a", "b") + b"rest", len(packed("a", "b")), "body"),
        (b"\1\0\0\0\xff" + packed("b"), None, "inputs.text.data[0]"),
    ],
)
def test_raw_tensors_that_do_not_fit_are_refused(
    texts: bytes, size: int | None, field: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_infer(*binary_request(texts, size=size), signature=SIGNATURE)

    assert str(refused.value).startswith(f"{field}: ")


@pytest.mark.parametrize("length", ["99999", "-1", "x", "", "9" * 5_000])
def test_a_wrong_header_length_is_refused(length: str) -> None:
    with pytest.raises(BadRequest, match="Inference-Header-Content-Length"):
        parse_infer(b"{}", length, signature=SIGNATURE)


OUTPUTS = {
    "score": np.array([[0.5], [-0.25]], np.float32),
    "tokens": np.array([[3], [300]], np.int32),
    "embedding": np.array([[1, 0], [0, 1]], np.float32),
}


def render(**changes: Any) -> tuple[dict[str, Any], bytes]:
    body = render_infer(
        parse(document(**changes)),
        OUTPUTS,
        model_name="m",
        model_version="v",
        parameters={"max_tokens": 256, "compute_us": 7},
        signature=SIGNATURE,
    )
    length = body.json_length
    return json.loads(body.content[:length]), b"" if length is None else body.content[length:]


def test_an_answer_names_model_version_id_and_limit() -> None:
    answer, _ = render(id="call-7", outputs=[{"name": "score"}, {"name": "tokens"}])

    assert answer == {
        "model_name": "m",
        "model_version": "v",
        "id": "call-7",
        "parameters": {"max_tokens": 256, "compute_us": 7},
        "outputs": [
            {"name": "score", "datatype": "FP32", "shape": [2, 1], "data": [0.5, -0.25]},
            {"name": "tokens", "datatype": "INT32", "shape": [2, 1], "data": [3, 300]},
        ],
    }


def test_an_embedding_is_flat_with_its_shape() -> None:
    answer, _ = render(outputs=[{"name": "embedding"}])

    assert "id" not in answer
    assert answer["outputs"][0]["shape"] == [2, 2]
    assert answer["outputs"][0]["data"] == [1, 0, 0, 1]


def test_raw_outputs_follow_in_order() -> None:
    answer, raw = render(
        outputs=[{"name": "score"}, {"name": "tokens", "parameters": {"binary_data": False}}],
        parameters={"binary_data_output": True},
    )

    assert answer["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert "data" not in answer["outputs"][0]
    assert answer["outputs"][1]["data"] == [3, 300]
    assert np.frombuffer(raw, "<f4").tolist() == [0.5, -0.25]
