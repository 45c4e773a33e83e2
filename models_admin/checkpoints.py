"""Which checkpoints may be served, what is wrong with their files, and the version they will have.

Three forms: `pkg:<package>/<path>` (shipped by an installed package), `<path>` under
AIRS_CHECKPOINT_ROOT, `tiny:<seed>` (random weights, for trials). A path is judged by its text
first, then with all links resolved; what leads out of the root gets one answer, whether or not
something is there. The model server applies the same rules when it opens the files.

What the files have to be, and the rule of versions, is the loader's business: a plug-in that is
found by its entry point and looks at headers only, without JAX.
"""

import importlib.util
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol

from models_admin.errors import CheckpointRefused

LOADERS: Final = "airs.loaders"
"""The group of entry points; workers.model_server, which is not imported here, has the same."""
DEFAULT_LOADER: Final = "bert_encoder"

WEIGHTS: Final = "model.safetensors"
_ORBAX: Final = "model.orbax"
_OTHER_WEIGHTS: Final = ("model.safetensors.index.json", "model.msgpack", _ORBAX)
FILES: Final = (WEIGHTS, "tokenizer.json", "config.json")
"""Without these no server starts; the weights may be shards with an index, Flax's msgpack, or a
folder of Orbax's."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_TINY = re.compile(r"tiny:\d{1,9}")
_UNPICKLED = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
_LONGEST_CHARACTERS = 1_024


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that may be served."""

    argument: str
    """What the model server is given."""
    folder: Path | None
    """Where its files lie; None for random weights."""
    boundary: Path | None = None
    """What they may not leave."""


class Problem(Protocol):
    """Why a loader refuses files."""

    @property
    def code(self) -> str: ...
    @property
    def detail(self) -> str: ...


class Loader(Protocol):
    """What is asked of a loader here (`workers.model_server.loader.Loader`)."""

    def problem(self, folder: Path, boundary: Path) -> Problem | None:
        """Return why a folder cannot be served, if it cannot."""

    def folder_version(
        self,
        folder: Path | None,
        boundary: Path | None,
        *,
        seed: str,
        platform: str,
        dtype: str,
        lengths: Sequence[int],
    ) -> str:
        """Return the version that a server will report; raises an exception that is a Problem."""


def loaders() -> tuple[str, ...]:
    """Return the names of the installed loaders, the default one first."""
    names = entry_points(group=LOADERS).names
    return tuple(sorted(names, key=lambda name: (name != DEFAULT_LOADER, name)))


def find(argument: str, *, root: Path, loader: str | None = None) -> Checkpoint:
    """Return the checkpoint that `argument` names; raises CheckpointRefused.

    Given a loader, its files' headers and config are looked at, too: milliseconds, whatever their
    size.
    """
    try:
        found = _find(argument, root)
    except OSError as error:
        raise _unreadable(error) from error
    if loader is not None:
        problem = None
        architecture = _loader(loader)
        if found.folder is not None and found.boundary is not None:
            problem = architecture.problem(found.folder, found.boundary)
        if problem is not None:
            raise CheckpointRefused(problem.detail, code=problem.code)
    return found


def version(
    checkpoint: Checkpoint,
    *,
    device: str,
    loader: str = DEFAULT_LOADER,
    serving: Mapping[str, Any] | None = None,
) -> str:
    """Return the version that a server on such a device (cpu, gpu, tpu) will report.

    Digests of the files that decide a score, the architecture's revision, the number format, and
    the longest sequence where it is not the usual one: all that moves a score. Of `serving`, that
    is `dtype` and `lengths`. What a server reports wins, should they differ.
    """
    options = serving or {}
    architecture = _loader(loader)
    try:
        return architecture.folder_version(
            checkpoint.folder,
            checkpoint.boundary,
            seed=checkpoint.argument.removeprefix("tiny:"),
            platform=device,
            dtype=options.get("dtype", "auto"),
            lengths=options.get("lengths", ()),
        )
    except OSError as error:
        raise _unreadable(error) from error
    except Exception as error:
        # A loader's refusal is of a class that cannot be imported here: known by what it tells.
        code, detail = getattr(error, "code", None), getattr(error, "detail", None)
        if not isinstance(code, str) or not isinstance(detail, str):
            raise
        raise CheckpointRefused(detail, code=code) from error


def _loader(name: str) -> Loader:
    found = entry_points(group=LOADERS, name=name)
    if not found:
        known = ", ".join(loaders()) or "none: `pip install -e .`"
        raise CheckpointRefused(
            f"no loader {name!r} is installed, only {known}", code="unknown_loader"
        )
    loader: Loader = next(iter(found)).load()()
    return loader


def _find(argument: str, root: Path) -> Checkpoint:
    if _TINY.fullmatch(argument):
        return Checkpoint(argument=argument, folder=None)
    if argument.startswith("pkg:"):
        package, _, inside = argument.removeprefix("pkg:").partition("/")
        names = _names(inside) if inside else []
        # Refused by its text before anything is looked up; looking up a top-level name runs no
        # code of the package.
        spec = _spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise CheckpointRefused(
                "no installed package of this name", code="package_not_installed"
            )
        boundary = Path(next(iter(spec.submodule_search_locations))).resolve()
        argument = "/".join([f"pkg:{package}", *names])
    else:
        names = _names(argument.removeprefix(f"{root}/"))
        boundary = root.resolve()
        argument = "/".join(names)
    folder = _inside(boundary.joinpath(*names), boundary)
    _check_files(folder, boundary)
    return Checkpoint(argument=argument, folder=folder, boundary=boundary)


def _spec(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package) if package.isidentifier() else None
    except ValueError:  # of `__main__`, which is no package
        return None


def _names(path: str) -> list[str]:
    names = path.split("/")
    if len(path) > _LONGEST_CHARACTERS or not all(_NAME.fullmatch(name) for name in names):
        raise _not_allowed()
    return names


def _inside(path: Path, boundary: Path) -> Path:
    resolved = Path(os.path.realpath(path))
    if not resolved.is_relative_to(boundary):
        raise _not_allowed()
    return resolved


def _check_files(folder: Path, boundary: Path) -> None:
    if not folder.is_dir():
        raise CheckpointRefused("no such folder under the root", code="checkpoint_not_found")
    for name in FILES:
        places = (name, *_OTHER_WEIGHTS) if name == WEIGHTS else (name,)
        paths = {place: _inside(folder / place, boundary) for place in places}
        place, path = next(
            ((place, path) for place, path in paths.items() if path.exists()), (name, None)
        )
        if path is None:
            raise _missing(folder, name)
        if place == _ORBAX and path.is_dir():
            continue  # the loader looks at the files in it, and at where they lie
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointRefused(f"{name} is not a regular file", code="not_a_regular_file")


def _missing(folder: Path, name: str) -> CheckpointRefused:
    if name == WEIGHTS and any(entry.suffix in _UNPICKLED for entry in folder.iterdir()):
        return CheckpointRefused(
            f"it would have to be unpickled; only {WEIGHTS} is read", code="unsafe_checkpoint"
        )
    return CheckpointRefused(f"the folder has no {name}", code="checkpoint_not_found")


def _unreadable(error: OSError) -> CheckpointRefused:
    return CheckpointRefused(
        f"its files cannot be read: {error.strerror}", code="checkpoint_unreadable"
    )


def _not_allowed() -> CheckpointRefused:
    return CheckpointRefused(
        "a checkpoint lies under the checkpoint root; its names have letters, digits, . _ - only "
        "and no leading dot",
        code="path_not_allowed",
    )
