"""The loader `bert_encoder`: a sentence encoder that scores by the cosine of query and text.

A sentence-transformers folder: `config.json` of a size in the table, `model.safetensors` (names
with or without `bert.`), `tokenizer.json`; `sentence_bert_config.json` says where texts are cut,
`1_Pooling/config.json` has to say mean. Outputs: `score`, the cosine; `embedding`, the text's unit
vector, when asked for by name.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from workers.model_server.bert.sizes import (
    REVISION,
    SIZES,
    USUAL_TOKENS,
    config_of,
    sentence_tokens,
    size_name,
    tensor_shapes,
)
from workers.model_server.files import CONFIG, Files, read_json
from workers.model_server.headers import headers, require
from workers.model_server.loader import Contents, Loaded, Loader, Output, Rows, Signature

if TYPE_CHECKING:
    from workers.model_server.reader import TextReader

PREFIX = "bert."


class BertEncoder(Loader):
    """Query and text are encoded apart; the device gives each a unit vector."""

    revision = REVISION
    tiny = Contents(size="tiny", positions=SIZES["tiny"].positions, max_tokens=USUAL_TOKENS)

    def check(self, files: Files) -> Contents:
        name = size_name(read_json(files, CONFIG))
        found = {name.removeprefix(PREFIX): header for name, header in headers(files).items()}
        require(found, tensor_shapes(SIZES[name]))
        return Contents(
            size=name, positions=SIZES[name].positions, max_tokens=sentence_tokens(files)
        )

    def random(self, seed: int) -> Mapping[str, bytes]:
        from workers.model_server import arrays

        size = SIZES["tiny"]
        return arrays.checkpoint_files(
            config_of(size),
            arrays.random_tensors(tensor_shapes(size), seed),
            arrays.character_tokenizer(),
        )

    def load(self, files: Files, *, dtype: str, max_tokens: int) -> Loaded:
        import jax.numpy as jnp

        from workers.model_server import arrays
        from workers.model_server.bert import encoder, weights
        from workers.model_server.reader import TextReader

        size = SIZES[size_name(read_json(files, CONFIG))]
        tensors = {
            name.removeprefix(PREFIX): tensor for name, tensor in arrays.read_tensors(files).items()
        }
        graph, parameters = weights.parameters(size, tensors, jnp.dtype(dtype))
        reader = TextReader(arrays.read_tokenizer(files), max_tokens=max_tokens)
        return Loaded(
            signature=self.signature(size.width),
            parameters=parameters,
            apply=partial(encoder.embed, graph),
            read=partial(read, reader),
            combine=self.combining(files, size.width),
        )

    def signature(self, width: int) -> Signature:
        """Return the tensors of an encoder of this width."""
        return Signature(
            inputs=("query", "text"),
            outputs=(
                Output(name="score", datatype="FP32"),
                Output(name="tokens", datatype="INT32"),
                Output(name="query_tokens", datatype="INT32"),
                Output(name="embedding", datatype="FP32", columns=width, default=False),
            ),
        )

    def combining(
        self, files: Files, width: int
    ) -> Callable[[Rows, np.ndarray, np.ndarray], dict[str, np.ndarray]]:
        """Return stage 2; a head beside the encoder is another one."""
        return combine


def read(reader: "TextReader", inputs: Mapping[str, Sequence[str]]) -> Rows:
    """Queries are kept: each comes back with all its results."""
    rows = len(inputs["text"])
    tokens = reader.read([*inputs["query"], *inputs["text"]])
    queries, texts = tokens[:rows], tokens[rows:]
    return Rows(
        kept=queries,
        once=texts,
        counts={
            "tokens": [one.count for one in texts],
            "query_tokens": [one.count for one in queries],
        },
    )


def combine(rows: Rows, queries: np.ndarray, texts: np.ndarray) -> dict[str, np.ndarray]:
    """Cosines of unit vectors, and the texts' vectors themselves."""
    # Rounding can leave 1.0000001, which a rater with a scale to 1 would have to refuse.
    return {"score": np.clip(cosines(queries, texts), -1, 1)[:, None], "embedding": texts}


def cosines(queries: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """The product of each row's two unit vectors, (rows,) float32."""
    product: np.ndarray = np.einsum("nd,nd->n", queries, texts)
    return product
