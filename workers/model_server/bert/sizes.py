"""What a BERT checkpoint has to look like: the table of sizes, config and tensors. No JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.model_server.files import CONFIG, CheckpointRefused, Files, read_json, real, whole

REVISION = "bert1"
"""Part of the model version: raise it when a change of the encoder can move a score."""

USUAL_TOKENS = 256
"""Where a sentence encoder that says nothing of it is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSize:
    """The numbers that fix the shapes of all parameters."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    positions: int
    segments: int = 2
    epsilon: float = 1e-12


SIZES = {
    "tiny": EncoderSize(
        vocabulary=128, width=32, layers=2, heads=4, inner=64, positions=64
    ),  # for tests: compiles in a moment
    "minilm-l6": EncoderSize(
        vocabulary=30522, width=384, layers=6, heads=12, inner=1536, positions=512
    ),
    "minilm-l12": EncoderSize(
        vocabulary=30522, width=384, layers=12, heads=12, inner=1536, positions=512
    ),
}


def size_name(config: Mapping[str, Any]) -> str:
    """Return the row of the size table that a `config.json` describes."""
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
        raise CheckpointRefused("unknown_architecture", "only BERT with exact GELU is served")
    described = EncoderSize(
        vocabulary=whole(config, "vocab_size"),
        width=whole(config, "hidden_size"),
        layers=whole(config, "num_hidden_layers"),
        heads=whole(config, "num_attention_heads"),
        inner=whole(config, "intermediate_size"),
        positions=whole(config, "max_position_embeddings"),
        segments=whole(config, "type_vocab_size"),
        epsilon=real(config, "layer_norm_eps"),
    )
    for name, size in SIZES.items():
        if size == described:
            return name
    raise CheckpointRefused("unknown_size", f"{described} is not in {sorted(SIZES)}")


def config_of(size: EncoderSize) -> dict[str, Any]:
    """Return the `config.json` of a size."""
    return {
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


def sentence_tokens(files: Files) -> int:
    """Return the longest sequence of a sentence encoder; refuses another pooling than the mean."""
    pooling = f"1_Pooling/{CONFIG}"
    if files.has(pooling) and not read_json(files, pooling).get("pooling_mode_mean_tokens"):
        raise CheckpointRefused("unknown_architecture", "only mean pooling is served")
    settings = "sentence_bert_config.json"
    if not files.has(settings):
        return USUAL_TOKENS
    return whole(read_json(files, settings), "max_seq_length", least=3)


def tensor_shapes(size: EncoderSize) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in a checkpoint of `size`; all names may begin with `bert.`."""
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
