"""What fulfillment and executors are told of models."""

from datetime import UTC, datetime, timedelta
from itertools import count

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import given, settings
from hypothesis import strategies as st

from fulfillment.model_directory import ModelDirectory, model_directory
from models_admin import services
from models_admin.directory import HEARTBEAT_LIMIT, START_LIMIT, directory
from models_admin.errors import Conflict
from models_admin.models import ModelConfig, ModelServer, ModelVersion
from models_admin.policy.replicas import ServerState

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def no_answer(model: ModelConfig) -> services.Seen:
    return services.Seen()


def external(model_id: str = "ext", **fields: object) -> ModelConfig:
    settings = {"kind": "external", "url": "http://127.0.0.1:9/x/", "model_name": "m"} | fields
    model, _ = services.register_model(
        model_id,
        now=NOW,
        look=no_answer,
        **settings,  # type: ignore[arg-type]
    )
    return model


def hosted(model_id: str = "mini") -> ModelConfig:
    model, _ = services.register_model(
        model_id, now=NOW, kind="hosted", checkpoint="tiny:0", replicas_max=4, window=7
    )
    return model


def server(model: ModelConfig, ordinal: int = 0, **fields: object) -> ModelServer:
    settings = {
        "state": ServerState.READY,
        "address": f"http://127.0.0.1:900{ordinal}",
        "version": "v1",
        "starts": 3,
        "ready_at": NOW,
        "heartbeat_at": NOW,
    } | fields
    return ModelServer.objects.create(model=model, agent="local", ordinal=ordinal, **settings)


def test_it_is_the_directory_that_fulfillment_is_configured_with() -> None:
    configured: ModelDirectory = directory

    assert model_directory() is configured


def test_an_unknown_model_has_no_description() -> None:
    assert directory.describe("nothing") is None


def test_a_hosted_model_is_described_by_its_checkpoint_before_it_ever_ran() -> None:
    hosted()

    described = directory.describe("mini")

    assert described is not None
    assert (described.kind, described.protocol, described.timeout_s) == ("hosted", "oip", 60)
    assert described.version.startswith("tiny-0")


def test_only_ready_replicas_with_a_fresh_heartbeat_are_sent_to() -> None:
    model = hosted()
    fresh = server(model, 0, heartbeat_at=NOW - HEARTBEAT_LIMIT)
    server(model, 1, heartbeat_at=NOW - HEARTBEAT_LIMIT - timedelta(milliseconds=1))
    server(model, 2, state=ServerState.DRAINING)
    server(model, 3, state=ServerState.WARMING, ready_at=None)

    (replica,) = directory.replicas(NOW)

    assert replica.key == f"ms-{fresh.pk}-3"
    assert (replica.model_id, replica.version) == ("mini", "v1")
    assert (replica.window, replica.managed) == (7, True)
    assert replica.address == fresh.address


def test_an_external_model_is_always_there() -> None:
    external(max_concurrency=5, version_label="spring")

    (replica,) = directory.replicas(NOW)

    assert (replica.key, replica.version, replica.window) == ("ext-ext", "spring", 5)
    assert (replica.managed, replica.address) == (False, "http://127.0.0.1:9/x")


def test_looking_costs_two_statements_whatever_there_is() -> None:
    for number in range(3):
        server(hosted(f"m{number}"))
        external(f"e{number}")

    with CaptureQueriesContext(connection) as queries:
        assert len(directory.replicas(NOW)) == 6

    assert len(queries) == 2


def test_an_endpoint_of_a_replica_lasts_until_that_run_of_it_ends() -> None:
    row = server(hosted())
    key = row.key

    endpoint = directory.endpoint(key)
    ModelServer.objects.update(state=ServerState.DRAINING)
    draining = directory.endpoint(key)
    ModelServer.objects.update(state=ServerState.READY, starts=4)
    after = directory.endpoint(key)

    assert endpoint is not None
    assert (endpoint.url, endpoint.model_name) == (row.address, "mini")
    assert (endpoint.version, endpoint.sends_priority, endpoint.headers) == ("v1", True, {})
    assert draining == endpoint
    assert after is None


@pytest.mark.parametrize("key", ["", "ms-", "ms-1", "ms-x-1", "ms-1-1-1", "ext-none", "other-1"])
def test_a_key_that_names_nothing_has_no_endpoint(key: str) -> None:
    assert directory.endpoint(key) is None


def test_an_external_endpoint_carries_its_secrets_and_hides_them_in_its_repr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEAM_KEY", "from-the-environment")
    external(api_key="sk-qa-0123456789", headers={"X-Team": "env:TEAM_KEY", "X-No": "env:NOT_SET"})

    endpoint = directory.endpoint("ext-ext")

    assert endpoint is not None
    assert endpoint.headers == {
        "Authorization": "Bearer sk-qa-0123456789",
        "X-Team": "from-the-environment",
    }
    assert "sk-qa" not in repr(endpoint)


