"""What the loaders make of a checkpoint's files: all of it from headers, nothing unpickled."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgpack
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load, save

from workers.model_server import checkpoint, loader
from workers.model_server.arrays import read_tensors, read_tokenizer
from workers.model_server.files import (
    CONFIG,
    INDEX,
    PACKED,
    TOKENIZER,
    WEIGHTS,
    CheckpointRefused,
    Files,
    Folder,
)
from workers.model_server.loader import Loader

LOADERS = ("bert_encoder", "decoder_score", "embedding_head")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint root with a good checkpoint of each loader, and `root/good` of an encoder."""
    for name in LOADERS:
        write(tmp_path / "root" / name, loader.find(name).random(5))
    write(tmp_path / "root" / "good", encoder().random(5))
    return tmp_path / "root"


def encoder() -> Loader:
    return loader.find("bert_encoder")


def write(directory: Path, files: Mapping[str, bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)


def files(directory: Path) -> Folder:
    return Folder(directory, boundary=directory.parent)


def refusal(name: str, directory: Path) -> CheckpointRefused:
    """What the loader's check says; model management is told the same."""
    with pytest.raises(CheckpointRefused) as refused:
        loader.find(name).check(files(directory))
    told = loader.find(name).problem(directory, directory.parent)
    assert told is not None
    assert (told.code, told.detail) == (refused.value.code, refused.value.detail)
    return refused.value


def code(argument: str, *, root: Path | None) -> str:
    with pytest.raises(CheckpointRefused) as refused:
        encoder().check(checkpoint.find(argument, encoder(), root=root))
    return refused.value.code


def change_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**config, **changes}))


def shard(directory: Path) -> list[str]:
    """Cut the weights in two shards; their names."""
    tensors = load((directory / WEIGHTS).read_bytes())
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for shard, kept in parts.items():
        (directory / shard).write_bytes(save({name: tensors[name] for name in kept}))
    weight_map = {name: shard for shard, kept in parts.items() for name in kept}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [*parts]


@pytest.mark.parametrize("name", LOADERS)
def test_random_files_pass_the_check_and_load(name: str, root: Path) -> None:
    found = checkpoint.find(name, loader.find(name), root=root)

    assert loader.find(name).check(found) == loader.find(name).tiny
    assert loader.find(name).problem(root / name, root) is None
    for tensor, value in load(loader.find(name).random(5)[WEIGHTS]).items():
        np.testing.assert_array_equal(read_tensors(found)[tensor], value)


def test_unknown_loaders_are_named() -> None:
    with pytest.raises(CheckpointRefused, match="no loader 'x' is installed, only bert_encoder"):
        loader.find("x")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("bert_encoder", WEIGHTS),
        ("bert_encoder", TOKENIZER),
        ("embedding_head", "head.safetensors"),
        ("decoder_score", CONFIG),
    ],
)
def test_the_version_follows_every_file_that_decides_a_score(
    name: str, file: str, root: Path
) -> None:
    before = version(name, root / name)
    path = root / name / file
    other = loader.find(name).random(6)[file] if file != TOKENIZER else path.read_bytes() + b" "
    if file == CONFIG:
        change_config(root / name, rope_theta=5_000.0)
    else:
        path.write_bytes(other)

    assert version(name, root / name) != before


def version(name: str, directory: Path, **options: object) -> str:
    return loader.find(name).folder_version(
        directory,
        directory.parent,
        platform="cpu",
        **options,  # type: ignore[arg-type]
    )


def test_the_version_follows_number_format_cut_and_loader(root: Path) -> None:
    usual = version("bert_encoder", root / "good")
    (root / "good" / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    shorter = version("bert_encoder", root / "good")
    write(
        root / "good",
        {"head.safetensors": loader.find("embedding_head").random(5)["head.safetensors"]},
    )

    assert usual.endswith("-bert1-float32")
    assert version("bert_encoder", root / "bert_encoder", dtype="f32") == usual
    assert version("bert_encoder", root / "bert_encoder", dtype="bf16").endswith("-bert1-bfloat16")
    # Steps below the last one pad otherwise, and cut nothing.
    assert version("bert_encoder", root / "bert_encoder", lengths=(16, 64)) == usual
    assert version("bert_encoder", root / "bert_encoder", lengths=(16, 32)) == f"{usual}-t32"
    assert shorter == f"{usual}-t48"
    assert version("embedding_head", root / "good").endswith("-bert1.head1-float32-t48")


def test_all_loaders_have_revisions_of_their_own() -> None:
    assert len({loader.find(name).revision for name in LOADERS}) == len(LOADERS)


@pytest.mark.parametrize("argument", ["../outside", "/etc", "good/../../outside", "linked"])
def test_a_path_may_not_leave_the_root(root: Path, argument: str) -> None:
    (root.parent / "outside").mkdir()
    (root / "linked").symlink_to(root.parent / "outside")

    assert code(argument, root=root) == "path_not_allowed"


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, "sentence_bert_config.json"])
def test_a_file_may_not_leave_the_root_either(root: Path, name: str) -> None:
    path = root / "good" / name
    path.unlink(missing_ok=True)
    path.symlink_to(root.parent / "elsewhere")

    assert code("good", root=root) == "path_not_allowed"


