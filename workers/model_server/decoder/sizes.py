"""What a decoder's checkpoint has to look like: config and tensors. No JAX.

The layout is Hugging Face's `LlamaForSequenceClassification` with one label; `docs/loaders.md`
lists its tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.model_server.files import CONFIG, CheckpointRefused, real, whole

REVISION = "decoder1"
"""Part of the model version: raise it when a change of decoder or joining can move a score."""

USUAL_TOKENS = 256
"""Where a pair is cut unless the config says otherwise (`airs_max_tokens`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSize:
    """The numbers that fix the shapes of all parameters, and the ids that frame a pair."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    positions: int
    epsilon: float
    rope_base: float
    separator: int
    """Stands between query and text."""
    end: int
    """The last token, from whose vector the score is read."""
    begin: int | None = None

    @property
    def head_width(self) -> int:
        return self.width // self.heads


TINY = DecoderSize(
    vocabulary=128,
    width=32,
    layers=2,
    heads=4,
    key_heads=2,
    inner=48,
    positions=64,
    epsilon=1e-5,
    rope_base=10_000.0,
    begin=2,
    separator=3,
    end=3,
)


def size_of(config: Mapping[str, Any]) -> DecoderSize:
    """Return the size that a `config.json` describes; raises CheckpointRefused."""
    _check_kind(config)
    heads = whole(config, "num_attention_heads")
    size = DecoderSize(
        vocabulary=whole(config, "vocab_size"),
        width=whole(config, "hidden_size"),
        layers=whole(config, "num_hidden_layers"),
        heads=heads,
        key_heads=whole({"num_key_value_heads": heads, **config}, "num_key_value_heads"),
        inner=whole(config, "intermediate_size"),
        positions=whole(config, "max_position_embeddings", least=8),
        epsilon=real(config, "rms_norm_eps"),
        rope_base=real(config, "rope_theta", 10_000.0),
        begin=None
        if config.get("bos_token_id") is None
        else whole(config, "bos_token_id", least=0),
        separator=whole(config, "sep_token_id", least=0),
        end=whole(config, "eos_token_id", least=0),
    )
    if size.width % (2 * size.heads) or size.heads % size.key_heads:
        raise CheckpointRefused(
            "unknown_size",
            f"{CONFIG}: hidden_size is to be a multiple of twice num_attention_heads, and these of "
            "num_key_value_heads",
        )
    if max(size.separator, size.end, size.begin or 0) >= size.vocabulary:
        raise CheckpointRefused("unknown_size", f"{CONFIG}: a token id is not below vocab_size")
    return size


def cut_of(config: Mapping[str, Any]) -> int:
    """Return how many tokens of a pair are read."""
    return whole({"airs_max_tokens": USUAL_TOKENS, **config}, "airs_max_tokens", least=8)


def config_of(size: DecoderSize) -> dict[str, Any]:
    """Return the `config.json` of a size."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForSequenceClassification"],
        "hidden_act": "silu",
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "intermediate_size": size.inner,
        "max_position_embeddings": size.positions,
        "rms_norm_eps": size.epsilon,
        "rope_theta": size.rope_base,
        "bos_token_id": size.begin,
        "sep_token_id": size.separator,
        "eos_token_id": size.end,
    }


def tensor_shapes(size: DecoderSize) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in a checkpoint of `size`."""
    width, inner, keys = size.width, size.inner, size.key_heads * size.head_width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size.vocabulary, width)}
    for layer in range(size.layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (width,),
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, width),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        shapes |= {f"model.layers.{layer}.{n}.weight": shape for n, shape in of_layer.items()}
    return shapes | {"model.norm.weight": (width,), "score.weight": (1, width)}


def _check_kind(config: Mapping[str, Any]) -> None:
    if config.get("model_type") != "llama":
        raise CheckpointRefused("unknown_architecture", f"{CONFIG}: model_type is to be llama")
    usual = {
        "hidden_act": "silu",
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
    }
    for name, value in usual.items():
        if config.get(name, value) != value:
            raise CheckpointRefused(
                "unknown_architecture", f"{CONFIG}: {name} {config[name]!r} is not served"
            )
