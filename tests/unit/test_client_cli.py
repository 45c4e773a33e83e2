"""The `airs` command against a real HTTP server: what it prints where, and how it ends."""

import gzip
import hashlib
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from airs_client import cli
from airs_client.retries import Retries

from tests import fake_api
from tests.fake_api import TOKEN, FakeApi, problem, rating, workflow


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Airs = Callable[..., Ended]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with fake_api.serving() as api:
        yield api


@pytest.fixture
def environ(api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mapping[str, str]:
    monkeypatch.chdir(tmp_path)
    for name in ("AIRS_HOME", "AIRS_PROFILE", "XDG_CONFIG_HOME", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AIRS_URL", api.url)
    monkeypatch.setenv("AIRS_API_TOKEN", TOKEN)
    return os.environ


@pytest.fixture
def airs(environ: Mapping[str, str], capfdbinary: pytest.CaptureFixture[bytes]) -> Airs:
    def run(*arguments: str) -> Ended:
        capfdbinary.readouterr()
        code = cli.run(list(arguments))
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return Ended(code, out.decode(), err.decode())

    return run


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query_text": "a"}\n' * 3)
    return str(path)


def test_submit_prints_the_id_alone_and_talks_beside_it(airs: Airs, rows: str) -> None:
    ended = airs("submit", rows, "--rater", "needs_met", "--deadline", "1h30m")

    assert ended.code == 0
    assert ended.out == "wf_1\n"
    assert "3 rows accepted" in ended.err
    assert "airs watch wf_1" in ended.err


def test_submitting_the_same_file_twice_is_one_workflow_unless_told(airs: Airs, rows: str) -> None:
    first = airs("submit", rows, "--rater", "needs_met")
    second = airs("submit", rows, "--rater", "needs_met")
    third = airs("submit", rows, "--rater", "needs_met", "--again")

    assert first.out == second.out == "wf_1\n"
    assert "sent before" in second.err
    assert third.out == "wf_2\n"


def test_a_webhook_is_named_and_its_secret_told_beside_the_id(
    airs: Airs, api: FakeApi, rows: str
) -> None:
    ended = airs("submit", rows, "--rater", "needs_met", "--webhook", "https://x.example/hook")

    (call,) = api.calls("POST", "/workflows")
    assert call.params["webhook_url"] == "https://x.example/hook"
    assert ended.out == "wf_1\n"
    assert "https://x.example/hook is signed with whsec_c2VjcmV0" in ended.err


@pytest.mark.parametrize("source", ["file", "stdin", "stdin with its format"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("suffix", "body", "kind"),
    [
        ("jsonl", b'{"query_text": "a"}\n', "application/x-ndjson"),
        ("csv", b"query_text\na\n", "text/csv"),
        ("parquet", b"PAR1 and the rest PAR1", "application/vnd.apache.parquet"),
    ],
)
def test_every_format_is_sent_as_what_it_is(
    airs: Airs, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    suffix: str, body: bytes, kind: str, compressed: bool, source: str,
) -> None:  # fmt: skip
    body = gzip.compress(body) if compressed else body
    name = f"rows.{suffix}" + (".gz" if compressed else "")
    (tmp_path / name).write_bytes(body)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body)))
    options = ["--format", suffix] if source == "stdin with its format" else []

    ended = airs("submit", name if source == "file" else "-", "--rater", "needs_met", *options)

    assert ended.code == 0
    (call,) = api.calls("POST", "/workflows")
    assert call.headers["content-type"] == kind
    assert call.headers.get("content-encoding") == ("gzip" if compressed else None)
    assert call.digest == hashlib.sha256(body).hexdigest()


def test_standard_input_is_sent_like_a_file(
    airs: Airs, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"query_text": "a"}\n')))

    ended = airs("submit", "-", "--rater", "needs_met", "--priority", "90", "--deadline", "2h")

    assert ended.code == 0
    (call,) = api.calls("POST", "/workflows")
    assert call.size == 20
    assert call.params["name"] == "stdin"
    assert call.params["priority"] == "90"
    assert call.params["deadline_s"] == "7200"


CLIPPED = {
    "priority": 60,
    "priority_asked": 90,
    "priority_reason": "priority 90 asked, 60 given: rule 'automatic tuning' has a ceiling of 60",
}


def test_a_priority_that_a_rule_clipped_is_told(airs: Airs, api: FakeApi, rows: str) -> None:
    clipped = fake_api.reply({**workflow(state="RUNNING"), **CLIPPED, "accepted": 3}, status=202)
    api.faults = deque([clipped])
    submitted = airs("submit", rows, "--rater", "needs_met", "--priority", "90")
    api.faults = deque([clipped])
    changed = airs("change", "wf_1", "--priority", "90")
    api.faults = deque([clipped])
    renamed = airs("change", "wf_1", "--name", "n")
    api.looks = deque([{**workflow(state="RUNNING"), **CLIPPED}])
    shown = airs("status", "wf_1")

    reason = CLIPPED["priority_reason"]
    assert (submitted.code, submitted.out) == (0, "wf_1\n")
    assert f"3 rows accepted\n{reason}\n" in submitted.err
    assert changed == Ended(0, "wf_1 RUNNING\n", f"{reason}\n")
    assert renamed.err == ""
    assert f"60 ({reason})" in shown.out


