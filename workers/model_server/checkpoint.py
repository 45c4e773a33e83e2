"""Finds the files that a checkpoint argument names.

An argument is `pkg:<package>/<path>` (shipped inside an installed package), a directory under the
checkpoint root, or `tiny:<seed>` (random weights, for tests). Links are resolved before a path is
judged. What the files have to be is the loader's business.
"""

import importlib.util
import os
from pathlib import Path

from workers.model_server.files import CheckpointRefused, Files, Folder, Memory
from workers.model_server.loader import Loader

PACKAGE_PREFIX = "pkg:"
TINY_PREFIX = "tiny:"


def find(argument: str, loader: Loader, *, root: Path | None) -> Files:
    """Return the files that `argument` names; raises CheckpointRefused."""
    if argument.startswith(TINY_PREFIX):
        return Memory(loader.random(int(argument.removeprefix(TINY_PREFIX))))
    directory, boundary = locate(argument, root=root)
    return Folder(directory, boundary=boundary)


def digest(argument: str, loader: Loader, files: Files) -> str:
    """Return what names the files in a version."""
    if argument.startswith(TINY_PREFIX):
        return argument.replace(":", "-")
    return loader.digest(files)


def locate(argument: str, *, root: Path | None) -> tuple[Path, Path]:
    """The checkpoint's directory, links resolved, and the directory its files may not leave."""
    if argument.startswith(PACKAGE_PREFIX):
        package, _, inside = argument.removeprefix(PACKAGE_PREFIX).partition("/")
        try:
            # find_spec of a top-level name only looks; it runs no code of the package.
            spec = importlib.util.find_spec(package) if package.isidentifier() else None
        except ValueError:  # of `__main__`, which is no package
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise CheckpointRefused("package_not_installed", f"no installed package {package!r}")
        boundary = Path(next(iter(spec.submodule_search_locations))).resolve()
    elif root is None:
        raise CheckpointRefused("path_not_allowed", "a directory needs --checkpoint-root")
    else:
        boundary, inside = root.resolve(), argument
    directory = Path(os.path.realpath(boundary / inside))
    if not directory.is_relative_to(boundary):
        raise CheckpointRefused("path_not_allowed", f"{argument!r} leaves {boundary}")
    if not directory.is_dir():
        raise CheckpointRefused("checkpoint_not_found", f"{directory} is no directory")
    return directory, boundary