def test_links_inside_the_root_are_followed(root: Path) -> None:
    (root / "current").symlink_to("good")

    assert encoder().check(checkpoint.find("current", encoder(), root=root)).size == "tiny"


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_only_regular_files_are_read(root: Path, name: str) -> None:
    (root / "good" / name).unlink()
    os.mkfifo(root / "good" / name)

    assert code("good", root=root) == "not_a_regular_file"


def test_a_link_put_in_place_of_a_file_that_was_looked_at_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere, opening = root / "good" / CONFIG, root.parent / "elsewhere", os.open
    elsewhere.write_text("{}")

    def linking(opened: Path, flags: int) -> int:
        path.unlink()
        path.symlink_to(elsewhere)
        return opening(opened, flags)

    monkeypatch.setattr(os, "open", linking)

    with pytest.raises(CheckpointRefused, match="checkpoint_unreadable"):
        files(root / "good").read(CONFIG)


def test_a_pipe_put_in_place_of_a_file_that_was_looked_at_is_not_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opening = root / "good" / CONFIG, os.open

    def piping(opened: Path, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return opening(opened, flags)

    monkeypatch.setattr(os, "open", piping)

    with pytest.raises(CheckpointRefused, match="not_a_regular_file"):
        files(root / "good").open(CONFIG)


def test_the_digest_of_a_config_is_of_the_bytes_that_were_read(root: Path) -> None:
    found = files(root / "decoder_score")
    loader.find("decoder_score").check(found)
    before = loader.find("decoder_score").digest(found)

    change_config(root / "decoder_score", rope_theta=5_000.0)

    assert loader.find("decoder_score").digest(found) == before


def test_a_config_that_is_too_long_is_unreadable(root: Path) -> None:
    with (root / "good" / CONFIG).open("ab") as file:
        file.truncate(17 << 20)

    assert "longer than" in refusal("bert_encoder", root / "good").detail


def test_a_pickle_is_never_opened(root: Path) -> None:
    (root / "good" / WEIGHTS).rename(root / "good" / "pytorch_model.bin")

    assert code("good", root=root) == "unsafe_checkpoint"


@pytest.mark.parametrize(
    ("argument", "with_root", "expected"),
    [
        ("missing", True, "checkpoint_not_found"),
        ("good", False, "path_not_allowed"),
        ("pkg:no_such_package_here/model", False, "package_not_installed"),
        ("pkg:../x", False, "package_not_installed"),
        ("pkg:json/../..", False, "path_not_allowed"),
        ("pkg:json/missing", False, "checkpoint_not_found"),
        ("pkg:json/", False, "checkpoint_not_found"),
    ],
)
def test_what_is_not_there_is_refused(
    root: Path, argument: str, with_root: bool, expected: str
) -> None:
    assert code(argument, root=root if with_root else None) == expected


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("bert_encoder", {"model_type": "roberta"}, "unknown_architecture"),
        ("bert_encoder", {"hidden_act": "relu"}, "unknown_architecture"),
        ("bert_encoder", {"num_hidden_layers": 7}, "unknown_size"),
        ("bert_encoder", {"hidden_size": "wide"}, "unknown_size"),
        ("decoder_score", {"model_type": "bert"}, "unknown_architecture"),
        ("decoder_score", {"model_type": None}, "unknown_architecture"),
        ("decoder_score", {"rope_scaling": {"factor": 2}}, "unknown_architecture"),
        ("decoder_score", {"num_attention_heads": 3}, "unknown_size"),
        ("decoder_score", {"eos_token_id": 128}, "unknown_size"),
        ("decoder_score", {"eos_token_id": None}, "unknown_size"),
        ("decoder_score", {"rms_norm_eps": 0}, "unknown_size"),
        ("decoder_score", {"intermediate_size": 47}, "wrong_shapes"),
        ("decoder_score", {"num_hidden_layers": 3}, "missing_tensor"),
    ],
)
def test_another_architecture_is_refused(
    root: Path, name: str, changes: dict[str, object], expected: str
) -> None:
    change_config(root / name, **changes)

    assert refusal(name, root / name).code == expected


def test_another_pooling_is_refused(root: Path) -> None:
    (root / "good" / "1_Pooling").mkdir()
    pooling = root / "good" / "1_Pooling" / CONFIG
    pooling.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')

    assert code("good", root=root) == "unknown_architecture"


