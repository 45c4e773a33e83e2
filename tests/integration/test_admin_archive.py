"""The archive in the admin: purges, and how stale it was found to be."""

import pytest
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import Settings

from fulfillment import purging
from fulfillment.models import ShadowScore
from fulfillment.purging import Criteria
from tests import builders
from tests.builders import NOW, RATER

pytestmark = pytest.mark.django_db


@pytest.fixture
def admin(settings: Settings) -> Client:
    builders.use_plugins(settings)
    client = Client()
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    return client


def test_purges_are_listed_and_nobody_changes_them(admin: Client) -> None:
    builders.version()
    purge = purging.begin(Criteria(url="https://a.example"), dry_run=False, actor="op", now=NOW)

    page = admin.get("/admin/fulfillment/purge/").content.decode()
    one = admin.get(f"/admin/fulfillment/purge/{purge.pk}/change/")

    assert purge.public_id in page
    assert one.status_code == 200
    assert admin.get("/admin/fulfillment/purge/add/").status_code == 403
    assert admin.post(f"/admin/fulfillment/purge/{purge.pk}/change/").status_code == 403


def test_a_rater_shows_how_its_archived_scores_have_moved(admin: Client) -> None:
    version = builders.version()
    address = f"/admin/fulfillment/rater/{RATER}/change/"
    assert "has compared none yet" in admin.get(address).content.decode()
    for age_s, new in ((8 * 86_400, 2.0), (100 * 86_400, 1.0)):
        ShadowScore.objects.create(
            rater_version=version, old_score=1.0, new_score=new, age_s=age_s, recorded_at=NOW
        )

    page = admin.get(address).content.decode()

    assert "7 days, 0:00:00 to 30 days, 0:00:00: 1 compared, mean difference +1.0000" in page
    assert "90 days, 0:00:00 or older: 1 compared, mean difference +0.0000" in page
