import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from workers.model_server import checkpoint, encoder
from workers.model_server.checkpoint import CheckpointRefused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint root with one good checkpoint of the tiny size, `root/good`."""
    directory = tmp_path / "root" / "good"
    directory.mkdir(parents=True)
    source = checkpoint.tiny(5)
    save_file(dict(source.tensors), directory / checkpoint.WEIGHTS)
    source.tokenizer.save(str(directory / checkpoint.TOKENIZER))
    write_config(directory)
    return tmp_path / "root"


def write_config(directory: Path, **changes: object) -> None:
    size = encoder.SIZES["tiny"]
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.inner,
        "max_position_embeddings": size.positions,
        "type_vocab_size": size.segments,
        "layer_norm_eps": size.epsilon,
    }
    (directory / checkpoint.CONFIG).write_text(json.dumps({**config, **changes}))


def code(argument: str, *, root: Path | None, sha256: str | None = None) -> str:
    with pytest.raises(CheckpointRefused) as refused:
        checkpoint.load(argument, root=root, sha256=sha256)
    return refused.value.code


def test_a_directory_under_the_root_is_read(root: Path) -> None:
    found = checkpoint.load("good", root=root)

    assert found.size_name == "tiny"
    assert found.tokenizer.encode("ab").ids == checkpoint.tiny(5).tokenizer.encode("ab").ids
    for name, tensor in checkpoint.tiny(5).tensors.items():
        np.testing.assert_array_equal(found.tensors[name], tensor)


def test_the_digest_follows_weights_and_tokenizer(root: Path) -> None:
    before = checkpoint.load("good", root=root).digest

    save_file(dict(checkpoint.tiny(6).tensors), root / "good" / checkpoint.WEIGHTS)
    other_weights = checkpoint.load("good", root=root).digest
    text = (root / "good" / checkpoint.TOKENIZER).read_text()
    (root / "good" / checkpoint.TOKENIZER).write_text(text + " ")
    other_tokenizer = checkpoint.load("good", root=root).digest

    assert len({before, other_weights, other_tokenizer}) == 3


def test_an_expected_digest_is_checked(root: Path) -> None:
    digest = checkpoint.load("good", root=root).digest[:16]

    assert checkpoint.load("good", root=root, sha256=digest.upper())
    assert code("good", root=root, sha256="0" * 16) == "digest_mismatch"


@pytest.mark.parametrize("argument", ["../outside", "/etc", "good/../../outside", "linked"])
def test_a_path_may_not_leave_the_root(root: Path, argument: str) -> None:
    (root.parent / "outside").mkdir()
    (root / "linked").symlink_to(root.parent / "outside")

    assert code(argument, root=root) == "path_not_allowed"


def test_a_file_may_not_leave_the_root_either(root: Path) -> None:
    weights = root / "good" / checkpoint.WEIGHTS
    weights.rename(root.parent / "elsewhere")
    weights.symlink_to(root.parent / "elsewhere")

    assert code("good", root=root) == "path_not_allowed"


def test_links_inside_the_root_are_followed(root: Path) -> None:
    (root / "current").symlink_to("good")

    assert checkpoint.load("current", root=root).size_name == "tiny"


def test_only_regular_files_are_read(root: Path) -> None:
    weights = root / "good" / checkpoint.WEIGHTS
    weights.unlink()
    os.mkfifo(weights)

    assert code("good", root=root) == "path_not_allowed"


def test_a_pickle_is_never_opened(root: Path) -> None:
    (root / "good" / checkpoint.WEIGHTS).rename(root / "good" / "pytorch_model.bin")

    assert code("good", root=root) == "unsafe_checkpoint"


@pytest.mark.parametrize(
    ("argument", "with_root", "expected"),
    [
        ("missing", True, "not_found"),
        ("good", False, "path_not_allowed"),
        ("pkg:no_such_package_here/model", False, "package_missing"),
        ("pkg:../x", False, "package_missing"),
        ("pkg:json/../..", False, "path_not_allowed"),
        ("pkg:json/missing", False, "not_found"),
        ("pkg:json/", False, "not_found"),
    ],
)
def test_what_is_not_there_is_refused(
    root: Path, argument: str, with_root: bool, expected: str
) -> None:
    assert code(argument, root=root if with_root else None) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "roberta"}, "unknown_architecture"),
        ({"hidden_act": "relu"}, "unknown_architecture"),
        ({"num_hidden_layers": 7}, "unknown_size"),
    ],
)
def test_another_architecture_is_refused(
    root: Path, changes: dict[str, object], expected: str
) -> None:
    write_config(root / "good", **changes)

    assert code("good", root=root) == expected


def test_another_pooling_is_refused(root: Path) -> None:
    (root / "good" / "1_Pooling").mkdir()
    pooling = root / "good" / "1_Pooling" / checkpoint.CONFIG
    pooling.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')

    assert code("good", root=root) == "unknown_architecture"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop("embeddings.LayerNorm.bias"), "missing_tensor"),
        (
            lambda tensors: tensors.update({"embeddings.LayerNorm.bias": np.zeros(7, np.float32)}),
            "unknown_size",
        ),
    ],
)
def test_weights_that_do_not_fit_the_size_are_refused(
    root: Path, change: object, expected: str
) -> None:
    tensors = dict(checkpoint.tiny(5).tensors)
    assert callable(change)
    change(tensors)
    save_file(tensors, root / "good" / checkpoint.WEIGHTS)

    with pytest.raises(CheckpointRefused) as refused:
        checkpoint.parameters(checkpoint.load("good", root=root), jnp.dtype("float32"))

    assert refused.value.code == expected
