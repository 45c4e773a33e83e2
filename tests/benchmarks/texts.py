"""Request rows of our own making: seeded, so that a run can be repeated, 0.6 to 1 KB each."""

import random

import orjson

_SYLLABLES = [
    "ba",
    "be",
    "bi",
    "bo",
    "ca",
    "ce",
    "co",
    "da",
    "de",
    "di",
    "do",
    "fa",
    "fe",
    "fi",
    "ga",
    "go",
    "ha",
    "he",
    "hi",
    "la",
    "le",
    "li",
    "lo",
    "ma",
    "me",
    "mi",
    "mo",
    "na",
    "ne",
    "ni",
    "no",
    "pa",
    "pe",
    "pi",
    "po",
    "ra",
    "re",
    "ri",
    "ro",
    "sa",
    "se",
    "si",
    "so",
    "ta",
    "te",
    "ti",
    "to",
    "va",
    "ve",
    "vi",
    "vo",
]


def _vocabulary(chance: random.Random, count: int) -> list[str]:
    return ["".join(chance.choices(_SYLLABLES, k=chance.randint(1, 4))) for _ in range(count)]


def bodies(count: int, *, seed: int, prefix: str) -> bytes:
    """Return NDJSON of `count` rows, all different, ten results a query, test and base."""
    chance = random.Random(seed)
    words = _vocabulary(chance, 4_000)
    sentences = [" ".join(chance.choices(words, k=chance.randint(6, 14))) for _ in range(5_000)]
    lines = []
    for i in range(count):
        lines.append(
            orjson.dumps(
                {
                    "request_id": f"{prefix}-{i}",
                    "query_id": f"{prefix}-q{i // 10}",
                    "query_text": f"{sentences[i // 10 % len(sentences)]} {prefix} {i // 10}",
                    "result_id": f"{prefix}-d{i}",
                    "url": f"https://example.org/{prefix}/{i}",
                    "title": f"{chance.choice(sentences)}",
                    "text": f"{i} " + ". ".join(chance.choices(sentences, k=chance.randint(6, 10))),
                    "side": "test" if i % 2 else "base",
                }
            )
        )
    return b"\n".join(lines) + b"\n"
