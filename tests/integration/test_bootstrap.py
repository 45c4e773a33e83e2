import json
import stat
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from pytest_django import Settings

from airs_site.management.commands import bootstrap
from fulfillment import tokens
from fulfillment.clock import database_now
from fulfillment.models import ApiToken, Rater
from models_admin import services
from models_admin.models import AcceleratorPool, ModelConfig

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _home(settings: Settings, tmp_path: Path) -> None:
    settings.AIRS_HOME = tmp_path / "home"
    settings.AIRS_ADMIN_PASSWORD = ""
    settings.AIRS_API_TOKEN = ""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "WEIGHTS_PACKAGE", "not_installed_at_all")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def run(out: StringIO | None = None) -> tuple[bootstrap.Credentials, str]:
    out = out or StringIO()
    call_command("bootstrap", stdout=out)
    credentials = bootstrap.read_credentials(bootstrap.credentials_path())
    assert credentials is not None
    return credentials, out.getvalue()


@pytest.mark.usefixtures("_no_weights")
class TestCredentials:
    def test_a_fresh_home_gets_a_user_a_token_and_a_private_file(self) -> None:
        credentials, _ = run()

        path = bootstrap.credentials_path()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text()) == asdict(credentials)
        assert credentials.url == "http://127.0.0.1:8000"
        assert credentials.flower_url == "http://127.0.0.1:5555"
        admin = User.objects.get(username=credentials.admin_user)
        assert admin.is_superuser
        assert admin.check_password(credentials.admin_password)
        token = tokens.find(credentials.api_token)
        assert token is not None
        assert (token.user, token.role, token.expires_at) == ("admin", "admin", None)
        assert [p.name for p in path.parent.iterdir()] == ["credentials.json"]

    def test_running_again_changes_nothing(self) -> None:
        first, _ = run()
        before = bootstrap.credentials_path().stat().st_mtime_ns

        second, said = run()

        assert second == first
        assert bootstrap.credentials_path().stat().st_mtime_ns == before
        assert "written" not in said
        assert (User.objects.count(), ApiToken.objects.count()) == (1, 1)

    def test_secrets_are_printed_once_and_to_a_terminal_only(self) -> None:
        credentials, said = run(Terminal())
        _, said_again = run(Terminal())
        bootstrap.credentials_path().unlink()
        renewed, to_a_log = run()

        for secret in (credentials.admin_password, credentials.api_token):
            assert secret in said
            assert secret not in said_again
        for secret in (renewed.admin_password, renewed.api_token):
            assert secret not in to_a_log

    def test_the_environment_overrides_and_the_old_token_ends(self, settings: Settings) -> None:
        first, _ = run()
        settings.AIRS_ADMIN_PASSWORD = "chosen, by: hand"
        settings.AIRS_API_TOKEN = "a-token-of-their-own"

        second, _ = run()

        assert (second.admin_password, second.api_token) == (
            "chosen, by: hand",
            "a-token-of-their-own",
        )
        assert User.objects.get().check_password("chosen, by: hand")
        assert tokens.find("a-token-of-their-own") is not None
        assert tokens.find(first.api_token) is None

    def test_other_ports_are_written_with_the_same_secrets(self, settings: Settings) -> None:
        first, _ = run()
        settings.AIRS_PORT = 8123

        second, _ = run()

        assert second.url == "http://127.0.0.1:8123"
        assert (second.api_token, second.admin_password) == (first.api_token, first.admin_password)

    def test_an_empty_database_is_filled_from_the_file(self) -> None:
        first, _ = run()
        User.objects.all().delete()
        ApiToken.objects.all().delete()

        second, _ = run()

        assert second == first
        assert User.objects.get().check_password(first.admin_password)
        assert tokens.find(first.api_token) is not None

    def test_a_password_changed_by_hand_is_left_alone(self) -> None:
        run()
        user = User.objects.get()
        user.set_password("mine")
        user.save()

        _, said = run()

        assert User.objects.get().check_password("mine")
        assert "left alone" in said

    def test_a_deleted_file_resets_the_password(self) -> None:
        first, _ = run()
        bootstrap.credentials_path().unlink()

        second, _ = run()

        assert second.admin_password != first.admin_password
        assert User.objects.get().check_password(second.admin_password)

    def test_a_file_that_others_can_read_is_made_private_again(self) -> None:
        run()
        bootstrap.credentials_path().chmod(0o644)

        run()

        assert stat.S_IMODE(bootstrap.credentials_path().stat().st_mode) == 0o600

    def test_without_the_weights_no_model_is_made(self) -> None:
        _, said = run()

        assert "not installed" in said
        assert not ModelConfig.objects.exists()
        assert not Rater.objects.exists()


def test_the_first_model_and_rater_are_made_once_and_stay_as_they_are() -> None:
    pytest.importorskip(bootstrap.WEIGHTS_PACKAGE)

    run()
    model = ModelConfig.objects.get()
    Rater.objects.update(batch_size=6)
    _, said = run()

    assert (model.pk, model.kind, model.loader, model.started) == (
        "minilm",
        "hosted",
        "bert_encoder",
        True,
    )
    assert model.version
    assert AcceleratorPool.objects.get().pk == "local-cpu"
    rater = Rater.objects.get()
    assert (rater.pk, rater.autorater, rater.model_id) == ("needs_met", "needs_met", "minilm")
    assert (rater.mode, rater.score_min, rater.score_max) == ("integrated", 0.0, 4.0)
    assert rater.batch_size == 6
    assert rater.current_version is not None
    assert rater.current_version.spec["model_version"] == model.version
    assert "registered" not in said


def test_one_that_is_killed_before_it_starts_the_model_is_followed_by_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Killed(BaseException):
        pass

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    pytest.importorskip(bootstrap.WEIGHTS_PACKAGE)
    with monkeypatch.context() as patch:
        patch.setattr(services, "start_model", die)
        with pytest.raises(Killed):
            run()
    assert not ModelConfig.objects.get().started

    run()
    assert ModelConfig.objects.get().started
    assert Rater.objects.exists()

    # What somebody stops stays so.
    services.stop_model("minilm", now=database_now())
    run()
    assert not ModelConfig.objects.get().started
