"""An LLM judge over a model that a test scripts: by the API, with the real directory and plug-in.

There is no broker. Tests that use it need committed transactions.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import orjson
from django.db import connection

from fulfillment import claim, dispatch, leases
from fulfillment.clock import database_now
from models_admin.directory import directory
from tests.builders import Api, records
from tests.fakes import ScriptedServer, Seen, Step
from tests.rating_queue import boot, check_all, end_pauses
from workers.rating_generator import RatingGenerator

TEMPLATE = 'Query: {query_text}\nPage: {text}\nAnswer {"score": 0 to 4} only.'


class Judge:
    """The API, a dispatcher and an executor, over a model that a test scripts."""

    def __init__(self) -> None:
        self.operator = Api("olga", "operator")
        self.user = Api("alice")
        self.memory = dispatch.Memory()
        self.generator = RatingGenerator(
            boot_id=boot(plugins={"llm_judge": "1"}),
            directory=directory,
            utc_now=lambda: datetime.now(UTC),
            ring_completion=lambda ended: None,
        )

    def register(self, server: ScriptedServer, **rater: Any) -> Any:
        """Register model and rater; return the answer of the second."""
        model = self.operator.post(
            "/models",
            {
                "id": "gpt",
                "kind": "external",
                "protocol": "openai",
                "url": server.url + "/v1",
                "model_name": "org/judge-7b",
                "api_key": "sk-qa-0123456789",
                "max_concurrency": 4,
                "sends_priority": True,
            },
        )
        assert model.status_code == 201, model.json()
        settings = {
            "id": "judge",
            "autorater": "llm_judge",
            "model": "gpt",
            "score_min": 0,
            "score_max": 4,
            "prompt_template": TEMPLATE,
        }
        return self.operator.post("/raters", {**settings, **rater})

    def submit(self, *rows: dict[str, Any], **fields: Any) -> str:
        """Submit a workflow; return its id."""
        body = {"name": "w", "rater": "judge", "requests": rows, **fields}
        made = self.user.post("/workflows", body)
        assert made.status_code == 202, made.json()
        identifier: str = made.json()["id"]
        return identifier

    def work(self, *, passes: int = 1) -> None:
        """Send what may be sent, and rate it."""
        for _ in range(passes):
            end_pauses()
            leases.wake(now=database_now())
            claim.look_again(database_now())
            sent = self.send()
            if sent:
                self.generator.rate(sent, task_id=uuid.uuid4())
        check_all()

    def send(self) -> list[tuple[int, int, str]]:
        """Claim what may be sent."""
        sent: list[tuple[int, int, str]] = []
        dispatch.run_once(
            database_now(),
            memory=self.memory,
            directory=directory,
            publish=lambda batches, priority: sent.extend(batches),
        )
        return sent

    def ratings(self, workflow: str) -> list[dict[str, Any]]:
        return records(self.user.get(f"/workflows/{workflow}/ratings"))


@contextmanager
def judging() -> Iterator[Judge]:
    """Set the stage; its executor is alive meanwhile."""
    made = Judge()
    try:
        yield made
    finally:
        made.generator.close()
        with connection.cursor() as cursor:  # sessions of its threads would keep the test database
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


def says(text: str, *, model: str = "judge-7b", finish_reason: str = "stop") -> Step:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return Step(body=orjson.dumps({"model": model, "choices": [choice]}))


def by_query(**texts: str) -> Step:
    """A step that answers by what the prompt asks about."""

    def body(seen: Seen) -> bytes:
        prompt = seen.json()["messages"][-1]["content"]
        text = next(answer for query, answer in texts.items() if query in prompt)
        answer = says(text).body
        assert isinstance(answer, bytes)
        return answer

    return Step(body=body)


def row(query: str, **fields: Any) -> dict[str, Any]:
    return {"query_text": query, "text": "a page", **fields}
