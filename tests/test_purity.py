"""What a module loads when it is imported, seen in a fresh interpreter.

import-linter reads imports; this catches what it cannot see, such as a package whose `__init__`
loads Celery.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPURE = {
    *("django", "rest_framework", "celery", "kombu", "redis", "psycopg2", "jax", "flax"),
    *("asyncio", "threading", "socket", "selectors", "subprocess", "logging", "random"),
}


def pure_modules() -> list[str]:
    files = [
        *ROOT.glob("fulfillment/policy/*.py"),
        *ROOT.glob("models_admin/policy/*.py"),
        *ROOT.glob("workers/model_server/scheduler.py"),
    ]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def loads(statement: str, *options: str) -> set[str]:
    """Return the modules that are there after the statement and were not before."""
    probe = (
        f"import sys, json; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    ran = subprocess.run(
        [sys.executable, "-I", *options, "-c", probe], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout))


def test_all_policies_are_looked_at() -> None:
    assert set(pure_modules()) >= {
        f"fulfillment.policy.{name}"
        for name in ("lifecycle", "priority", "fingerprint", "batching", "traffic", "ordering")
    }


# Without site-packages (-S): what cannot be found cannot be used either.
@pytest.mark.parametrize("module", pure_modules())
def test_a_policy_loads_values_of_the_standard_library_only(module: str) -> None:
    loaded = loads(f"import {module}", "-S")

    assert module in loaded
    assert not loaded & IMPURE


def simulation_modules() -> list[str]:
    files = ROOT.glob("airs_site/simulation/**/*.py")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def test_the_simulation_loads_nothing_of_ours_but_policies() -> None:
    loaded = loads("; ".join(f"import {module}" for module in simulation_modules()))

    ours = {module for module in loaded if module.startswith(("fulfillment.", "models_admin."))}
    assert ours
    assert not [module for module in ours if module.split(".")[1] != "policy"]
    # NumPy itself loads threads, sockets and its own generators of chance.
    assert not loaded & {"django", "celery", "kombu", "redis", "psycopg2", "jax", "asyncio"}


@pytest.mark.parametrize("package", ["airs_site", "fulfillment", "models_admin", "workers"])
def test_a_package_itself_loads_nothing(package: str) -> None:
    assert loads(f"import {package}") == {package}


@pytest.mark.parametrize("impure", ["asyncio", "logging", "django", "celery"])
def test_an_impure_import_is_seen(impure: str) -> None:
    assert loads(f"import {impure}") & IMPURE
