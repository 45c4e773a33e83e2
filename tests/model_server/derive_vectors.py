"""Derives `vectors.json` once, by an implementation that shares nothing with the model server.

    python -m tests.model_server.derive_vectors <directory with model.safetensors and vocab.txt>

Plain numpy in double precision, its own safetensors reader, its own WordPiece over `vocab.txt`. Run
again only when the texts below change; the digest in the file says which weights it is about.
"""

import hashlib
import json
import math
import struct
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MAX_TOKENS = 256
HEADS = 12
DIMENSIONS_KEPT = 16
VECTORS = Path(__file__).with_name("vectors.json")

TEXTS = [
    "",
    "what is the boiling point of water at high altitude",
    "At 3,000 m above sea level water boils at about 90 °C, because the air pressure is lower.",
    "Crème brûlée, Ångström & naïve façade: 東京は日本の首都です。 Ünïcödé 🙂 test\u200bword",
    "Boiling is a change of state. " * 60,  # over-long: cut to 256 tokens
    "x" * 120 + " https://example.org/a?b=c&d=%20e (one word is too long to be cut into pieces)",
    "short",
]


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All float32 tensors of a file, as doubles."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = np.frombuffer(raw[begin:end], "<f4").astype(np.float64)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def words(text: str) -> Iterator[str]:
    """Lower-case words without accents; punctuation and CJK characters stand alone."""
    word = ""
    for char in unicodedata.normalize("NFD", spaced(text).lower()):
        if unicodedata.category(char) == "Mn":
            continue
        alone = is_punctuation(char)
        if char.isspace() or alone:
            if word:
                yield word
            word = ""
        if alone:
            yield char
        elif not char.isspace():
            word += char
    if word:
        yield word


def spaced(text: str) -> str:
    """Without control characters, and with blanks around CJK ideographs."""
    kept = []
    for char in text:
        if char in "\t\n\r":
            kept.append(" ")
        elif char not in "\0\ufffd" and not unicodedata.category(char).startswith("C"):
            kept.append(f" {char} " if is_ideograph(char) else char)
    return "".join(kept)


def is_ideograph(char: str) -> bool:
    """What BERT spaces out: the CJK blocks, not kana or hangul."""
    blocks = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF), (0x20000, 0x2FA1F)]
    return any(first <= ord(char) <= last for first, last in blocks)


def is_punctuation(char: str) -> bool:
    """ASCII that is neither letter, digit nor blank, and Unicode's class P."""
    ascii_mark = 33 <= ord(char) <= 126 and not char.isalnum()
    return ascii_mark or unicodedata.category(char).startswith("P")


def pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    """Longest match first; a word that cannot be cut, or of over 100 characters, is unknown."""
    if len(word) > 100:
        return [vocabulary["[UNK]"]]
    found, begin = [], 0
    while begin < len(word):
        for end in range(len(word), begin, -1):
            piece = ("##" if begin else "") + word[begin:end]
            if piece in vocabulary:
                found.append(vocabulary[piece])
                begin = end
                break
        else:
            return [vocabulary["[UNK]"]]
    return found


def token_ids(text: str, vocabulary: dict[str, int]) -> list[int]:
    """All tokens of a text, uncut, between [CLS] and [SEP]."""
    inner = [number for word in words(text) for number in pieces(word, vocabulary)]
    return [vocabulary["[CLS]"], *inner, vocabulary["[SEP]"]]


def normalised(x: np.ndarray, tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Layer norm over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    result: np.ndarray = scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
    return result


def linear(x: np.ndarray, tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """x W^T + b."""
    result: np.ndarray = x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
    return result


def sentence_vector(ids: list[int], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The unit vector of one unpadded sequence."""
    erf = np.vectorize(math.erf)
    x = (
        tensors["embeddings.word_embeddings.weight"][ids]
        + tensors["embeddings.position_embeddings.weight"][: len(ids)]
        + tensors["embeddings.token_type_embeddings.weight"][0]
    )
    x = normalised(x, tensors, "embeddings.LayerNorm")
    layer = 0
    while f"encoder.layer.{layer}.output.dense.weight" in tensors:
        prefix = f"encoder.layer.{layer}"
        q, k, v = (
            np.split(linear(x, tensors, f"{prefix}.attention.self.{part}"), HEADS, axis=1)
            for part in ("query", "key", "value")
        )
        mixed = []
        for head in range(HEADS):
            logits = q[head] @ k[head].T / math.sqrt(q[head].shape[1])
            weights = np.exp(logits - logits.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ v[head])
        attended = linear(np.hstack(mixed), tensors, f"{prefix}.attention.output.dense")
        x = normalised(x + attended, tensors, f"{prefix}.attention.output.LayerNorm")
        inner = linear(x, tensors, f"{prefix}.intermediate.dense")
        inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
        x = x + linear(inner, tensors, f"{prefix}.output.dense")
        x = normalised(x, tensors, f"{prefix}.output.LayerNorm")
        layer += 1
    mean = x.mean(0)
    vector: np.ndarray = mean / np.linalg.norm(mean)
    return vector


def derive(directory: Path) -> dict[str, object]:
    """What the tests compare with."""
    tensors = read_safetensors(directory / "model.safetensors")
    lines = (directory / "vocab.txt").read_text(encoding="utf-8").split("\n")
    vocabulary = {piece: number for number, piece in enumerate(lines) if piece}
    ids = [token_ids(text, vocabulary) for text in TEXTS]
    cut = [i if len(i) <= MAX_TOKENS else [*i[: MAX_TOKENS - 1], i[-1]] for i in ids]
    vectors = np.array([sentence_vector(i, tensors) for i in cut])
    return {
        "sha256": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "texts": TEXTS,
        "tokens": [len(i) for i in ids],
        "head": vectors[:, :DIMENSIONS_KEPT].tolist(),
        "l1": np.abs(vectors).sum(1).tolist(),
        "pair_scores": (vectors @ vectors.T).tolist(),
    }


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(derive(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
