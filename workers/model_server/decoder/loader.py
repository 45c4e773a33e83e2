"""The loader `decoder_score`: a causal decoder that reads query and text as one sequence.

The pair is `[begin] query separator text end`, without the tokenizer's own special tokens. Outputs:
`score`, the sigmoid of the last token's logit, 0 to 1; `logit`, when asked for by name; `tokens`
counts the whole pair, and a row was shortened where it is above `max_tokens`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from workers.model_server.decoder.sizes import (
    REVISION,
    TINY,
    USUAL_TOKENS,
    config_of,
    cut_of,
    size_of,
    tensor_shapes,
)
from workers.model_server.files import CONFIG, Files, read_json
from workers.model_server.headers import headers, require
from workers.model_server.loader import Contents, Loaded, Loader, Output, Rows, Signature

if TYPE_CHECKING:
    from workers.model_server.reader import PairReader

SIGNATURE = Signature(
    inputs=("query", "text"),
    outputs=(
        Output(name="score", datatype="FP32"),
        Output(name="tokens", datatype="INT32"),
        Output(name="query_tokens", datatype="INT32"),
        Output(name="logit", datatype="FP32", default=False),
    ),
)


class DecoderScore(Loader):
    """Nothing is shared between rows: each pair is a sequence of its own."""

    revision = REVISION
    digested = (*Loader.digested, CONFIG)  # its numbers move scores without changing a shape
    tiny = Contents(size="2x32", positions=TINY.positions, max_tokens=USUAL_TOKENS)

    def check(self, files: Files) -> Contents:
        config = read_json(files, CONFIG)
        size = size_of(config)
        require(headers(files), tensor_shapes(size))
        return Contents(
            size=f"{size.layers}x{size.width}",
            positions=size.positions,
            max_tokens=cut_of(config),
        )

    def random(self, seed: int) -> Mapping[str, bytes]:
        from workers.model_server import arrays

        return arrays.checkpoint_files(
            config_of(TINY),
            arrays.random_tensors(tensor_shapes(TINY), seed),
            arrays.character_tokenizer(),
        )

    def load(self, files: Files, *, dtype: str, max_tokens: int) -> Loaded:
        import jax.numpy as jnp

        from workers.model_server import arrays
        from workers.model_server.decoder import decoder
        from workers.model_server.reader import PairReader

        size = size_of(read_json(files, CONFIG))
        reader = PairReader(
            arrays.read_tokenizer(files),
            max_tokens=max_tokens,
            begin=() if size.begin is None else (size.begin,),
            separator=(size.separator,),
            end=(size.end,),
        )
        return Loaded(
            signature=SIGNATURE,
            parameters=decoder.parameters(size, arrays.read_tensors(files), jnp.dtype(dtype)),
            apply=partial(decoder.logits, size),
            read=partial(read, reader),
            combine=combine,
        )


def read(reader: "PairReader", inputs: Mapping[str, Sequence[str]]) -> Rows:
    """Pairs hardly ever come back: none is kept."""
    pairs = reader.read(inputs["query"], inputs["text"])
    return Rows(
        kept=(),
        once=[pair for pair, _ in pairs],
        counts={
            "tokens": [pair.count for pair, _ in pairs],
            "query_tokens": [query_count for _, query_count in pairs],
        },
    )


def combine(rows: Rows, kept: np.ndarray, logits: np.ndarray) -> dict[str, np.ndarray]:
    """The sigmoid, written so that no exponential overflows."""
    return {"score": 0.5 * (1 + np.tanh(0.5 * logits)), "logit": logits}
