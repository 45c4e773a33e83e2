"""The loader `embedding_head`: a linear head on what the sentence encoder makes of query and text.

The encoder's folder with one more file, `head.safetensors`, of float tensors:

    bias        [1]      required
    range       [2]      required: scores are cut to it, lowest and highest
    cosine      [1]      weight of the cosine of query and text
    log_tokens  [1]      weight of ln(1 + tokens of the text before it was cut)
    query       [width]  weights of the query's unit vector
    text        [width]  weights of the text's unit vector

One of the four weights at least; all finite, and the range not empty. `score` is the sum, in
float32 on the host; `cosine` can be asked for beside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from workers.model_server.bert.loader import BertEncoder, cosines
from workers.model_server.bert.sizes import SIZES
from workers.model_server.files import CheckpointRefused, Files
from workers.model_server.headers import headers, require
from workers.model_server.loader import Contents, Output, Rows, Signature

HEAD = "head.safetensors"
WEIGHTS = ("cosine", "log_tokens", "query", "text")


class EmbeddingHead(BertEncoder):
    """The encoder's vectors, weighed."""

    revision = f"{BertEncoder.revision}.head1"
    digested = (*BertEncoder.digested, HEAD)

    def check(self, files: Files) -> Contents:
        contents = super().check(files)
        found = headers(files, HEAD)
        if unknown := found.keys() - {"bias", "range", *WEIGHTS}:
            raise CheckpointRefused("unknown_architecture", f"{HEAD}: {sorted(unknown)} is unknown")
        present = [name for name in WEIGHTS if name in found]
        if not present:
            raise CheckpointRefused("missing_tensor", f"{HEAD} has none of {', '.join(WEIGHTS)}")
        shapes = head_shapes(SIZES[contents.size].width)
        require(found, {name: shapes[name] for name in ("bias", "range", *present)})
        check_numbers(read_head(files))
        return contents

    def random(self, seed: int) -> Mapping[str, bytes]:
        from safetensors.numpy import save

        chance = np.random.default_rng(seed)
        head = {
            name: (0.1 * chance.normal(size=shape)).astype(np.float32)
            for name, shape in head_shapes(SIZES["tiny"].width).items()
        }
        head["cosine"] = np.ones(1, np.float32)
        head["range"] = np.array([-10, 10], np.float32)
        return {**super().random(seed), HEAD: save(head)}

    def signature(self, width: int) -> Signature:
        plain = super().signature(width)
        cosine = Output(name="cosine", datatype="FP32", default=False)
        return replace(plain, outputs=(*plain.outputs, cosine))

    def combining(
        self, files: Files, width: int
    ) -> Callable[[Rows, np.ndarray, np.ndarray], dict[str, np.ndarray]]:
        head = {name: np.zeros(shape, np.float32) for name, shape in head_shapes(width).items()}
        return partial(combine, head | read_head(files))


def head_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """All tensors of a head on vectors of this width."""
    scalars = dict.fromkeys(("bias", "cosine", "log_tokens"), (1,))
    return {**scalars, "range": (2,), "query": (width,), "text": (width,)}


def read_head(files: Files) -> dict[str, np.ndarray]:
    """The tensors of a head, float32."""
    from workers.model_server.arrays import file_tensors

    return {name: tensor.astype(np.float32) for name, tensor in file_tensors(files, HEAD).items()}


def check_numbers(head: Mapping[str, np.ndarray]) -> None:
    """Refuse a head that could give no score, or one score only."""
    lowest, highest = head["range"]
    if not lowest < highest:
        raise CheckpointRefused("checkpoint_unreadable", f"{HEAD}: its range is empty")
    for name, tensor in head.items():
        if name != "range" and not np.isfinite(tensor).all():
            raise CheckpointRefused("checkpoint_unreadable", f"{HEAD}: {name} is not finite")


def combine(
    head: Mapping[str, np.ndarray], rows: Rows, queries: np.ndarray, texts: np.ndarray
) -> dict[str, np.ndarray]:
    """The weighed sum of each row, cut to the head's range."""
    cosine = cosines(queries, texts)
    log_tokens = np.log1p(np.asarray(rows.counts["tokens"], np.float32))
    score = head["bias"] + head["cosine"] * cosine + head["log_tokens"] * log_tokens
    # Row by row: a product of matrices may sum in another order for another number of rows.
    score = score + np.einsum("nd,d->n", queries, head["query"])
    score = score + np.einsum("nd,d->n", texts, head["text"])
    return {
        "score": np.clip(score, *head["range"])[:, None],
        "cosine": cosine[:, None],
        "embedding": texts,
    }
