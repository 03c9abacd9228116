"""The `effjax` command.

The commands are in `app.py`. They need rich and typer, which the extra `train` installs.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from .._extras import install_command
from ..train.errors import printable
from .errors import INTERRUPTED, ctrl_c, note_interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run `effjax ARGV` (default: the arguments of the process) and return the exit code."""
    logging.getLogger("jax._src.xla_bridge").addFilter(_shorten_cuda_error)
    logging.getLogger("absl").addFilter(_escape_names)  # of Orbax
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note_interrupt)
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
    except BaseException as error:
        # Before a command runs, or a second one while it ends; an import may raise another error.
        if not (ctrl_c or isinstance(error, KeyboardInterrupt)):
            raise
        print("effjax: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if ctrl_c and code != INTERRUPTED:  # an import or JAX lost the exception
        print("effjax: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if code == INTERRUPTED and argv is None:
        # Only JAX's cleanup is left, where another Ctrl-C would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _run(argv: list[str]) -> int:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if argv[:1] == ["doctor"]:
            from .doctor import show, validate_kernels

            if "--gpu" in argv:
                return validate_kernels(as_json="--json" in argv)
            show(as_json="--json" in argv)
            return 0
        message = f"{error.name} is missing. Run {install_command('train')}."
        print(f"effjax: {message}", file=sys.stderr)
        return 2
    from .app import run

    return run(argv)


def _escape_names(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


def _shorten_cuda_error(record: logging.LogRecord) -> bool:
    # JAX logs a traceback if a CUDA plugin cannot start. The plugin of the planner cannot, without
    # the libraries of a GPU: one line if there is a GPU, and nothing otherwise.
    from .doctor import has_nvidia_gpu

    error = record.exc_info[1] if record.exc_info else None
    if error is None or "cuda" not in record.getMessage():
        return True
    reason = " ".join(str(error).split())
    record.msg = f"effjax: JAX does not use the GPU, {reason} See effjax doctor."
    record.args, record.exc_info = (), None
    return has_nvidia_gpu()
