"""A BERT sentence encoder in Flax NNX: token ids in, one unit vector a sequence out.

The encoder knows nothing of text, files, HTTP or queues. `blank` gives a model whose parameters are
still missing (`weights` fills them), `embed` is the pure function that is compiled.

Post-LN BERT as published: word + position + segment embedding, then per layer self-attention and a
GELU feed-forward, each with a residual and a layer norm; mean over the real tokens, L2 norm. Matrix
products run in `dtype`; layer norms, softmax and pooling stay in float32 whatever it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from workers.model_server.bert.sizes import EncoderSize


class Layer(nnx.Module):
    """One transformer layer: (batch, length, width) float32 in and out."""

    def __init__(self, size: EncoderSize, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.qkv = linear(size.width, 3 * size.width)  # one product instead of three
        self.attended = linear(size.width, size.width)
        self.attention_norm = norm(size, rngs)
        self.up = linear(size.width, size.inner)
        self.down = linear(size.inner, size.width)
        self.output_norm = norm(size, rngs)
        self.heads = size.heads

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`mask` is (batch, 1, length, 1): 0 at real tokens, very negative at padding."""
        batch, length, width = x.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = jnp.moveaxis(self.qkv(x).reshape(heads), 2, 0)
        query = query * (width // self.heads) ** -0.5
        # Scores lie key by query: on a CPU this way round, and dividing by the sum only after the
        # second product, is 10% faster at 128 tokens and 20% at 256 than the textbook's order.
        scores = jnp.einsum("bkhd,bqhd->bhkq", key, query, preferred_element_type=jnp.float32)
        scores = scores + mask
        weights = jnp.exp(scores - jnp.max(scores, axis=2, keepdims=True))
        mixed = jnp.einsum("bhkq,bkhd->bqhd", weights.astype(value.dtype), value)
        mixed = mixed / jnp.moveaxis(jnp.sum(weights, axis=2), 1, 2)[..., None]
        mixed = mixed.reshape(batch, length, width).astype(value.dtype)
        x = self.attention_norm(x + self.attended(mixed).astype(jnp.float32))
        inner = jax.nn.gelu(self.up(x), approximate=False)
        output: jax.Array = self.output_norm(x + self.down(inner).astype(jnp.float32))
        return output


class Encoder(nnx.Module):
    """Token ids (batch, length) and true lengths (batch,) to unit vectors (batch, width)."""

    def __init__(self, size: EncoderSize, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def table(rows: int) -> nnx.Embed:
            return nnx.Embed(rows, size.width, param_dtype=jnp.float32, rngs=rngs)

        self.words = table(size.vocabulary)
        self.positions = table(size.positions)
        self.segments = table(size.segments)
        self.norm = norm(size, rngs)
        self.layers = nnx.List([Layer(size, dtype, rngs) for _ in range(size.layers)])

    def __call__(self, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        position = jnp.arange(ids.shape[1])
        real = position[None, :] < lengths[:, None]
        mask = jnp.where(real, 0.0, -1e9)[:, None, :, None]
        # Single texts only, so the segment is 0 everywhere.
        x = self.words(ids) + self.positions(position) + self.segments(jnp.zeros((), jnp.int32))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        total = jnp.sum(jnp.where(real[..., None], x, 0.0), axis=1)
        # The norm removes the mean's divisor, so that a row's length cancels out.
        return total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-12)


def norm(size: EncoderSize, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A float32 layer norm over the model's width."""
    return nnx.LayerNorm(size.width, epsilon=size.epsilon, dtype=jnp.float32, rngs=rngs)


def blank(size: EncoderSize, dtype: jnp.dtype) -> tuple[Any, Any]:
    """Graph and abstract parameters (shapes and types only: nothing is allocated)."""
    return nnx.split(nnx.eval_shape(lambda: Encoder(size, dtype, nnx.Rngs(0))))


def embed(graph: Any, parameters: Any, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Unit vectors (batch, width) float32. A row of padding counts as one token long."""
    model: Encoder = nnx.merge(graph, parameters)
    return model(ids, lengths)