Tensors = dict[str, np.ndarray]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: tensor for n, tensor in tensors.items() if n != name}


def instead(name: str, tensor: np.ndarray) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


NORM = "embeddings.LayerNorm.bias"


@pytest.mark.parametrize(
    ("name", "file", "change", "expected"),
    [
        ("bert_encoder", WEIGHTS, without(NORM), "missing_tensor"),
        ("bert_encoder", WEIGHTS, instead(NORM, np.zeros(7, np.float32)), "wrong_shapes"),
        ("bert_encoder", WEIGHTS, instead(NORM, np.zeros(32, np.int32)), "wrong_shapes"),
        ("decoder_score", WEIGHTS, without("score.weight"), "missing_tensor"),
        (
            "embedding_head",
            "head.safetensors",
            instead("text", np.zeros(31, np.float32)),
            "wrong_shapes",
        ),
        ("embedding_head", "head.safetensors", without("range"), "missing_tensor"),
        (
            "embedding_head",
            "head.safetensors",
            instead("bias", np.array([np.nan], np.float32)),
            "checkpoint_unreadable",
        ),
        (
            "embedding_head",
            "head.safetensors",
            instead("range", np.array([5, 1], np.float32)),
            "checkpoint_unreadable",
        ),
        (
            "embedding_head",
            "head.safetensors",
            instead("idf", np.zeros(1, np.float32)),
            "unknown_architecture",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_their_header(
    root: Path, name: str, file: str, change: Callable[[Tensors], Tensors], expected: str
) -> None:
    path = root / name / file
    path.write_bytes(save(change(load(path.read_bytes()))))

    assert refusal(name, root / name).code == expected


def test_what_a_wrong_shape_should_be_is_told(root: Path) -> None:
    path = root / "good" / WEIGHTS
    path.write_bytes(save({**load(path.read_bytes()), NORM: np.zeros(7, np.float32)}))

    detail = refusal("bert_encoder", root / "good").detail

    assert detail == f"{NORM} is [7], the config means [32]"


def header_of(document: object) -> bytes:
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[: len(content) // 2],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: b"\xff" * 4_000,
        lambda content: header_of([]),
        lambda content: header_of({"x": {"dtype": "F32", "shape": [1]}}),
        lambda content: header_of({"x": {"dtype": "F3", "shape": [0], "data_offsets": [0, 0]}}),
        lambda content: header_of({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}),
        lambda content: header_of({"x": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}),
        lambda content: header_of(
            {"x": {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 0]}}
        ),
        lambda content: header_of(
            {"x": {"dtype": "F32", "shape": [0] * 65, "data_offsets": [0, 0]}}
        ),
        # Multiplied out, it would take minutes.
        lambda content: header_of(
            {"x": {"dtype": "F32", "shape": [10**4000 - 1] * 1_000, "data_offsets": [0, 4]}}
        ),
        lambda content: (10**5).to_bytes(8, "little") + b"[" * 10**5,
    ],
)
def test_a_damaged_weights_file_is_unreadable(root: Path, damage: Callable[[bytes], bytes]) -> None:
    path = root / "good" / WEIGHTS
    path.write_bytes(damage(path.read_bytes()))

    assert refusal("bert_encoder", root / "good").code == "checkpoint_unreadable"


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_config_is_unreadable(root: Path, content: bytes) -> None:
    (root / "good" / CONFIG).write_bytes(content)

    assert refusal("bert_encoder", root / "good").code == "checkpoint_unreadable"


def test_a_damaged_tokenizer_is_found_when_it_is_loaded(root: Path) -> None:
    (root / "good" / TOKENIZER).write_bytes(b"{}")

    with pytest.raises(CheckpointRefused) as refused:
        read_tokenizer(files(root / "good"))

    assert refused.value.code == "checkpoint_unreadable"


def test_shards_are_read_as_one(root: Path) -> None:
    whole: Files = files(root / "bert_encoder")
    shard(root / "good")
    found: Files = files(root / "good")

    assert encoder().check(found) == encoder().tiny
    for name, tensor in read_tensors(whole).items():
        np.testing.assert_array_equal(read_tensors(found)[name], tensor)


def test_the_digest_of_shards_follows_each_of_them(root: Path) -> None:
    names = shard(root / "good")
    seen = {version("bert_encoder", root / "good")}

    for name in names:
        tensors = load((root / "good" / name).read_bytes())
        (root / "good" / name).write_bytes(save({n: -t for n, t in tensors.items()}))
        seen.add(version("bert_encoder", root / "good"))

    assert len(seen) == 3


def test_a_shard_that_lacks_a_promised_tensor_is_refused(root: Path) -> None:
    _, second = shard(root / "good")
    tensors = load((root / "good" / second).read_bytes())
    gone = max(tensors)
    (root / "good" / second).write_bytes(save(without(gone)(tensors)))

    assert refusal("bert_encoder", root / "good").detail == f"{second} has no {gone}"


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", ".x.safetensors", 7, "x"])
def test_a_shard_lies_beside_its_index(root: Path, name: object) -> None:
    shard(root / "good")
    (root / "good" / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))

    assert refusal("bert_encoder", root / "good").code == "path_not_allowed"