def test_a_priority_that_was_given_is_not_talked_about(airs: Airs, api: FakeApi, rows: str) -> None:
    given = {
        "priority_asked": 50,
        "priority_reason": "priority 50 asked, 50 given: no rule applies",
    }
    api.faults = deque([fake_api.reply({**workflow(state="RUNNING"), **given})])

    assert "asked" not in airs("submit", rows, "--rater", "needs_met", "--priority", "50").err


def test_refused_rows_are_shown_and_end_with_code_3(airs: Airs, api: FakeApi, rows: str) -> None:
    api.rejected = [
        {"line": n, "code": "missing_field", "detail": "query_text"} for n in range(1, 13)
    ]

    ended = airs("submit", rows, "--rater", "needs_met")

    assert ended.code == 3
    assert ended.out == "wf_1\n"
    assert "12 rows refused" in ended.err
    assert "line 10: missing_field: query_text" in ended.err
    assert "line 11" not in ended.err
    assert "… and 2 more" in ended.err


@pytest.mark.parametrize(
    ("state", "failed", "code"),
    [("COMPLETED", 0, 0), ("PARTIAL", 1, 3), ("FAILED", 300, 1), ("CANCELLED", 0, 1)],
)
def test_submit_and_wait_ends_as_the_workflow_does(
    airs: Airs, api: FakeApi, rows: str, state: str, failed: int, code: int
) -> None:
    api.looks = deque([workflow(state=state, completed=300 - failed, failed=failed)])

    ended = airs("submit", rows, "--rater", "needs_met", "--wait")

    assert ended.code == code
    assert ended.out == "wf_1\n"
    assert f"{state} 300/300 (100%)" in ended.err


def test_submit_and_wait_gives_one_json_document(airs: Airs, api: FakeApi, rows: str) -> None:
    api.looks = deque([workflow(state="COMPLETED", completed=300)])

    ended = airs("-o", "json", "submit", rows, "--rater", "needs_met", "--wait")

    document = json.loads(ended.out)
    assert (document["state"], document["accepted"]) == ("COMPLETED", 3)


def test_watch_without_a_terminal_writes_plain_lines(airs: Airs, api: FakeApi) -> None:
    api.looks = deque(
        [
            workflow(state="RUNNING", completed=60, archive=30, eta_s=40),
            workflow(state="RUNNING", completed=90, archive=30),
            workflow(state="PARTIAL", completed=298, failed=2, archive=30),
        ]
    )

    ended = airs("watch", "wf_1")

    assert ended.err.splitlines() == [
        "RUNNING 60/300 (20%), hits 50%, ETA 40 s (20 s to 1 min 20 s)",
        "PARTIAL 300/300 (100%), 2 failed, hits 10%",
    ]
    assert "mean score   0.5000 over 298 scored of 300" in ended.out
    assert "\x1b" not in ended.out + ended.err
    assert ended.code == 3


