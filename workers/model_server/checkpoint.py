"""Finds a checkpoint's files and reads them: parameters, tokenizer and a version that names them.

A checkpoint argument is `pkg:<package>/<path>` (shipped inside an installed package), a directory
under the checkpoint root, or `tiny:<seed>` (random weights, for tests). Links are resolved before a
path is judged. Only safetensors and JSON are read: nothing here can unpickle.
"""

import hashlib
import importlib.util
import json
import stat
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load as load_safetensors
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from workers.model_server import encoder

Tensors = Mapping[str, np.ndarray]

PACKAGE_PREFIX = "pkg:"
TINY_PREFIX = "tiny:"
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


class CheckpointRefused(Exception):
    """The checkpoint cannot be served; `code` is stable, the text explains it."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """All that decides a score, on the host."""

    size_name: str
    tensors: Tensors
    tokenizer: Tokenizer
    max_tokens: int
    digest: str

    @property
    def size(self) -> encoder.EncoderSize:
        return encoder.SIZES[self.size_name]


def load(argument: str, *, root: Path | None, sha256: str | None = None) -> Checkpoint:
    """Read the checkpoint that `argument` names, or raise CheckpointRefused."""
    if argument.startswith(TINY_PREFIX):
        return tiny(int(argument.removeprefix(TINY_PREFIX)))
    directory, boundary = locate(argument, root=root)
    weights = read_regular(directory / WEIGHTS, boundary)
    tokenizer_json = read_regular(directory / TOKENIZER, boundary)
    found = hashlib.sha256(weights).hexdigest()
    if sha256 is not None and not found.startswith(sha256.lower()):
        raise CheckpointRefused("digest_mismatch", f"{WEIGHTS} has sha256 {found}")
    return Checkpoint(
        size_name=size_name(json.loads(read_regular(directory / CONFIG, boundary))),
        tensors={
            name.removeprefix("bert."): tensor for name, tensor in load_safetensors(weights).items()
        },
        tokenizer=ready(Tokenizer.from_str(tokenizer_json.decode())),
        max_tokens=sentence_settings(directory, boundary),
        digest=f"{found[:16]}-{hashlib.sha256(tokenizer_json).hexdigest()[:8]}",
    )


def locate(argument: str, *, root: Path | None) -> tuple[Path, Path]:
    """The checkpoint's directory, links resolved, and the directory its files may not leave."""
    if argument.startswith(PACKAGE_PREFIX):
        package, _, inside = argument.removeprefix(PACKAGE_PREFIX).partition("/")
        # find_spec of a top-level name only looks; it runs no code of the package.
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise CheckpointRefused("package_missing", f"no installed package {package!r}")
        boundary = Path(next(iter(spec.submodule_search_locations))).resolve()
    elif root is None:
        raise CheckpointRefused("path_not_allowed", "a directory needs --checkpoint-root")
    else:
        boundary, inside = root.resolve(), argument
    directory = (boundary / inside).resolve()
    if not directory.is_relative_to(boundary):
        raise CheckpointRefused("path_not_allowed", f"{argument!r} leaves {boundary}")
    if not directory.is_dir():
        raise CheckpointRefused("not_found", f"{directory} is no directory")
    return directory, boundary


def read_regular(path: Path, boundary: Path) -> bytes:
    """The bytes of a regular file inside `boundary`, wherever its links lead."""
    resolved = path.resolve()
    if not resolved.is_relative_to(boundary):
        raise CheckpointRefused("path_not_allowed", f"{path} leaves {boundary}")
    if not resolved.exists():
        raise CheckpointRefused(*missing(path))
    if not stat.S_ISREG(resolved.stat().st_mode):
        raise CheckpointRefused("path_not_allowed", f"{path} is not a regular file")
    return resolved.read_bytes()


def missing(path: Path) -> tuple[str, str]:
    """Code and text for a file that is not there; says so when only a pickle is."""
    pickles = [p.name for p in path.parent.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".pkl"}]
    if path.name == WEIGHTS and pickles:
        return "unsafe_checkpoint", f"{pickles[0]} would have to be unpickled; use {WEIGHTS}"
    return "not_found", f"{path} does not exist"


def size_name(config: Mapping[str, Any]) -> str:
    """The row of the size table that a `config.json` describes."""
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
        raise CheckpointRefused("unknown_architecture", "only BERT with exact GELU is served")
    described = encoder.EncoderSize(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        inner=config["intermediate_size"],
        positions=config["max_position_embeddings"],
        segments=config["type_vocab_size"],
        epsilon=config["layer_norm_eps"],
    )
    for name, size in encoder.SIZES.items():
        if size == described:
            return name
    raise CheckpointRefused("unknown_size", f"{described} is not in {sorted(encoder.SIZES)}")


