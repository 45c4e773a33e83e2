"""`/metrics` of the web server, read as Prometheus reads it."""

from datetime import timedelta

import pytest
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from fulfillment import tokens
from models_admin import services
from models_admin.clock import database_now
from models_admin.models import AcceleratorPool, ModelServer, UtilizationSample
from models_admin.policy.replicas import ServerState
from tests.builders import NOW

pytestmark = pytest.mark.django_db

Labels = tuple[str, ...]


def scraped() -> dict[str, dict[Labels, float]]:
    """Return the values of each metric by those of its labels, in the order of their names."""
    _, secret = tokens.issue(user="prometheus", role="viewer", expires_at=None, now=NOW)
    headers = {"Authorization": f"Bearer {secret}", "Accept": "text/plain;version=0.0.4"}
    response = Client(headers=headers).get("/metrics")
    assert response.status_code == 200
    assert response["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        family.name: {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(response.content.decode())
    }


def test_it_tells_of_replicas_and_of_the_duty_cycle_of_pools() -> None:
    for pool in ("box", "idle"):
        services.register_pool(AcceleratorPool(id=pool, devices=8), actor="qa")
    model, _ = services.register_model(
        "mini", now=NOW, kind="hosted", checkpoint="tiny:0", pool="box"
    )
    ModelServer.objects.create(
        model=model, agent="local", ordinal=0, state=ServerState.READY, address="http://x",
        ready_at=NOW, busy_seconds=12.5,
    )  # fmt: skip
    for agent, busy_s in (("local", 2.0), ("before", 1.0)):
        ModelServer.objects.create(model=model, agent=agent, ordinal=1, busy_seconds=busy_s)
    now = database_now()
    for ago, busy_s, devices in ((0, 30.0, 3), (0, 0.0, 1), (301, 0.0, 4)):
        UtilizationSample.objects.create(
            at=now - timedelta(seconds=ago), agent="local", model_id="mini", pool_id="box",
            replicas=1, busy_s=busy_s, replica_s=30.0, devices=devices,
        )  # fmt: skip

    found = scraped()

    assert found["airs_model_busy_seconds"] == {("mini", "box", "0"): 12.5, ("mini", "box", "1"): 3}
    assert found["airs_duty_cycle_ratio"] == {("box",): 0.75}
    replicas = found["airs_replicas"]
    assert {labels: n for labels, n in replicas.items() if n} == {
        ("mini", "box", "READY"): 1,
        ("mini", "box", "STOPPED"): 2,
    }
    assert len(replicas) == len(ServerState), "all states, so that a rate has a start"
    assert list(found["airs_build_info"].values()) == [1]


def test_it_takes_a_token() -> None:
    response = Client().get("/metrics")

    assert response.status_code == 401
    assert response.json()["status"] == 401
