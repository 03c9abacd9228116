"""The `effjax` command. The commands themselves are in `app.py`; this file can do without rich
and typer, which come with the extras `train` and `plan`."""

import logging
import signal
import sys
from collections.abc import Sequence

TRAIN_EXTRA = frozenset({"rich", "typer"})
INTERRUPTED = 130  # the exit code after Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `effjax ARGV` (default: the process's arguments) and returns the exit code."""
    logging.getLogger("jax._src.xla_bridge").addFilter(_no_traceback)
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # before a command runs, or once more while one ends
        print("effjax: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if code == INTERRUPTED and argv is None:
        # Nothing is left but JAX's clean-up, where one more Ctrl-C would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _run(argv: list[str]) -> int:
    try:
        from .app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in TRAIN_EXTRA:
            raise
        if argv[:1] == ["doctor"]:
            from .doctor import show

            show(as_json="--json" in argv)
            return 0
        print(f'effjax: {missing} is missing; run pip install "effjax[train]"', file=sys.stderr)
        return 2
    try:
        app(args=argv, prog_name="effjax")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _no_traceback(record: logging.LogRecord) -> bool:
    """JAX tells of a CUDA plugin that cannot start by a traceback. The planner's cannot, without
    the libraries of a GPU: that is a line where there is a GPU, and no news elsewhere."""
    from .doctor import has_nvidia_gpu

    error = record.exc_info[1] if record.exc_info else None
    if error is None or "cuda" not in record.getMessage():
        return True
    reason = " ".join(str(error).split())
    record.msg = f"effjax: JAX does not use the GPU, {reason} See effjax doctor."
    record.args, record.exc_info = (), None
    return has_nvidia_gpu()