def test_half_precision_weights_are_read(root: Path) -> None:
    path = root / "good" / WEIGHTS
    path.write_bytes(save({n: t.astype(np.float16) for n, t in load(path.read_bytes()).items()}))

    encoder().check(files(root / "good"))

    assert {t.dtype for t in read_tensors(files(root / "good")).values()} == {np.dtype("float16")}


def pack(directory: Path, *, nested: bool) -> None:
    """Store the weights as Flax does instead."""
    tensors: dict[str, object] = {**load((directory / WEIGHTS).read_bytes())}
    (directory / WEIGHTS).unlink()
    if nested:
        tensors = unflatten_dict(tensors, sep=".")  # type: ignore[no-untyped-call]
    (directory / PACKED).write_bytes(msgpack_serialize(tensors))


@pytest.mark.parametrize("nested", [False, True])
def test_flax_msgpack_is_read(root: Path, nested: bool) -> None:
    pack(root / "good", nested=nested)

    assert encoder().check(files(root / "good")) == encoder().tiny
    found = read_tensors(files(root / "good"))
    for name, tensor in read_tensors(files(root / "bert_encoder")).items():
        np.testing.assert_array_equal(found[name], tensor)
    assert version("bert_encoder", root / "good") != version("bert_encoder", root / "bert_encoder")


def test_numbers_as_names_in_flax_msgpack_are_read(root: Path) -> None:
    path = root / "good" / WEIGHTS
    tensors = {tuple(map(number, n.split("."))): t for n, t in load(path.read_bytes()).items()}
    path.unlink()
    content = msgpack_serialize(unflatten_dict(tensors))  # type: ignore[no-untyped-call]
    (root / "good" / PACKED).write_bytes(content)

    encoder().check(files(root / "good"))
    found = read_tensors(files(root / "good"))

    assert found.keys() == read_tensors(files(root / "bert_encoder")).keys()


def number(part: str) -> str | int:
    return int(part) if part.isdecimal() else part


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: {**tensors, NORM: np.zeros(7, np.float32)}, "wrong_shapes"),
        (lambda tensors: {**tensors, NORM: np.zeros(32, np.int32)}, "wrong_shapes"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != NORM}, "missing_tensor"),
        (lambda tensors: {**tensors, "note": "text"}, "checkpoint_unreadable"),
        (lambda tensors: [*tensors], "checkpoint_unreadable"),
    ],
)
def test_msgpack_that_does_not_fit_is_refused(
    root: Path, change: Callable[[Tensors], object], expected: str
) -> None:
    path = root / "good" / WEIGHTS
    tensors = load(path.read_bytes())
    path.unlink()
    (root / "good" / PACKED).write_bytes(msgpack_serialize(change(tensors)))

    assert refusal("bert_encoder", root / "good").code == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content.replace(b"\x80\x20", b"\x81\x20", 1),
        lambda content: b"",
        lambda content: b"\x81" * 5_000,
        lambda content: msgpack.packb({"x": [[]] * 1_000}),
        lambda content: msgpack.packb(
            {"x": msgpack.ExtType(1, msgpack.packb([[2**63] * 65, "float32", b""]))}
        ),
        lambda content: b"\xc1",
        lambda content: msgpack.packb({"x": msgpack.ExtType(1, b"\x93")}),
        lambda content: msgpack.packb(
            {"x": msgpack.ExtType(1, msgpack.packb([[0] * 65, "float32", b""]))}
        ),
        lambda content: msgpack.packb(
            {"x": msgpack.ExtType(1, msgpack.packb([[1], "float32", bytes(8)]))}
        ),
        lambda content: msgpack.packb(
            {"x": msgpack.ExtType(1, msgpack.packb([7, "float32", b""]))}
        ),
        lambda content: msgpack.packb({"x": msgpack.ExtType(5, b"")}),
    ],
)
def test_damaged_msgpack_is_unreadable(root: Path, damage: Callable[[bytes], bytes]) -> None:
    pack(root / "good", nested=False)
    path = root / "good" / PACKED
    path.write_bytes(damage(path.read_bytes()))

    assert refusal("bert_encoder", root / "good").code == "checkpoint_unreadable"
