"""What an OpenAI-compatible chat server is sent, and what its answer holds.

The text of an answer is not judged here: a refusal or a cut answer is a good answer of the
protocol, and the plug-in says what it is worth.
"""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from fulfillment.policy.priority import sglang_priority, vllm_priority
from workers.autoraters.protocol import ChatAnswer, ChatCall
from workers.model_client.answers import (
    error_in_200,
    error_text,
    kept_version,
    other_version,
    parse,
    unusable,
)
from workers.model_client.outcomes import Verdict

VLLM = "vllm"
_PRIORITIES: Mapping[str, Callable[[int], int]] = {VLLM: vllm_priority, "sglang": sglang_priority}


def chat_body(call: ChatCall, *, model_name: str, priority: int | None) -> bytes:
    """Return the request; `priority` is the server's own number, None where it knows none."""
    document: dict[str, Any] = {**call.options, "model": model_name, "messages": call.messages}
    if priority is not None:
        document["priority"] = priority
    return orjson.dumps(document)


def chat_priority(score: int, style: str) -> int | None:
    """Return what a server of this style is told of an API score, None where it knows none."""
    told = _PRIORITIES.get(style)
    return None if told is None else told(score)


def read_chat(body: bytes, *, call: ChatCall, expected_version: str) -> ChatAnswer | Verdict:
    """Return the only choice of a 200, or why there is none."""
    document = parse(body)
    if not isinstance(document, dict):
        return unusable("bad_answer", "no JSON object: " + error_text(body))
    if document.get("error") and not document.get("choices"):
        return error_in_200(error_text(body), rows=1)
    version = reported_version(document)
    if expected_version and version != expected_version:
        return other_version(version, expected_version)
    choices = document.get("choices")
    if not isinstance(choices, list) or not choices:
        return unusable("incomplete_response", "no list of choices")
    if len(choices) > 1:
        return unusable("count_mismatch", f"{len(choices)} choices, one was asked for")
    choice = choices[0]
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return unusable("incomplete_response", "a choice without a message")
    content = _text(message.get("content"))
    if content is None:
        return unusable("bad_type", "the content is no text")
    return ChatAnswer(
        content=content,
        finish_reason=_string(choice.get("finish_reason")),
        refusal=_string(message.get("refusal")),
        model_version=version,
        notes=call.notes,
    )


def reported_version(document: Mapping[str, Any]) -> str:
    """Return what the server says it is: its model, and the fingerprint of its set-up if any."""
    parts = (_string(document.get("model")), _string(document.get("system_fingerprint")))
    return kept_version("/".join(part for part in parts if part))


def _text(content: Any) -> str | None:
    """Return a message's text: absent, a string, or a list of parts that hold text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    whole = [text for text in texts if isinstance(text, str)]
    return "".join(whole) if len(whole) == len(content) else None


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
