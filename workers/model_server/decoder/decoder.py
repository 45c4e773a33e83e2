"""A causal decoder that ends in one number: token ids in, the last token's logit out.

Pre-norm as in Llama: RMS norm, grouped-query attention with rotary positions, SwiGLU, each with a
residual; a last norm and a linear map of the last real token. Matrix products run in `dtype`;
norms, rotation, softmax and the residual stream stay in float32.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from workers.model_server.decoder.sizes import DecoderSize

Parameters = Mapping[str, Any]


def parameters(
    size: DecoderSize, tensors: Mapping[str, np.ndarray], dtype: jnp.dtype
) -> dict[str, Any]:
    """The checkpoint's tensors on the default device; linear maps transposed, in `dtype`."""

    def linear(name: str) -> jax.Array:
        return jnp.asarray(tensors[f"{name}.weight"].T, dtype)

    def exact(name: str) -> jax.Array:
        return jnp.asarray(tensors[f"{name}.weight"], jnp.float32)

    layers = []
    for number in range(size.layers):
        at = f"model.layers.{number}"
        layers.append(
            {
                "attention_norm": exact(f"{at}.input_layernorm"),
                "query": linear(f"{at}.self_attn.q_proj"),
                "key": linear(f"{at}.self_attn.k_proj"),
                "value": linear(f"{at}.self_attn.v_proj"),
                "attended": linear(f"{at}.self_attn.o_proj"),
                "feed_norm": exact(f"{at}.post_attention_layernorm"),
                "gate": linear(f"{at}.mlp.gate_proj"),
                "up": linear(f"{at}.mlp.up_proj"),
                "down": linear(f"{at}.mlp.down_proj"),
            }
        )
    return {
        "words": exact("model.embed_tokens"),
        "layers": layers,
        "norm": exact("model.norm"),
        "score": exact("score"),
    }


def logits(
    size: DecoderSize, parameters: Parameters, ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Ids (batch, length) and true lengths (batch,) to logits (batch, 1) float32.

    Padding stands on the right, where no real token looks.
    """
    x = parameters["words"][ids]
    rotation = _rotation(size, ids.shape[1])
    for layer in parameters["layers"]:
        x = x + _attention(size, layer, _norm(x, layer["attention_norm"], size), rotation)
        x = x + _feed(layer, _norm(x, layer["feed_norm"], size))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    last = _norm(last, parameters["norm"], size)
    return jnp.sum(last * parameters["score"], axis=-1, keepdims=True)


def _norm(x: jax.Array, scale: jax.Array, size: DecoderSize) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + size.epsilon) * scale


def _rotation(size: DecoderSize, length: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines (length, 1, half of a head)."""
    half = size.head_width // 2
    frequency = size.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn (batch, length, heads, head) by position; the halves of a head are its coordinates."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def _attention(
    size: DecoderSize,
    layer: Parameters,
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
) -> jax.Array:
    batch, length, _ = x.shape
    dtype = layer["query"].dtype
    inputs = x.astype(dtype)

    def heads(name: str) -> jax.Array:
        found: jax.Array = inputs @ layer[name]
        return found.reshape(batch, length, -1, size.head_width)

    query = _rotate(heads("query"), rotation) * size.head_width**-0.5
    key, value = _rotate(heads("key"), rotation), heads("value")
    groups = (batch, length, size.key_heads, size.heads // size.key_heads, size.head_width)
    scores = jnp.einsum(
        "bqgnd,bkgd->bgnqk",
        query.reshape(groups).astype(dtype),
        key.astype(dtype),
        preferred_element_type=jnp.float32,
    )
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1).astype(dtype)
    mixed = jnp.einsum("bgnqk,bkgd->bqgnd", weights, value).reshape(batch, length, size.width)
    output: jax.Array = mixed @ layer["attended"]
    return output.astype(jnp.float32)


def _feed(layer: Parameters, x: jax.Array) -> jax.Array:
    inputs = x.astype(layer["gate"].dtype)
    inner = jax.nn.silu(inputs @ layer["gate"]) * (inputs @ layer["up"])
    output: jax.Array = inner @ layer["down"]
    return output.astype(jnp.float32)
