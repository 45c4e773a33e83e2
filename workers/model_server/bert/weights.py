"""Fills the encoder's parameters from a checkpoint's tensors."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from workers.model_server.arrays import Tensors
from workers.model_server.bert import encoder
from workers.model_server.bert.sizes import EncoderSize
from workers.model_server.files import CheckpointRefused

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


def parameters(size: EncoderSize, tensors: Tensors, dtype: jnp.dtype) -> tuple[Any, Any]:
    """Graph and filled parameters of the encoder, on the default device."""
    graph, state = encoder.blank(size, dtype)
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        tensor = tensor_for(path, tensors)
        if tensor.shape != leaf.shape:
            raise CheckpointRefused("wrong_shapes", f"{path}: {tensor.shape}, not {leaf.shape}")
        filled.append((path, leaf.replace(jnp.asarray(tensor, leaf.dtype))))
    return graph, nnx.from_flat_state(filled)


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
    parts = [tensors[f"{name}.{suffix}"] for name in names]
    return np.concatenate([part.T if kind == "kernel" else part for part in parts], axis=-1)
