"""Several devices share a batch: in a process of their own, as JAX counts devices only once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workers.model_server.device import LoadedModel
from workers.model_server.scheduler import Shaping
from workers.model_server.serving import SERVING, Options, Serving

ROOT = Path(__file__).parents[2]
DEVICES = 4
SEQUENCES = [tuple(range(2, 2 + length)) for length in (1, 3, 9, 20, 31, 2, 60, 64, 33)]

SCRIPT = """
import json, sys
import jax
from tests.model_server.conftest import load

def embed(model, sequences, step, used):
    def noting(compiled):
        def run(*arguments):
            vectors = compiled(*arguments)
            used.update(shard.device.id for shard in vectors.addressable_shards)
            return vectors
        return run
    device = model.device
    device._compiled = {shape: noting(compiled) for shape, compiled in device._compiled.items()}
    return device.embed([tuple(ids) for ids in sequences], step).tolist()

sequences, found = json.load(sys.stdin), {}
for name in ("bert_encoder", "decoder_score"):
    model, used = load("tiny:7", (64,), loader=name), set()
    found[name] = {
        "all": embed(model, sequences, 64, used),
        "one": embed(model, sequences[:1], 64, used),
        "used": sorted(used),
        "counts": [model.serving.counts(step) for step in model.serving.shaping.steps],
        "full": [model.serving.shaping.rows(step) for step in model.serving.shaping.steps],
        "on_each": all(
            len(leaf.sharding.device_set) == len(jax.devices()) and leaf.is_fully_replicated
            for leaf in jax.tree.leaves(model.device._parameters)
        ),
        "version": model.version,
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shared_out() -> dict[str, Any]:
    """What four devices made of the sequences."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(SEQUENCES),
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize(
    ("loader", "fixture"), [("bert_encoder", "tiny"), ("decoder_score", "decoder")]
)
def test_four_devices_compute_what_one_does(
    loader: str, fixture: str, shared_out: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    single: LoadedModel = request.getfixturevalue(fixture)
    found = shared_out[loader]

    expected = single.device.embed(SEQUENCES, 64)

    assert np.abs(np.array(found["all"]) - expected).max() <= 1e-6
    assert np.abs(np.array(found["one"]) - expected[:1]).max() <= 1e-6
    assert found["version"] == single.version


@pytest.mark.parametrize("loader", ["bert_encoder", "decoder_score"])
def test_every_device_computes_and_has_the_parameters(
    loader: str, shared_out: dict[str, Any]
) -> None:
    found = shared_out[loader]

    assert found["used"] == list(range(DEVICES))
    assert found["on_each"]
    assert all(count % DEVICES == 0 for counts in found["counts"] for count in counts)
    assert [counts[-1] for counts in found["counts"]] == found["full"]


@pytest.mark.parametrize("platform", SERVING)
@pytest.mark.parametrize("batch_tokens", [1, 100, 500, 4096])
def test_the_smallest_shape_is_the_one_that_a_short_sequence_needs(
    platform: str, batch_tokens: int
) -> None:
    serving = SERVING[platform].chosen(
        Options(batch_tokens=batch_tokens), max_tokens=256, devices=2
    )

    assert serving.smallest == (*serving.calls(1, 32), 32)
    assert serving.smallest in serving.shapes()


def test_each_device_gets_what_one_alone_would() -> None:
    one, four = (chosen(Options(), devices=devices) for devices in (1, 4))

    for step in one.shaping.steps:
        assert four.shaping.rows(step) == 4 * one.shaping.rows(step)
        assert four.counts(step) == tuple(4 * count for count in one.counts(step))
    assert four.padded_tokens(5, 32) == 256  # two rows a device, one and a quarter needed
    assert one.padded_tokens(5, 32) == 160


def test_options_replace_the_tables_figures() -> None:
    options = Options(dtype="bf16", lengths=(64, 16), batch_tokens=128, lanes=3, cached_queries=0)

    serving = chosen(options, devices=1)

    assert (serving.dtype, serving.lanes, serving.cached_queries) == ("bfloat16", 3, 0)
    assert serving.shaping == Shaping(steps=(16, 64), batch_tokens=128, fill_tokens=128)
    assert chosen(Options(), devices=1) == SERVING["cpu"]


def chosen(options: Options, *, devices: int) -> Serving:
    return SERVING["cpu"].chosen(options, max_tokens=256, devices=devices)
