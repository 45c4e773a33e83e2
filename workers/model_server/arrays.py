"""Weights as arrays: read from a checkpoint, or random ones with a tokenizer, for tests."""

import json
import string
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from workers.model_server import orbax
from workers.model_server.files import (
    CONFIG,
    ORBAX,
    PACKED,
    TOKENIZER,
    WEIGHTS,
    Files,
    unreadable,
)
from workers.model_server.headers import weight_files

Tensors = Mapping[str, np.ndarray]

_TYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "BOOL": np.bool_,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def read_tensors(files: Files) -> Tensors:
    """Return all tensors of a checkpoint's weights, in the types that they are stored in."""
    names = weight_files(files)
    if names == [PACKED]:
        return packed_tensors(files)
    if names == [ORBAX]:
        return dict(orbax.arrays(files))
    return {tensor: array for name in names for tensor, array in file_tensors(files, name).items()}


def packed_tensors(files: Files) -> Tensors:
    """Return all tensors of Flax's msgpack file; nested names are joined by dots."""
    from flax.serialization import msgpack_restore
    from flax.traverse_util import flatten_dict

    try:
        tree = msgpack_restore(files.read(PACKED))
        found = flatten_dict(tree)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise unreadable(PACKED, error) from error
    # Of a list of layers, Flax's names are numbers.
    return {".".join(map(str, path)): tensor for path, tensor in found.items()}


def file_tensors(files: Files, name: str) -> Tensors:
    """Return all tensors of one safetensors file; raises CheckpointRefused."""
    try:
        found = safetensors.deserialize(files.read(name))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise unreadable(name, error) from error
    return {
        tensor: np.frombuffer(entry["data"], _TYPES[entry["dtype"]]).reshape(entry["shape"])
        for tensor, entry in found
    }


def read_tokenizer(files: Files) -> Tokenizer:
    """Return the tokenizer without padding and truncation: tokens are counted before a cut."""
    try:
        tokenizer = Tokenizer.from_str(files.read(TOKENIZER).decode())
    except Exception as error:  # the library raises nothing more special
        raise unreadable(TOKENIZER, error) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return random weights, scaled such that different texts get clearly different vectors."""
    chance = np.random.default_rng(seed)
    return {name: _random(name, shape, chance) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], chance: np.random.Generator) -> np.ndarray:
    tensor = chance.normal(size=shape)
    if name.endswith(".bias"):
        tensor *= 0.02
    elif len(shape) == 1:  # of a norm
        tensor = 1 + 0.1 * tensor
    elif "embed" not in name:
        tensor *= shape[1] ** -0.5
    return tensor.astype(np.float32)


def checkpoint_files(
    config: Mapping[str, Any], tensors: Tensors, tokenizer: Tokenizer
) -> dict[str, bytes]:
    """Return the files of a checkpoint of these parts."""
    return {
        CONFIG: json.dumps(config).encode(),
        WEIGHTS: save(dict(tensors)),
        TOKENIZER: tokenizer.to_str().encode(),
    }


def character_tokenizer() -> Tokenizer:
    """Return a WordPiece tokenizer whose pieces are single characters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    characters = string.ascii_lowercase + string.digits
    pieces = special + list(characters) + [f"##{c}" for c in characters] + list(string.punctuation)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(piece, vocabulary[piece]) for piece in ("[CLS]", "[SEP]")],
    )
    return tokenizer