def sentence_settings(directory: Path, boundary: Path) -> int:
    """The longest sequence of the sentence encoder; refuses another pooling than the mean."""
    pooling = directory / "1_Pooling" / CONFIG
    if pooling.exists() and not json.loads(read_regular(pooling, boundary)).get(
        "pooling_mode_mean_tokens"
    ):
        raise CheckpointRefused("unknown_architecture", "only mean pooling is served")
    settings = directory / "sentence_bert_config.json"
    if not settings.exists():
        return 256
    return int(json.loads(read_regular(settings, boundary))["max_seq_length"])


def ready(tokenizer: Tokenizer) -> Tokenizer:
    """Without padding and truncation: the server counts a text's tokens before it cuts them."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def parameters(checkpoint: Checkpoint, dtype: jnp.dtype) -> tuple[Any, Any]:
    """Graph and filled parameters of the encoder, on the default device."""
    graph, state = encoder.blank(checkpoint.size, dtype)
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        tensor = tensor_for(path, checkpoint.tensors)
        if tensor.shape != leaf.shape:
            raise CheckpointRefused("unknown_size", f"{path}: {tensor.shape}, not {leaf.shape}")
        filled.append((path, leaf.replace(jnp.asarray(tensor, leaf.dtype))))
    return graph, nnx.from_flat_state(filled)


LAYER_NAMES = {
    "attended": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "output_norm": "output.LayerNorm",
}
TABLE_NAMES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}


def tensor_for(path: tuple[Any, ...], tensors: Tensors) -> np.ndarray:
    """The checkpoint's tensor for one of our parameters (its linear maps are stored transposed)."""
    *module, kind = path
    suffix = "bias" if kind == "bias" else "weight"
    if module[0] != "layers":
        names = [TABLE_NAMES[module[0]]]
    elif module[2] == "qkv":
        names = [f"encoder.layer.{module[1]}.attention.self.{n}" for n in ("query", "key", "value")]
    else:
        names = [f"encoder.layer.{module[1]}.{LAYER_NAMES[module[2]]}"]
    try:
        parts = [tensors[f"{name}.{suffix}"] for name in names]
    except KeyError as error:
        raise CheckpointRefused("missing_tensor", str(error)) from error
    return np.concatenate([part.T if kind == "kernel" else part for part in parts], axis=-1)


def tiny(seed: int) -> Checkpoint:
    """Random weights of the tiny size and a tokenizer over single characters, for tests."""
    size = encoder.SIZES["tiny"]
    chance = np.random.default_rng(seed)
    tensors = {
        name: random_tensor(name, shape, chance) for name, shape in tensor_shapes(size).items()
    }
    return Checkpoint(
        size_name="tiny",
        tensors=tensors,
        tokenizer=ready(character_tokenizer()),
        max_tokens=size.positions,
        digest=f"tiny-{seed}",
    )


def random_tensor(name: str, shape: tuple[int, ...], chance: np.random.Generator) -> np.ndarray:
    """Scaled such that different texts get clearly different vectors."""
    tensor = chance.normal(size=shape)
    if name.endswith("LayerNorm.weight"):
        tensor = 1 + 0.1 * tensor
    elif name.endswith(".bias"):
        tensor *= 0.02
    elif not name.startswith("embeddings."):
        tensor *= shape[1] ** -0.5
    return tensor.astype(np.float32)


def tensor_shapes(size: encoder.EncoderSize) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a checkpoint of `size`."""
    width, inner = size.width, size.inner
    tables: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings": (size.vocabulary, width),
        "embeddings.position_embeddings": (size.positions, width),
        "embeddings.token_type_embeddings": (size.segments, width),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": shape for n, shape in tables.items()}
    linear: dict[str, tuple[int, ...]] = {"attention.output.dense": (width, width)}
    linear |= {f"attention.self.{name}": (width, width) for name in ("query", "key", "value")}
    linear |= {"intermediate.dense": (inner, width), "output.dense": (width, inner)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(size.layers):
        prefix = f"encoder.layer.{layer}."
        norms += [f"{prefix}{name}.LayerNorm" for name in ("attention.output", "output")]
        for name, shape in linear.items():
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes | {f"{name}.{kind}": (width,) for name in norms for kind in ("weight", "bias")}


def character_tokenizer() -> Tokenizer:
    """A WordPiece tokenizer whose pieces are single characters."""
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