def test_watch_outlives_a_server_that_restarts(
    airs: Airs, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_WATCHING", Retries(max_retries=30, base_s=0.001, cap_s=0.01))
    api.looks = deque([workflow(state="COMPLETED", completed=300)])
    api.faults = deque([fake_api.Answer(hang_up=True)] * 10)

    ended = airs("watch", "wf_1")

    assert ended.code == 0
    assert "trying again" in ended.err


WATCH_WITH_SIGINT = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("airs_client", run_name="__main__")
"""
"""A test run in the background may have SIGINT ignored, which a child inherits. (Not by preexec_fn:
it forks, which a process that has loaded JAX must not.)"""


def test_ctrl_c_stops_watching_and_nothing_else(environ: Mapping[str, str], api: FakeApi) -> None:
    api.looks = deque([workflow(state="RUNNING", completed=60)])
    watching = subprocess.Popen(
        [sys.executable, "-c", WATCH_WITH_SIGINT, "watch", "wf_1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with watching:
        assert watching.stderr is not None
        assert watching.stderr.readline().startswith("RUNNING 60/300")
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=10)

    assert watching.returncode == 130
    assert "airs watch wf_1" in err
    assert "the workflow goes on" in err
    assert "Traceback" not in err
    assert out == ""
    assert {call.method for call in api.received} == {"GET"}


def test_watch_on_a_terminal_shows_a_bar_and_no_colour_means_none(
    environ: Mapping[str, str], api: FakeApi
) -> None:
    api.looks = deque(
        [
            workflow(state="RUNNING", completed=150, archive=75, eta_s=9),
            workflow(state="COMPLETED", completed=300, archive=75),
        ]
    )

    plain = watch_on_terminal({**environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "120"})
    api.looks = deque([workflow(state="COMPLETED", completed=300)])
    coloured = watch_on_terminal({**environ, "TERM": "xterm", "COLUMNS": "120"})

    colours = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert "━" in plain
    assert "COMPLETED 300/300 (100%), hits 25%" in plain
    assert not colours.search(plain)
    assert colours.search(coloured)


def watch_on_terminal(environ: Mapping[str, str]) -> str:
    terminal, end_for_child = pty.openpty()
    with (
        os.fdopen(terminal, "rb", buffering=0) as screen,
        subprocess.Popen(
            [sys.executable, "-m", "airs_client", "watch", "wf_1"],
            stdout=subprocess.DEVNULL,
            stderr=end_for_child,
            env=environ,
        ) as watching,
    ):
        os.close(end_for_child)
        shown = b""
        try:
            while piece := screen.read(4096):
                shown += piece
        except OSError:
            # How Linux says that nobody holds the other end any more.
            pass
        assert watching.wait(timeout=10) == 0
    return shown.decode()


def test_status_shows_one_workflow_or_lists_them(airs: Airs, api: FakeApi) -> None:
    api.looks = deque([workflow(state="RUNNING", completed=60, archive=30, eta_s=40)])

    one, many = airs("status", "wf_1"), airs("status")

    assert "requests     300: 60 completed, 240 pending, 0 running" in one.out
    assert "hit rate 50%" in one.out
    assert many.out.splitlines()[0].startswith("ID    STATE")
    assert "wf_1  RUNNING  needs_met  60/300" in many.out
    assert one.code == many.code == 0


def test_status_shows_the_time_line_and_how_requests_waited(airs: Airs, api: FakeApi) -> None:
    looked_at = workflow(state="RUNNING", completed=60, eta_s=40)
    looked_at["timeline"] = {
        "accepted_at": "2026-01-02T03:04:05Z",
        "first_dispatch_at": "2026-01-02T03:04:06Z",
        "last_result_at": "2026-01-02T03:14:07Z",
    }
    api.looks = deque([looked_at])
    api.distributions = {
        "requests": 300,
        "looked_at": 50,
        "exact": False,
        "waited_s": {"n": 40, "mean": 9.0, "p50": 1.25, "p90": 75.0, "p99": 600.0, "max": 4000.0},
        "open_s": None,
        "attempts": {"n": 45, "mean": 1.5, "p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 8.0},
    }

    shown, as_json = airs("status", "wf_1"), airs("status", "wf_1", "-o", "json")

    assert "ETA             40 s (20 s to 1 min 20 s)" in shown.out
    assert "first dispatch  2026-01-02 03:04:06 UTC" in shown.out
    assert "last result     2026-01-02 03:14:07 UTC" in shown.out
    assert "first result" not in shown.out
    assert [" ".join(line.split()) for line in shown.out.splitlines()[-4:]] == [
        "REQUESTS P50 P90 P99 MAX",
        "waited for a rating 40 1.2 s 1 min 15 s 10 min 00 s 1 h 06 min",
        "attempts 45 1 2 3 8",
        "(of 50 requests spread over all 300)",
    ]
    assert json.loads(as_json.out)["distributions"] == api.distributions


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "wf_1", "-o", "json"),
        ("-o", "json", "status", "wf_1"),
        ("--output", "json", "watch", "wf_1"),
        ("status", "--output", "json"),
        ("cancel", "wf_1", "-o", "json"),
        ("raters", "list", "-o", "json"),
        ("-o", "json", "raters", "show", "needs_met"),
        ("models", "list", "-o", "json"),
        ("models", "show", "minilm", "-o", "json"),
        ("pools", "list", "-o", "json"),
        ("pools", "show", "box", "-o", "json"),
        ("pools", "decisions", "box", "-o", "json"),
        ("pools", "rebalance", "box", "on", "-o", "json"),
        ("pools", "register", "new", "--devices", "2", "-o", "json"),
        ("pools", "resize", "box", "8", "-o", "json"),
        ("models", "register", "new", "--checkpoint", "tiny:0", "-o", "json"),
        ("models", "start", "minilm", "-o", "json"),
        ("models", "stop", "minilm", "-o", "json"),
        ("models", "restart", "minilm", "-o", "json"),
        ("models", "resize", "minilm", "2", "-o", "json"),
        ("models", "versions", "minilm", "-o", "json"),
        ("models", "retire", "minilm", "v1", "-o", "json"),
        ("models", "try", "minilm", "--message", "hello", "-o", "json"),
        ("archive", "explain", "-r", "needs_met", '{"query": "q"}', "-o", "json"),
        ("archive", "purge", "-r", "needs_met", "-o", "json"),
        ("-o", "json", "archive", "purge-state", "prg_1"),
    ],
)
def test_json_is_given_everywhere(airs: Airs, api: FakeApi, arguments: tuple[str, ...]) -> None:
    api.looks = deque([workflow(state="COMPLETED", completed=300)])

    ended = airs(*arguments)

    assert ended.code == 0
    assert isinstance(json.loads(ended.out), dict)


def test_json_keeps_fields_that_this_client_does_not_know(airs: Airs, api: FakeApi) -> None:
    api.looks = deque([workflow(state="RUNNING")])

    assert json.loads(airs("status", "wf_1", "-o", "json").out)["a_field_of_the_future"] == 1


def test_the_archive_is_explained_and_purged(airs: Airs, api: FakeApi) -> None:
    assert "look         hit" in airs("archive", "explain", "-r", "needs_met", '{"query": "q"}').out
    started = airs("archive", "purge", "--url", "https://a.example", "--erase")

    assert "airs archive purge-state prg_1" in started.err
    assert [call.path.removeprefix("/api/v1") for call in api.received] == [
        "/archive/explain",
        "/archive/purge",
    ]
    assert airs("archive", "explain", "-r", "needs_met", "[1]").code == 2
    assert airs("archive", "explain", "-r", "needs_met", "{").code == 2


def test_raters_and_models_are_listed_and_shown(airs: Airs) -> None:
    assert "needs_met  needs_met  minilm  integrated" in airs("raters", "list").out
    assert "score_max  1.0" in airs("raters", "show", "needs_met").out
    assert "minilm  hosted  oip       READY" in airs("models", "list").out
    assert "protocol  oip" in airs("models", "show", "minilm").out


def test_a_model_is_registered_started_resized_and_removed(airs: Airs, api: FakeApi) -> None:
    hosted = (
        *("models", "register", "mini", "--checkpoint", "pkg:weights/model", "--pool", "box"),
        *("--replicas", "0:1:4", "--devices", "2", "--serving", '{"dtype": "bf16"}'),
    )

    registered = airs(*hosted)
    started, resized = airs("models", "start", "mini"), airs("models", "resize", "mini", "3")
    airs("models", "stop", "mini")
    removed = airs("models", "remove", "mini")

    assert (registered.code, registered.out) == (0, "mini STOPPED\n")
    (sent,) = api.calls("POST", "/models")
    assert json.loads(sent.beginning) == {
        "id": "mini",
        "kind": "hosted",
        "checkpoint": "pkg:weights/model",
        "pool": "box",
        "devices_per_replica": 2,
        "replicas": {"min": 0, "default": 1, "max": 4},
        "serving": {"dtype": "bf16"},
    }
    assert (started.out, resized.out) == ("mini STARTING\n", "mini READY\n")
    (size,) = api.calls("POST", "/models/mini/resize")
    assert json.loads(size.beginning) == {"replicas": 3}
    assert (removed.code, removed.out, "mini" in api.models) == (0, "", False)


def test_an_external_model_is_registered_with_a_key_that_nobody_sees(
    airs: Airs, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.warnings = ["Nobody answers."]
    external = (
        "models",
        "register",
        "gpt",
        "--server",
        "https://x.example",
        "--protocol",
        "openai",
        "--endpoint",
        "rerank",
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("sk-qa-0123456789abcdef\n"))

    ended = airs(*external, "--key", "-")

    (sent,) = api.calls("POST", "/models")
    document = json.loads(sent.beginning)
    assert document["api_key"] == "sk-qa-0123456789abcdef"
    assert (document["kind"], document["url"]) == ("external", "https://x.example")
    assert (document["protocol"], document["endpoint"]) == ("openai", "rerank")
    assert ended.err == "warning: Nobody answers.\n"
    assert airs(*external, "--key", "sk-qa-0123456789abcdef").code == 2
    assert airs(*external, "--key", "env:KEY").code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("models", "register", "x"),
        ("models", "register", "x", "--checkpoint", "tiny:0", "--server", "http://x"),
        ("models", "register", "x", "--checkpoint", "tiny:0", "--replicas", "1"),
        ("models", "register", "x", "--checkpoint", "tiny:0", "--serving", "[]"),
        ("models", "register", "x", "--checkpoint", "tiny:0", "--serving", "{"),
        ("models", "try", "minilm"),
        ("models", "try", "minilm", "--query", "q"),
        ("models", "try", "minilm", "--query", "q", "--message", "m", "text"),
        ("models", "resize", "minilm", "-1"),
        ("pools", "register", "x"),
    ],
)
def test_what_cannot_be_meant_is_wrong_usage(
    airs: Airs, api: FakeApi, arguments: tuple[str, ...]
) -> None:
    assert airs(*arguments).code == 2
    assert not api.received


def test_a_model_is_tried(airs: Airs, api: FakeApi) -> None:
    api.trial = {
        "model": "minilm", "address": "http://127.0.0.1:1", "latency_s": 0.25, "version": "v7",
        "rows": [
            {"score": 0.7384461164474487, "tokens": 9.0, "truncated": {}},
            {"score": 0.25, "tokens": 4.0},
        ],
        "content": "", "finish_reason": "", "truncated": True, "error": None,
    }  # fmt: skip

    tried = airs("models", "try", "minilm", "--query", "tea", "green tea", "rocks")
    (sent,) = api.calls("POST", "/models/minilm/try")
    api.trial |= {"rows": [], "error": {"code": "timeout", "detail": "no whole answer"}}
    failed = airs("models", "try", "minilm", "--message", "hello")

    assert json.loads(sent.beginning)["rows"][1] == {"query": "tea", "text": "rocks"}
    for text in ("v7", "0.25", "something was cut", "green tea  0.738446  9\n"):
        assert text in tried.out
    assert (tried.code, failed.code, failed.out) == (0, 1, "")
    assert failed.err == "error: timeout: no whole answer\n"


def test_the_versions_of_a_model_are_listed(airs: Airs, api: FakeApi) -> None:
    api.versions = [
        {"version": "v2", "state": "failed", "checkpoint": "b", "reason": "wrong shapes"},
        {"version": "v1", "state": "serving", "checkpoint": "a", "reason": ""},
    ]

    out = airs("models", "versions", "minilm").out
    retired = airs("models", "retire", "minilm", "v1/a b")

    assert (retired.code, retired.out) == (0, "minilm v1/a b retiring\n")
    assert "v2       failed   b           wrong shapes" in out


def test_a_pool_is_registered_resized_and_removed(airs: Airs, api: FakeApi) -> None:
    made = airs("pools", "register", "new", "--devices", "4", "--kind", "gpu")
    airs("pools", "resize", "new", "8")
    removed = airs("pools", "remove", "new")

    assert made.out == "new 0 of 4 devices used\n"
    (sent,) = api.calls("POST", "/pools")
    assert json.loads(sent.beginning) == {
        "id": "new", "devices": 4, "kind": "gpu", "agent": "local"
    }  # fmt: skip
    assert json.loads(api.calls("PATCH", "/pools/new")[0].beginning) == {"devices": 8}
    assert (removed.code, "new" in api.pools) == (0, False)


def test_pools_are_listed_with_their_decisions_and_rebalanced(airs: Airs, api: FakeApi) -> None:
    move = {"model": "north", "before": 2, "after": 3}
    decision = {"at": "2026-11-30T15:02:00Z", "outcome": "moves", "moves": [move], "reason": "so"}
    api.decisions = [
        decision | {"mode": "on", "applied": True},
        decision | {"mode": "dry_run", "applied": False},
        {"mode": "on", "outcome": "steady", "applied": False, "moves": [], "reason": "quiet"},
    ]

    assert "box  gpu   3 of 4        off          all are met" in airs("pools", "list").out
    assert "rebalancing   off" in airs("pools", "show", "box").out
    decided = airs("pools", "decisions", "box")
    assert [re.split(r" {2,}", line) for line in decided.out.splitlines()[1:]] == [
        ["2026-11-30 15:02:00 UTC", "on", "moves", "north 2 → 3", "so"],
        ["2026-11-30 15:02:00 UTC", "dry_run", "moves", "(north 2 → 3)", "so"],
        ["", "on", "steady", "quiet"],
    ]
    assert "airs pools decisions box --cursor 7" in decided.err
    assert not airs("pools", "decisions", "box", "--cursor", "7").err
    assert airs("pools", "rebalance", "box", "dry_run").out == "box dry_run\n"
    assert airs("pools", "rebalance", "box", "perhaps").code == 2


@pytest.mark.parametrize(
    ("act", "state"),
    [
        ("pause", "PAUSED"),
        ("resume", "RUNNING"),
        ("cancel", "CANCELLED"),
        ("complete", "PARTIAL"),
        ("retry", "RUNNING"),
    ],
)
def test_an_act_upon_a_workflow_says_where_it_stands(
    airs: Airs, api: FakeApi, act: str, state: str
) -> None:
    ended = airs(act, "wf_1")

    assert ended == Ended(0, f"wf_1 {state}\n", "")
    assert len(api.calls("POST", f"/workflows/wf_1/{act}")) == 1


def test_a_retry_whose_answer_is_lost_is_repeated_with_its_key(airs: Airs, api: FakeApi) -> None:
    api.faults = deque([fake_api.Answer(hang_up=True)])

    assert airs("retry", "wf_1").code == 0

    first, second = api.calls("POST", "/workflows/wf_1/retry")
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_change_sends_what_is_given(airs: Airs, api: FakeApi) -> None:
    ended = airs("change", "wf_1", "--priority", "90", "--deadline", "2h")

    assert ended == Ended(0, "wf_1 RUNNING\n", "")
    (call,) = api.calls("PATCH", "/workflows/wf_1")
    assert call.headers["content-type"] == "application/json"
    sent = b'{"priority":90,"deadline_s":7200}'
    assert (call.size, call.digest) == (len(sent), hashlib.sha256(sent).hexdigest())


class TestResults:
    @pytest.fixture(autouse=True)
    def finished_workflow(self, api: FakeApi) -> None:
        api.looks = deque([workflow(state="COMPLETED", total=5, completed=5)])
        api.ratings = [rating(n) for n in range(5)]

    def test_all_pages_go_to_standard_output(self, airs: Airs) -> None:
        ended = airs("results", "wf_1")

        records = [json.loads(line) for line in ended.out.removesuffix("\n").split("\n")]
        assert [record["request_id"] for record in records] == [f"row-{n}" for n in range(5)]
        assert ended.err == ""
        assert ended.code == 0

    def test_the_csv_of_all_pages_has_one_header(self, airs: Airs) -> None:
        ended = airs("results", "wf_1", "--format", "csv")

        assert ended.out.splitlines()[:2] == ["request_id,state,score", "row-0,COMPLETED,0.0"]
        assert len(ended.out.splitlines()) == 6

    def test_parquet_is_one_file_and_starts_again_where_it_can(
        self, airs: Airs, api: FakeApi, tmp_path: Path
    ) -> None:
        broken = fake_api.Answer(body=b"PAR1 half of it", withheld=20)
        api.faults = deque([fake_api.Answer(hang_up=True)])
        assert airs("results", "wf_1", "--format", "parquet").out == "PAR1 of 5 records PAR1"
        ok = api.answer
        streams = iter([broken])

        def break_off_once(call: fake_api.Received) -> fake_api.Answer:
            return next(streams, ok(call)) if call.params.get("format") == "parquet" else ok(call)

        api.answer = break_off_once  # type: ignore[method-assign]

        ended = airs("results", "wf_1", "--format", "parquet", "-o", "ratings.parquet")

        assert (ended.code, ended.out) == (0, "")
        assert "trying again" in ended.err
        assert (tmp_path / "ratings.parquet").read_bytes() == b"PAR1 of 5 records PAR1"

    def test_a_refusal_of_a_stream_is_told(self, airs: Airs, api: FakeApi, tmp_path: Path) -> None:
        ok = api.answer

        def refuse(call: fake_api.Received) -> fake_api.Answer:
            refused = problem(404, "not_found", "there is no such workflow")
            return refused if "format" in call.params else ok(call)

        api.answer = refuse  # type: ignore[method-assign]

        ended = airs("results", "wf_1", "--format", "parquet", "-o", "ratings.parquet")

        assert ended.code == 1
        assert "not_found: there is no such workflow (HTTP 404" in ended.err
        assert list(tmp_path.iterdir()) == []

    def test_o_names_a_file(self, airs: Airs, tmp_path: Path) -> None:
        ended = airs("results", "wf_1", "-o", "ratings.jsonl")

        assert ended == Ended(0, "", "")
        assert len((tmp_path / "ratings.jsonl").read_bytes().split(b"\n")) == 6

    @pytest.mark.parametrize(
        "arguments",
        [("results", "wf_1", "-o", "json"), ("-o", "json", "results", "wf_1")],
    )
    def test_o_json_means_json_here_too(
        self, airs: Airs, tmp_path: Path, arguments: tuple[str, ...]
    ) -> None:
        ended = airs(*arguments)

        assert ended.out.count("\n") == 5
        assert not (tmp_path / "json").exists()

    def test_a_file_is_not_touched_when_a_page_fails(
        self, airs: Airs, api: FakeApi, tmp_path: Path
    ) -> None:
        (tmp_path / "ratings.jsonl").write_text("old")
        ok = api.answer

        def fail_second_page(call: fake_api.Received) -> fake_api.Answer:
            return problem(500, "internal", "broken") if "cursor" in call.params else ok(call)

        api.answer = fail_second_page  # type: ignore[method-assign]

        ended = airs("results", "wf_1", "-o", "ratings.jsonl")

        assert ended.code == 1
        assert "internal: broken (HTTP 500" in ended.err
        assert (tmp_path / "ratings.jsonl").read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["ratings.jsonl"]

    def test_a_directory_that_is_not_there_is_wrong_usage(self, airs: Airs, api: FakeApi) -> None:
        ended = airs("results", "wf_1", "-o", "absent/ratings.jsonl")

        assert ended.code == 2
        assert api.received == []

    def test_a_workflow_that_runs_is_said_to(self, airs: Airs, api: FakeApi) -> None:
        api.looks = deque([workflow(state="RUNNING", total=9, completed=5)])

        ended = airs("results", "wf_1")

        assert ended.out.count("\n") == 5
        assert "wf_1 has not ended: RUNNING 5/9" in ended.err
        assert ended.code == 0

    def test_missing_records_are_noticed(self, airs: Airs, api: FakeApi) -> None:
        del api.ratings[3:]

        ended = airs("results", "wf_1")

        assert "3 records came for 5 requests" in ended.err
        assert ended.code == 1

    def test_a_reader_that_has_seen_enough_is_no_error(self, environ: Mapping[str, str]) -> None:
        ended = subprocess.run(
            f"{shlex.quote(sys.executable)} -m airs_client results wf_1 | head -n 1",
            shell=True,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )

        assert "Traceback" not in ended.stderr
        assert json.loads(ended.stdout)["request_id"] == "row-0"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("submit", "rows.jsonl"),
        ("submit", "absent.jsonl", "--rater", "needs_met"),
        ("submit", "rows.jsonl", "--rater", "needs_met", "--priority", "101"),
        ("submit", "rows.jsonl", "--rater", "needs_met", "--deadline", "soon"),
        ("status", ""),
        ("status", ".."),
        ("results", "wf_1", "--format", "xml"),
        ("results", "wf_1", "--format", "csv", "-o", "json"),
        ("--profile", "absent", "status"),
        ("--url", "nowhere", "status"),
        ("explode",),
    ],
)
def test_wrong_usage_ends_with_2_before_anything_is_sent(
    airs: Airs, api: FakeApi, rows: str, arguments: tuple[str, ...]
) -> None:
    ended = airs(*arguments)

    assert ended.code == 2
    assert ended.err or ended.out
    assert "Traceback" not in ended.err
    assert api.received == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "wf_404"),
        ("watch", "not-an-id"),
        ("results", "00000000-0000-0000-0000-000000000000"),
        ("cancel", "ids/with?odd#signs"),
        ("raters", "show", "absent"),
        ("models", "show", "absent"),
        ("pools", "show", "absent"),
        ("pools", "rebalance", "absent", "on"),
        ("pools", "remove", "absent"),
        ("models", "start", "absent"),
        ("models", "resize", "absent", "2"),
        ("models", "versions", "absent"),
        ("models", "retire", "absent", "v1"),
        ("models", "try", "absent", "--query", "q", "text"),
        ("models", "remove", "absent"),
        ("submit", "rows.jsonl", "--rater", "absent"),
    ],
)
def test_what_the_server_refuses_is_shown_as_it_says_with_a_remedy(
    airs: Airs, rows: str, arguments: tuple[str, ...]
) -> None:
    ended = airs(*arguments)

    assert ended.code == 1
    assert re.search(r"^error: \w+: .+ \(HTTP 4\d\d, request req-\d+\)$", ended.err, re.M)
    assert len(ended.err.splitlines()) >= 2
    assert ended.out == ""


def test_a_refused_file_shows_its_first_faults(airs: Airs, api: FakeApi, rows: str) -> None:
    errors = [{"line": n, "code": "bad", "detail": "\x1b[31mred"} for n in range(1, 21)]
    api.faults.append(problem(422, "duplicate_request_id", "ids repeat", errors=errors))

    ended = airs("submit", rows, "--rater", "needs_met")

    assert ended.code == 1
    assert "error: duplicate_request_id: ids repeat (HTTP 422" in ended.err
    assert ended.err.count("  line ") == 10
    assert "… and 10 more" in ended.err
    assert "request_id of its own" in ended.err
    assert "\x1b" not in ended.err


def test_a_server_that_is_not_there_is_named_with_what_to_do(
    airs: Airs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "BRIEF", Retries(max_retries=1, base_s=0.001))
    monkeypatch.setenv("AIRS_URL", "http://127.0.0.1:9")

    ended = airs("status")

    assert ended.code == 1
    assert "cannot reach AIRS at http://127.0.0.1:9" in ended.err
    assert "make up" in ended.err


def test_a_missing_token_is_explained(airs: Airs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRS_API_TOKEN")

    ended = airs("status")

    assert ended.code == 1
    assert "AIRS_API_TOKEN" in ended.err


def test_what_make_up_left_is_enough_to_begin(
    airs: Airs, api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AIRS_URL")
    monkeypatch.delenv("AIRS_API_TOKEN")
    (tmp_path / ".airs").mkdir()
    (tmp_path / ".airs" / "credentials.json").write_text(
        json.dumps({"api_token": TOKEN, "url": api.url, "admin_user": "admin"})
    )

    assert airs("raters", "list").code == 0


def test_the_version_is_shown(airs: Airs) -> None:
    ended = airs("--version")

    assert re.fullmatch(r"airs \d+\.\d+\.\d+\n", ended.out)
    assert ended.code == 0


def test_an_unforeseen_error_is_one_line(
    airs: Airs, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(cli, "_show_workflow", explode)
    api.looks = deque([workflow(state="RUNNING")])

    ended = airs("status", "wf_1")

    assert ended.code == 1
    assert ended.err == "error: unexpected RuntimeError: a fault of ours\n"


ESTIMATE = {
    "rater": "needs_met",
    "accepted": 3,
    "rejected": [],
    "sample_of": 3_000,
    "rows": 3_000,
    "hits": 1_000,
    "coalesced": 200,
    "items": 1_800,
    "batches": 150,
    "model_calls": 150,
    "accelerator_seconds": 1_234.56,
    "deadline_s": 600,
    "priority": 50,
    "eta": {"seconds": 900, "low": 800, "high": 1_100, "in_time": False},
    "feasible": False,
    "share_in_time": 0.9999,
    "reason": "50.0 of 150.0 batches do not fit",
    "displaces": 2,
    "remedies": [
        {"change": "deadline_s", "to": 1_200, "detail": "a later deadline"},
        {"change": "replicas", "to": 3, "detail": "so many replicas, all in all"},
        {"change": "best_effort", "to": False, "detail": "the class of its priority"},
    ],
}


def test_an_estimate_says_what_a_file_costs_and_what_would_help(
    airs: Airs, api: FakeApi, rows: str
) -> None:
    api.estimate = ESTIMATE

    ended = airs(
        *("estimate", rows, "--rater", "needs_met", "--deadline", "10m", "--sample-of", "3000")
    )

    (call,) = api.calls("POST", "/estimates")
    assert call.params == {"rater": "needs_met", "deadline_s": "600", "sample_of": "3000"}
    assert "idempotency-key" not in call.headers
    assert ended.code == 0
    assert ended.out == (
        "rater          needs_met\n"
        "rows           3,000 (scaled from 3)\n"
        "archive hits   1,000 (33%)\n"
        "equal rows     200\n"
        "to be rated    1,800 in 150 batches\n"
        "model calls    150\n"
        "accelerator    1,234.6 s\n"
        "priority       50\n"
        "ETA            15 min 00 s (13 min 20 s to 18 min 20 s), not all in time\n"
        "in time        no, not within 10 min 00 s\n"
        "share in time  99.9 %\n"
        "why            50.0 of 150.0 batches do not fit\n"
        "takes from     2 other workflows\n"
        "\n"
        "ENOUGH ALONE\n"
        "deadline_s    1,200 (20 min 00 s)  a later deadline\n"
        "replicas      3                    so many replicas, all in all\n"
        "best_effort   false                the class of its priority\n"
    )


def test_an_estimate_without_a_measure_says_so(airs: Airs, api: FakeApi, rows: str) -> None:
    unknown = {"eta": None, "feasible": None, "share_in_time": None, "accelerator_seconds": None}
    api.estimate = {**ESTIMATE, **unknown, "remedies": [], "sample_of": None, "displaces": 0}

    ended = airs("estimate", rows, "--rater", "needs_met")

    assert "in time       nobody knows" in ended.out
    assert "accelerator   not known" in ended.out
    assert "ENOUGH ALONE" not in ended.out


def test_an_estimate_as_json_is_the_servers(airs: Airs, api: FakeApi, rows: str) -> None:
    api.estimate = {**ESTIMATE, "of_tomorrow": 1}

    ended = airs("estimate", rows, "--rater", "needs_met", "-o", "json")

    assert json.loads(ended.out) == api.estimate


def test_an_estimate_with_refused_rows_ends_as_a_submission_with_them(
    airs: Airs, api: FakeApi, rows: str
) -> None:
    refused = {"line": 2, "code": "invalid_json", "detail": "no JSON"}
    api.estimate = {**ESTIMATE, "rejected": [refused]}

    ended = airs("estimate", rows, "--rater", "needs_met")

    assert ended.code == 3
    assert "1 rows refused:\n  line 2: invalid_json: no JSON" in ended.err


def test_status_shows_how_much_is_expected_in_time(airs: Airs, api: FakeApi) -> None:
    said = {"share_in_time": 0.5, "cut": 9.0, "reason": "9.0 of 18.0 batches do not fit"}
    api.looks.append({**workflow(state="RUNNING"), "forecast": said})

    ended = airs("status", "wf_1")

    assert "in time      50 % expected: 9.0 of 18.0 batches do not fit" in ended.out


def test_status_shows_why_an_owner_waits_behind_others(airs: Airs, api: FakeApi) -> None:
    api.looks.append({**workflow(state="RUNNING"), "standing": "over its share: took 50%"})

    ended = airs("status", "wf_1")

    assert "standing     over its share: took 50%" in ended.out
