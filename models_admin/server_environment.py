"""What a model server is given of its agent's environment.

Keys of external models may stand there (`env:NAME`), and what a server prints is shown to everybody
who may look: so it gets what is listed here, and no name that sounds like a secret.
"""

import re
from collections.abc import Mapping
from typing import Final

_NAMES: Final = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TEMP", "TMP", "TMPDIR", "TZ"),
        *("USER", "VIRTUAL_ENV", "SYSTEMROOT"),
    }
)
_PREFIXES: Final = (
    *("AIRS_", "LC_", "LD_", "DYLD_", "PYTHON", "COVERAGE_", "XDG_"),
    *("JAX_", "JAXLIB_", "XLA_", "TF_", "FLAX_", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "OPENBLAS_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "CUDNN_", "ROCM_", "HIP_", "HSA_", "TPU_", "LIBTPU_"),
)
_OURS: Final = frozenset(
    {
        "AIRS_ADMIN_PASSWORD",
        "AIRS_API_TOKEN",
        "AIRS_SECRET_KEY",
        "DATABASE_URL",
        "REDIS_URL",
    }
)
"""What no log shows, even if a server came by it."""
_SHORTEST_SECRET: Final = 6
_SECRET: Final = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)


def of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a model server gets."""
    return {
        name: text
        for name, text in environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and not _SECRET.search(name)
    }


def secrets(environ: Mapping[str, str]) -> list[str]:
    """Return what no log may show of the agent's own secrets."""
    return [
        text for name, text in environ.items() if name in _OURS and len(text) >= _SHORTEST_SECRET
    ]
