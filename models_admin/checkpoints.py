"""Which checkpoints may be served, and the digest that names their weights.

Three forms: `pkg:<package>/<path>` (shipped by an installed package), `<path>` under
AIRS_CHECKPOINT_ROOT, `tiny:<seed>` (random weights, for trials). A path is judged by its text
first, then with all links resolved; what leads out of the root gets one answer, whether or not
something is there. The model server applies the same rules when it opens the files.
"""

import hashlib
import importlib.util
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models_admin.errors import CheckpointRefused

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
FILES = (WEIGHTS, TOKENIZER, "config.json")
"""Without these no server starts."""

REVISION: Final = "bert1"
NUMBERS: Final = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
"""As in workers.model_server (encoder, serving), which is not imported; a test compares them."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_TINY = re.compile(r"tiny:\d{1,9}")
_UNPICKLED = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
_LONGEST_CHARACTERS = 1_024
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that may be served."""

    argument: str
    """What the model server is given."""
    folder: Path | None
    """Where its files lie; None for random weights."""


def find(argument: str, *, root: Path) -> Checkpoint:
    """Return the checkpoint that `argument` names; raises CheckpointRefused."""
    try:
        return _find(argument, root)
    except OSError as error:
        raise _unreadable(error) from error


def version(checkpoint: Checkpoint, *, device: str) -> str:
    """Return the version that a server on such a device (cpu, gpu, tpu) will report.

    The first digits of the SHA-256 of weights and tokenizer, the architecture's revision and the
    number format: all that moves a score. What a server reports wins, should they differ.
    """
    rest = f"{REVISION}-{NUMBERS[device]}"
    if checkpoint.folder is None:
        return f"{checkpoint.argument.replace(':', '-')}-{rest}"
    try:
        weights = _sha256(checkpoint.folder / WEIGHTS)
        tokenizer = _sha256(checkpoint.folder / TOKENIZER)
    except OSError as error:
        raise _unreadable(error) from error
    return f"{weights[:16]}-{tokenizer[:8]}-{rest}"


def _find(argument: str, root: Path) -> Checkpoint:
    if _TINY.fullmatch(argument):
        return Checkpoint(argument=argument, folder=None)
    if argument.startswith("pkg:"):
        package, _, inside = argument.removeprefix("pkg:").partition("/")
        names = _names(inside) if inside else []
        # Refused by its text before anything is looked up; looking up a top-level name runs no
        # code of the package.
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise CheckpointRefused(
                "no installed package of this name", code="package_not_installed"
            )
        boundary = Path(next(iter(spec.submodule_search_locations))).resolve()
        argument = "/".join([f"pkg:{package}", *names])
    else:
        boundary = root.resolve()
        names = _names(argument.removeprefix(f"{root}/"))
        argument = "/".join(names)
    folder = _inside(boundary.joinpath(*names), boundary)
    _check_weights(folder, boundary)
    return Checkpoint(argument=argument, folder=folder)


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


def _check_weights(folder: Path, boundary: Path) -> None:
    if not folder.is_dir():
        raise CheckpointRefused("no such folder under the root", code="checkpoint_not_found")
    for name in FILES:
        path = _inside(folder / name, boundary)
        if not path.exists():
            raise _missing(folder, name)
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


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    # O_NONBLOCK: should the file have become a FIFO since the check, opening it must not hang.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointRefused(f"{path.name} is not a regular file", code="not_a_regular_file")
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()
