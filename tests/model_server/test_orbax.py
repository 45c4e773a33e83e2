"""Orbax folders as weights: written by Orbax, read without it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load

from models_admin import checkpoints
from models_admin.errors import CheckpointRefused as Refused
from workers.model_server import loader
from workers.model_server.arrays import Tensors, read_tensors
from workers.model_server.files import (
    LONGEST_JSON_BYTES,
    ORBAX,
    WEIGHTS,
    CheckpointRefused,
    Folder,
)
from workers.model_server.headers import weights_digest

ROOT = Path(__file__).parent.parent.parent
NORM = "embeddings.LayerNorm.weight"
ENCODER = loader.find("bert_encoder")


def weights() -> dict[str, np.ndarray]:
    return dict(load(ENCODER.random(5)[WEIGHTS]))


def surround(folder: Path) -> None:
    """Store all of a checkpoint but its weights."""
    folder.mkdir(parents=True)
    for name, content in ENCODER.random(5).items():
        if name != WEIGHTS:
            (folder / name).write_bytes(content)


def write(folder: Path, tree: Any, **how: Any) -> None:
    """Store a checkpoint whose weights Orbax wrote."""
    surround(folder)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as saver:
        saver.save(folder / ORBAX, tree)


def nested(tensors: Tensors) -> Any:
    return unflatten_dict({**tensors}, sep=".")  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "good"
    write(folder, nested(weights()))
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own, `good` under a root."""
    return Path(shutil.copytree(written, tmp_path / "root" / "good"))


def files(folder: Path) -> Folder:
    return Folder(folder, boundary=folder.parent)


def refusal(folder: Path) -> CheckpointRefused:
    with pytest.raises(CheckpointRefused) as refused:
        ENCODER.check(files(folder))
    return refused.value


def test_what_the_standard_checkpointer_wrote_is_served(tmp_path: Path) -> None:
    surround(tmp_path / "root" / "good")
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "root" / "good" / ORBAX, nested(weights()))

    found = files(tmp_path / "root" / "good")
    assert ENCODER.check(found) == ENCODER.tiny
    assert ENCODER.load(found, dtype="float32", max_tokens=32).parameters is not None


@pytest.mark.parametrize(
    "how", [{}, {"use_ocdbt": False}, {"use_zarr3": True}, {"use_ocdbt": False, "use_zarr3": True}]
)
@pytest.mark.parametrize("shaped", [nested, dict])
def test_each_layout_is_read(
    tmp_path: Path, shaped: Callable[[Tensors], Any], how: dict[str, bool]
) -> None:
    write(tmp_path / "root" / "good", shaped(weights()), **how)

    found = read_tensors(files(tmp_path / "root" / "good"))

    assert found.keys() == weights().keys()
    for name, tensor in weights().items():
        np.testing.assert_array_equal(found[name], tensor)


def test_lists_halves_and_what_is_no_array_are_read(tmp_path: Path) -> None:
    tree = {
        "layers": [{"w": np.ones(2, ml_dtypes.bfloat16)}, {"w": np.zeros(3, np.float16)}],
        "step": 7,
        "name": "text",
        "none": None,
    }
    write(tmp_path / "root" / "good", tree)

    found = read_tensors(files(tmp_path / "root" / "good"))

    assert {name: str(array.dtype) for name, array in found.items() if name != "step"} == {
        "layers.0.w": "bfloat16",
        "layers.1.w": "float16",
    }
    assert found["step"] == 7
    assert not found["layers.1.w"].any()


