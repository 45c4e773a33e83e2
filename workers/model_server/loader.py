"""The seam between server and architecture: a loader, found by its entry point (`airs.loaders`).

A loader looks at a checkpoint's files without JAX (`check`, `version`: model management calls them
when a model is registered) and loads them (`load`: only the server's process does). What it loads
works in two stages:

1. `read` turns a call's texts into token sequences, and the device gives each distinct sequence one
   vector (`apply`). The batcher mixes sequences of all calls, knowing nothing of what they mean.
2. `combine` makes the outputs of each row from the vectors of its sequences, on the host.

An encoder has two sequences a row, its query's and its text's; a model that reads both together has
one, joined, and `combine` has little left to do. `docs/loaders.md` shows how to write one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from workers.model_server.files import (
    TOKENIZER,
    WEIGHTS,
    CheckpointRefused,
    Files,
    Folder,
    unreadable,
)
from workers.model_server.headers import weights_digest
from workers.model_server.serving import DTYPES, LENGTHS, SERVING

if TYPE_CHECKING:
    from workers.model_server.reader import Tokens

GROUP: Final = "airs.loaders"
DEFAULT: Final = "bert_encoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """One output tensor, (rows, columns); `default`: given to a call that names no outputs."""

    name: str
    datatype: str
    columns: int = 1
    default: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What a call brings, BYTES (rows, 1) each, and what it gets."""

    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What the files say before they are loaded."""

    size: str
    """A name of the model's size, for the metadata."""
    positions: int
    """The longest sequence that the architecture can take, in tokens."""
    max_tokens: int
    """Where its makers want sequences to be cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A call's rows as token sequences; each list has one entry a row, or none."""

    kept: "Sequence[Tokens]"
    """Sequences that come back in other calls, as queries do: their vectors are kept."""
    once: "Sequence[Tokens]"
    counts: "Mapping[str, Sequence[int]]"
    """Tokens before anything was cut, by the output that reports them. The row was shortened where
    one is above the answer's `max_tokens`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model on the host, ready to be compiled."""

    signature: Signature
    parameters: Any
    """Whatever `apply` takes first: a tree of arrays."""
    apply: Callable[[Any, Any, Any], Any]
    """Pure and traceable: (parameters, ids (rows, step) int32, lengths (rows,) int32) to float32
    (rows, width). A sequence's vector must not depend on the rows beside it, on their order or on
    the padding; a row of padding counts as one token long."""
    read: Callable[[Mapping[str, Sequence[str]]], Rows]
    """Stage 1, in a thread of its own."""
    combine: Callable[[Rows, np.ndarray, np.ndarray], dict[str, np.ndarray]]
    """Stage 2: rows, and the vectors of `kept` and of `once`, to each output (rows, columns); the
    counts are added by the server. Runs on the event loop: a few array operations."""


class Loader(ABC):
    """One architecture. A subclass needs no arguments; importing its module must not import JAX."""

    revision: ClassVar[str]
    """Part of the version, and unlike any other loader's: change it with what can move a score."""
    digested: ClassVar[tuple[str, ...]] = (WEIGHTS, TOKENIZER)
    """The files that decide a score; the weights may also be shards with an index."""
    tiny: ClassVar[Contents]
    """What `random` makes."""

    @abstractmethod
    def check(self, files: Files) -> Contents:
        """Look at config and headers; raises CheckpointRefused for what `load` could not serve."""

    @abstractmethod
    def random(self, seed: int) -> Mapping[str, bytes]:
        """Return the files of a tiny checkpoint with random weights, for `tiny:<seed>`."""

    @abstractmethod
    def load(self, files: Files, *, dtype: str, max_tokens: int) -> Loaded:
        """Read the files. `dtype` is that of matrix products; longer sequences are to be cut."""

    def problem(self, folder: Path, boundary: Path) -> CheckpointRefused | None:
        """Return why a folder cannot be served, if it cannot."""
        try:
            self.check(Folder(folder, boundary=boundary))
        except CheckpointRefused as refusal:
            return refusal
        except OSError as error:
            return unreadable(folder.name, error)
        return None

    def folder_version(
        self,
        folder: Path | None,
        boundary: Path | None,
        *,
        seed: str = "",
        platform: str,
        dtype: str = "auto",
        lengths: Sequence[int] = (),
    ) -> str:
        """Return what a server of this folder (None: of `seed`) will report as its version.

        Reads all weights. Raises CheckpointRefused.
        """
        if folder is None or boundary is None:
            return self.version(f"tiny-{seed}", self.tiny, platform, dtype, lengths)
        files = Folder(folder, boundary=boundary)
        contents = self.check(files)
        return self.version(self.digest(files), contents, platform, dtype, lengths)

    def digest(self, files: Files) -> str:
        """Return what names the files that decide a score."""
        first, *others = (
            weights_digest(files) if name == WEIGHTS else files.digest(name)
            for name in self.digested
        )
        return "-".join([first[:16], *(other[:8] for other in others)])

    def version(
        self, digest: str, contents: Contents, platform: str, dtype: str, lengths: Sequence[int]
    ) -> str:
        """Return the version: files, architecture, number format, and an unusual cut."""
        version = f"{digest}-{self.revision}-{number_format(platform, dtype)}"
        cut = longest(contents, lengths)
        usual = min(LENGTHS[-1], contents.positions)
        return version if cut == usual else f"{version}-t{cut}"


def number_format(platform: str, dtype: str) -> str:
    """Return the numpy name of `auto`, `f32` or `bf16` on such a device."""
    return DTYPES.get(dtype) or SERVING[platform].dtype


def longest(contents: Contents, lengths: Sequence[int]) -> int:
    """Return where sequences are cut: at most what the model takes and what is compiled."""
    return min(contents.positions, contents.max_tokens, max(lengths or LENGTHS))


def find(name: str) -> Loader:
    """Return the installed loader of this name; raises CheckpointRefused."""
    found = entry_points(group=GROUP, name=name)
    if not found:
        known = ", ".join(sorted(entry_points(group=GROUP).names)) or "none: `pip install -e .`"
        raise CheckpointRefused("unknown_loader", f"no loader {name!r} is installed, only {known}")
    loader: Loader = next(iter(found)).load()()
    return loader
