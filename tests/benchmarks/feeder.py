"""A client that keeps a stack busy: uploads by two connections, some workflows open at a time.

It prints a line of JSON for each upload that was answered, and ends at SIGTERM. Bodies are made
beforehand: what makes their rows new in each upload is a mark that is replaced, so that this
client costs next to nothing and takes none of the machine that it measures.
"""

import argparse
import itertools
import json
import threading
import time
from collections.abc import Sequence

import httpx
import psycopg2

from tests.benchmarks import texts

MARK = b"@@@@@@@@"
FRESH = httpx.Limits(max_keepalive_connections=0)
"""A connection that rests between uploads may be closed just as the next one begins."""
OPEN = "SELECT count(*) FROM fulfillment_workflow WHERE finished_at IS NULL AND state <> 0"


def body(rows: int, *, hits: float) -> bytes:
    """Return NDJSON of which a share of the rows are the same in every upload, spread evenly."""
    lines = texts.bodies(rows, seed=0, prefix="feed").splitlines()
    every = round(1 / hits, 3) if hits else 0.0
    known = {int(i * every) for i in range(int(rows * hits))} if hits else set()
    return (
        b"\n".join(
            line if i in known else line.replace(b'"text":"', b'"text":"' + MARK + b" ", 1)
            for i, line in enumerate(lines)
        )
        + b"\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.feeder")
    parser.add_argument("--url", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--rater", required=True)
    parser.add_argument("--rows", type=int, default=4_000)
    parser.add_argument("--hits", type=float, default=0.4)
    parser.add_argument("--open", type=int, default=8, help="workflows open at a time")
    parser.add_argument("--uploads", type=int, default=0, help="0: until told to stop")
    chosen = parser.parse_args(arguments)
    template = body(chosen.rows, hits=chosen.hits)
    numbers = itertools.count(int(time.time() * 10) % 10_000_000)
    turn = threading.Lock()
    left = itertools.repeat(None, chosen.uploads) if chosen.uploads else itertools.repeat(None)

    def feed() -> None:
        database = psycopg2.connect(chosen.database)
        database.autocommit = True
        headers = {
            "Authorization": f"Bearer {chosen.token}", "Content-Type": "application/x-ndjson",
        }  # fmt: skip
        with (
            database.cursor() as cursor,
            httpx.Client(timeout=120, headers=headers, limits=FRESH) as client,
        ):
            while True:
                with turn:
                    if next(left, 0) == 0:
                        return
                    while _open(cursor) >= chosen.open:
                        time.sleep(0.02)
                    number = next(numbers)
                answer = client.post(
                    f"{chosen.url}/api/v1/workflows",
                    params={"rater": chosen.rater},
                    content=template.replace(MARK, b"%08d" % number),
                )
                answer.raise_for_status()
                told = answer.json()
                with turn:
                    print(json.dumps({k: told[k] for k in ("id", "hits", "pending")}), flush=True)

    threads = [threading.Thread(target=feed, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _open(cursor: "psycopg2.extensions.cursor") -> int:
    cursor.execute(OPEN)
    found = cursor.fetchone()
    assert found is not None
    return int(found[0])


if __name__ == "__main__":
    main()