def test_the_first_reported_version_counts_and_a_later_one_is_a_change() -> None:
    external(version_label="spring")

    first = directory.report_version("ext", "7", NOW)
    again = directory.report_version("ext", "7", NOW)
    other = directory.report_version("ext", "8", NOW + timedelta(hours=1))

    assert (first.version, first.changed) == ("7", False)
    assert again == first
    assert (other.version, other.changed) == ("7", True)
    described = directory.describe("ext")
    assert described is not None
    assert described.version == "spring", "it stands for the first version"
    assert first.key_version == other.key_version == "spring"
    assert set(ModelVersion.objects.values_list("version", flat=True)) == {"7", "8"}


def test_an_operator_accepts_a_changed_version() -> None:
    external()
    directory.report_version("ext", "7", NOW)
    directory.report_version("ext", "8", NOW + timedelta(hours=1))

    services.accept_version("ext", now=NOW)

    assert not directory.report_version("ext", "8", NOW).changed
    assert directory.report_version("ext", "7", NOW).changed


def test_the_admin_action_accepts_what_the_server_reports_now() -> None:
    external()
    for version in ("a", "b", "a", "b"):
        if directory.report_version("ext", version, NOW).changed:
            services.accept_version("ext", now=NOW)
        assert ModelConfig.objects.get().version == version

    with pytest.raises(Conflict):
        services.accept_version("ext", now=NOW)


_numbers = count()
names = st.sampled_from(["", "x", "y"])
served = st.sampled_from(["a", "b", "x"])
steps = st.one_of(
    st.tuples(st.just("report"), served),
    st.tuples(st.just("accept"), served),
    st.tuples(st.just("label"), names),
    st.tuples(st.just("move"), st.sampled_from(["/1", "/2"])),
    st.tuples(st.just("again"), names),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(steps, max_size=10))
def test_a_key_is_one_version_under_one_label_for_good(story: list[tuple[str, str]]) -> None:
    model_id = f"ext-{next(_numbers)}"
    external(model_id)
    meanings: dict[str, tuple[str, str]] = {}
    keys: dict[tuple[str, str], str] = {}
    for step, value in story:
        before = ModelConfig.objects.get(pk=model_id)
        match step:
            case "report":
                directory.report_version(model_id, value, NOW)
            case "accept":
                services.update_model(model_id, now=NOW, version=value)
            case "label":
                services.update_model(model_id, now=NOW, look=no_answer, version_label=value)
            case "move":
                services.update_model(
                    model_id, now=NOW, look=no_answer, url="http://127.0.0.1:9" + value
                )
            case "again":
                services.remove_model(model_id)
                external(model_id, version_label=value)
        model = ModelConfig.objects.get(pk=model_id)
        if not before.version and (step == "report" or step == "accept"):
            assert model.key_version == before.key_version, "learning it changes no key"
        if model.version:
            meaning = (model.version_label, model.version)
            assert meanings.setdefault(model.key_version, meaning) == meaning
            assert keys.setdefault(meaning, model.key_version) == model.key_version


def test_a_hosted_model_reports_through_its_agent_only() -> None:
    hosted()

    assert not directory.report_version("mini", "other", NOW).changed
    assert not directory.report_version("nothing", "other", NOW).changed


def test_a_changed_checkpoint_is_another_version() -> None:
    model = hosted()
    before = model.version

    services.update_model("mini", now=NOW, checkpoint="tiny:1")

    described = directory.describe("mini")
    assert described is not None
    assert described.version != before
    assert ModelVersion.objects.filter(model=model).count() == 2


def test_what_starts_is_reckoned_with_for_a_while() -> None:
    model = hosted()
    stale = NOW - HEARTBEAT_LIMIT - timedelta(seconds=1)
    server(model, 0, heartbeat_at=NOW)
    server(model, 1, heartbeat_at=stale)
    server(model, 2, state=ServerState.DRAINING)
    server(model, 3, state=ServerState.WARMING, ready_at=None, version="", started_at=NOW)
    server(model, 4, state=ServerState.STARTING, ready_at=None, started_at=NOW - START_LIMIT)
    long_ago = NOW - START_LIMIT - timedelta(seconds=1)
    server(model, 5, state=ServerState.STARTING, ready_at=None, started_at=long_ago)
    server(hosted("other"), heartbeat_at=NOW)

    assert directory.reachable("mini", "v1", NOW) == 3
    assert directory.reachable("mini", "v2", NOW) == 1
    assert sorted(directory.coming(NOW)) == [("mini", ""), ("mini", "v1")]
