"""`ask`: one call of a model for a person who tries it, by the client that executors use.

Named by the setting AIRS_MODEL_TRIAL; model management knows no client of its own.
"""

import asyncio
from datetime import datetime
from typing import Any, Final

from models_admin.asking import Answer, Question
from models_admin.directory import EndpointData
from workers.autoraters.protocol import ChatAnswer, ChatCall, OipAnswer, OipCall
from workers.autoraters.query_text_call import tokens_cut
from workers.model_client import CallResult, Endpoint, ModelClient

PRIORITY: Final = 67
"""Of the high class: somebody waits, but for nothing that was promised."""
_LONGEST_ANSWER_CHARACTERS: Final = 20_000
_LONGEST_CHAT_TOKENS: Final = 512
_CUT: Final = "length"


def ask(endpoint: EndpointData, question: Question, limit_s: float, now: datetime) -> Answer:
    """Call the model and return what came of it; blocks for `limit_s` at most."""
    result = asyncio.run(_ask(endpoint, question, limit_s, now))
    answer = result.answer
    if answer is None:
        return Answer(
            code=result.code or str(result.outcome),
            detail=result.detail,
            latency_s=result.seconds,
        )
    if isinstance(answer, ChatAnswer):
        return _chat(answer, result.seconds)
    return _scored(answer, rows=len(question.rows), seconds=result.seconds)


async def _ask(
    endpoint: EndpointData, question: Question, limit_s: float, now: datetime
) -> CallResult[Any]:
    client = ModelClient(clock=lambda: now, max_connections=1)
    target = Endpoint(
        url=endpoint.url,
        model_name=endpoint.model_name,
        headers=endpoint.headers,
        timeout_s=endpoint.timeout_s,
        sends_priority=endpoint.sends_priority,
        priority_style=endpoint.priority_style,
        scoring=endpoint.scoring,
    )
    try:
        if question.message:
            chat = ChatCall(
                messages=[{"role": "user", "content": question.message}],
                options={"max_tokens": _LONGEST_CHAT_TOKENS},
            )
            return await client.chat(
                target, chat, expected_version="", priority=PRIORITY, timeout_s=limit_s
            )
        call = OipCall(
            inputs={
                "query": [query for query, _ in question.rows],
                "text": [text for _, text in question.rows],
            },
            outputs=(),
            all_outputs=True,
        )
        return await client.infer(
            target,
            call,
            rows=call.rows,
            expected_version="",
            priority=PRIORITY,
            timeout_s=limit_s,
        )
    finally:
        await client.close()


def _scored(answer: OipAnswer, *, rows: int, seconds: float) -> Answer:
    cuts = [tokens_cut(answer, row) for row in range(rows)]
    return Answer(
        latency_s=seconds,
        version=answer.model_version,
        rows=[
            {
                **{name: column[row] for name, column in answer.outputs.items()},
                "truncated": dict(cuts[row]),
            }
            for row in range(rows)
        ],
        truncated=any(cuts),
    )


def _chat(answer: ChatAnswer, seconds: float) -> Answer:
    return Answer(
        latency_s=seconds,
        version=answer.model_version,
        content=(answer.content or answer.refusal)[:_LONGEST_ANSWER_CHARACTERS],
        finish_reason=answer.finish_reason,
        truncated=answer.finish_reason == _CUT,
    )