def lose(name: str) -> Callable[[Path], None]:
    def losing(folder: Path) -> None:
        shutil.rmtree(path) if (path := folder / name).is_dir() else path.unlink()

    return losing


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoiling(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return spoiling


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def data_of(folder: Path) -> Path:
    """The largest file: most of the weights."""
    return max(folder.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "damage",
    [
        lose("_METADATA"),
        lose("manifest.ocdbt"),
        lose("ocdbt.process_0"),
        lose("d"),
        spoil("_METADATA", cut),
        spoil("_METADATA", lambda content: b"[" * 100_000),
        spoil("_METADATA", lambda content: b'{"tree_metadata": {"a": {"key_metadata": 1}}}'),
        spoil("_METADATA", lambda content: content.replace(b"weight", b"height")),
        spoil("manifest.ocdbt", cut),
        spoil("manifest.ocdbt", lambda content: b"rubbish" * 30),
        lambda folder: data_of(folder).unlink(),
        lambda folder: os.truncate(data_of(folder), 100),
        lambda folder: data_of(folder).write_bytes(bytes(data_of(folder).stat().st_size)),
    ],
)
def test_a_damaged_folder_is_unreadable(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder / ORBAX)

    found = refusal(folder)

    assert found.code == "checkpoint_unreadable", found.detail
    assert "tensorstore_spec" not in found.detail
    assert str(folder) not in found.detail


def test_a_chunk_that_was_lost_is_no_zeros(tmp_path: Path) -> None:
    write(tmp_path / "root" / "good", nested(weights()), use_ocdbt=False)
    (tmp_path / "root" / "good" / ORBAX / NORM / "0").unlink()

    assert refusal(tmp_path / "root" / "good").code == "checkpoint_unreadable"


@pytest.mark.parametrize("huge", [["shape", "chunks"], ["shape"], ["chunks"]])
def test_arrays_that_claim_to_be_huge_are_not_made(tmp_path: Path, huge: list[str]) -> None:
    write(tmp_path / "root" / "good", nested(weights()), use_ocdbt=False)
    about = tmp_path / "root" / "good" / ORBAX / NORM / ".zarray"
    said = json.loads(about.read_text())
    about.write_text(json.dumps(said | {key: [1 << 40] for key in huge}))

    found = refusal(tmp_path / "root" / "good")

    assert found.code == "checkpoint_unreadable"
    assert "far larger" in found.detail


def test_an_array_of_countless_chunks_is_not_read(tmp_path: Path) -> None:
    """Each takes memory and time, those too that are not there and stand for zeros."""
    write(tmp_path / "root" / "good", nested(weights()), use_ocdbt=False)
    about = tmp_path / "root" / "good" / ORBAX / NORM / ".zarray"
    about.write_text(
        json.dumps(json.loads(about.read_text()) | {"shape": [1 << 19], "chunks": [1]})
    )

    found = refusal(tmp_path / "root" / "good")

    assert (found.code, "far larger" in found.detail) == ("checkpoint_unreadable", True)


def test_what_names_arrays_is_no_longer_than_other_documents(folder: Path) -> None:
    with (folder / ORBAX / "_METADATA").open("ab") as file:
        file.write(b" " * LONGEST_JSON_BYTES)
    assert refusal(folder).code == "checkpoint_unreadable"


@pytest.mark.parametrize("name", [b"\xff", b"one\ntwo"])
def test_a_name_that_cannot_be_told_is_refused(folder: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(folder / ORBAX) + b"/" + name)).write_bytes(b"x")
    assert refusal(folder).code == "checkpoint_unreadable"
    assert refusal(folder).detail.isprintable()


def test_the_version_is_that_of_the_files_that_were_read(folder: Path) -> None:
    found, before = files(folder), weights_digest(files(folder))
    ENCODER.check(found)
    (folder / ORBAX / "later").write_bytes(b"x")

    assert weights_digest(found) == before
    assert weights_digest(files(folder)) != before


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda tensors: {**tensors, NORM: np.zeros(7, np.float32)}, "wrong_shapes"),
        (lambda tensors: {**tensors, NORM: np.zeros(32, np.int32)}, "wrong_shapes"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != NORM}, "missing_tensor"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Tensors], Any], code: str
) -> None:
    write(tmp_path / "root" / "good", nested(change(weights())))
    assert refusal(tmp_path / "root" / "good").code == code


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "d", "ocdbt.process_0/d"])
def test_nothing_in_it_may_lead_out_of_the_root(folder: Path, name: str) -> None:
    path = folder / ORBAX / name
    outside = folder.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)

    assert refusal(folder).code == "path_not_allowed"


def test_links_inside_the_root_are_followed(folder: Path) -> None:
    (folder / ORBAX).rename(folder.parent / "elsewhere")
    (folder / ORBAX).symlink_to("../elsewhere")

    assert ENCODER.check(files(folder)) == ENCODER.tiny
    assert checkpoints.find("good", root=folder.parent, loader="bert_encoder").folder == folder


def test_links_that_lead_round_in_circles_end(folder: Path) -> None:
    (folder / ORBAX / "round").symlink_to(".")
    assert refusal(folder).code == "checkpoint_unreadable"


def test_only_regular_files_are_read(folder: Path) -> None:
    os.mkfifo(folder / ORBAX / "pipe")
    assert refusal(folder).code == "not_a_regular_file"


def test_a_file_of_its_name_is_no_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / ORBAX)
    (folder / ORBAX).write_bytes(b"x")
    assert refusal(folder).code == "checkpoint_unreadable"


def test_the_version_follows_each_of_its_files(folder: Path) -> None:
    def digest() -> str:
        return weights_digest(files(folder))

    seen = {digest()}
    for name in files(folder).below(ORBAX):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before + b" ")
        seen.add(digest())
        (folder / name).write_bytes(before)

    assert len(seen) == 1 + len(files(folder).below(ORBAX))
    assert digest() in seen


def test_model_management_registers_it_without_jax(folder: Path) -> None:
    found = checkpoints.find("good", root=folder.parent, loader="bert_encoder")
    version = checkpoints.version(found, device="cpu")
    expected = f"{ENCODER.digest(files(folder))}-bert1-float32"
    (folder / ORBAX / "_METADATA").write_bytes(b"{}")
    with pytest.raises(Refused) as refused:
        checkpoints.find("good", root=folder.parent, loader="bert_encoder")

    assert version == expected
    assert refused.value.code == "checkpoint_unreadable"


def test_looking_at_it_imports_no_jax(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from workers.model_server import loader\n"
        f"p = Path({str(folder)!r})\n"
        "assert loader.find('bert_encoder').problem(p, p.parent) is None\n"
        "assert not {'jax', 'flax', 'orbax'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
