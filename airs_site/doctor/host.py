"""This host: Python, packages, disks, and files with secrets."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from django.conf import settings
from packaging.requirements import Requirement

from fulfillment.doctor import Finding, Level

OLDEST_PYTHON = (3, 11)
_GIB = 1 << 30
_ROOM_BYTES = 10 * _GIB
_SECRET_FILES = ("credentials.json", "run/servers.json", "run/secret_key")


def python(version: Sequence[int] = sys.version_info[:3]) -> Iterator[Finding]:
    """Say whether Python is new enough."""
    number = ".".join(map(str, version))
    if tuple(version[:2]) < OLDEST_PYTHON:
        yield Finding(
            check="python",
            level=Level.FAIL,
            detail=number,
            remedy="make clean, then make setup PYTHON=python3.12: AIRS needs 3.11 or later",
        )
    else:
        yield Finding(check="python", level=Level.OK, detail=number)


def packages(requirements: Path | None = None) -> Iterator[Finding]:
    """Say which packages are missing or of another version than `requirements.txt` asks for."""
    path = requirements or Path(settings.BASE_DIR) / "requirements.txt"
    if not path.is_file():
        yield Finding(check="packages", level=Level.OK, detail=f"not checked: there is no {path}")
        return
    lines = (line.split("#", 1)[0].strip() for line in path.read_text().splitlines())
    wanted = [Requirement(line) for line in lines if line]
    wrong = list(filter(None, map(_wrong, wanted)))
    if wrong:
        yield Finding(
            check="packages",
            level=Level.FAIL,
            detail="; ".join(wrong),
            remedy="make setup (or pip install -r requirements.txt), then restart all processes",
        )
    else:
        yield Finding(check="packages", level=Level.OK, detail=f"all {len(wanted)} as required")


def _wrong(wanted: Requirement) -> str | None:
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is missing"
    if wanted.specifier.contains(version, prereleases=True):
        return None
    return f"{wanted.name} is {version}, wanted {wanted.specifier}"


def disks() -> Iterator[Finding]:
    """Say whether there is room where logs and spool files, and the embedded data, lie."""
    places: dict[str, Path | None] = {
        "disk of AIRS_HOME": settings.AIRS_HOME,
        "disk of PostgreSQL": settings.AIRS_DATA_DIRECTORY,
    }
    for check, place in places.items():
        if place is None or not place.exists():
            continue
        usage = shutil.disk_usage(place)
        detail = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free ({place})"
        if usage.free < settings.AIRS_MIN_FREE_BYTES:
            level, remedy = Level.FAIL, "free some: uploads get 507 until then"
        elif usage.free < _ROOM_BYTES and usage.free < usage.total / 10:
            level, remedy = Level.WARN, "free some, or shorten AIRS_KEEP_… (docs/operations.md)"
        else:
            level, remedy = Level.OK, ""
        yield Finding(check=check, level=level, detail=detail, remedy=remedy)


def secret_files() -> Iterator[Finding]:
    """Say which files with secrets others can read."""
    files = [settings.AIRS_HOME / name for name in _SECRET_FILES]
    there = [path for path in files if path.is_file()]
    if not_private := [path for path in there if path.stat().st_mode & 0o077]:
        for path in not_private:
            yield Finding(
                check="secrets",
                level=Level.FAIL,
                detail=f"{path} has mode {path.stat().st_mode & 0o777:04o}",
                remedy=f"chmod 600 '{path}', and renew what it holds if others use this machine",
            )
    else:
        yield Finding(check="secrets", level=Level.OK, detail=f"{len(there)} files, all private")
