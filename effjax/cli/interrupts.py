"""Ctrl-C during a run."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, Self

from .errors import INTERRUPTED, CommandError, note_interrupt, report

PATIENCE = 2.0  # seconds for the main thread to end the run


class Interrupts:
    """A context in which the first Ctrl-C asks a run to stop, and a second one ends it.

    Before the first step there is nothing to save, and the first one ends the run. After the last
    step it is an exception, which leaves time to finish the last checkpoint.

    Python runs signal handlers in the main thread only, and not while JAX compiles or waits for a
    device; two signals then become one. A second thread therefore reads the signals from a socket,
    and ends the process if the main thread does not.

    Args:
        announce: Called with a line for the user after the first Ctrl-C.
        describe_end: Returns the message of a run that Ctrl-C ends without saving it.
        forward: Called by the main thread after the first Ctrl-C.
    """

    def __init__(
        self,
        announce: Callable[[str], None],
        describe_end: Callable[[], str],
        forward: Callable[[], None] = lambda: None,
    ):
        self.announce, self.describe_end, self.forward = announce, describe_end, forward
        self.state: Literal["starting", "training", "ending"] = "starting"  # set by the run
        self.received = 0  # by the main thread
        self._pressed = 0  # by the second thread
        self._left = threading.Event()

    def __enter__(self) -> Self:
        self._handler = signal.getsignal(signal.SIGINT)
        if self._handles_ctrl_c:
            signal.signal(signal.SIGINT, self._receive)
            self._unraisable_hook, sys.unraisablehook = sys.unraisablehook, self._report_lost
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            number = self._writer.fileno()
            self._other_writer = signal.set_wakeup_fd(number, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._handles_ctrl_c:
            signal.set_wakeup_fd(self._other_writer)
            signal.signal(signal.SIGINT, self._handler)
            sys.unraisablehook = self._unraisable_hook
            self._writer.close()
            self._thread.join()
            self._reader.close()

    @property
    def _handles_ctrl_c(self) -> bool:
        return self._handler in (signal.default_int_handler, note_interrupt)

    def _receive(self, *_: Any) -> None:
        self.received += 1
        if self.state != "training" or max(self.received, self._pressed) > 1:
            raise KeyboardInterrupt
        self.forward()

    def _report_lost(self, lost: Any) -> None:
        # Python would print a traceback of a Ctrl-C that is lost. `_watch` ends the run instead.
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            self._unraisable_hook(lost)

    def _watch(self) -> None:
        while number := self._reader.recv(1):
            if number[0] != signal.SIGINT:
                continue
            self._pressed += 1
            if self._pressed == 1 and self.state != "starting":
                what = "stopping after this step" if self.state == "training" else "stopping"
                self.announce(f"{what}; press Ctrl-C again to end now")
            # JAX calls Python while it compiles, and loses an exception that is raised there.
            elif not self._left.wait(PATIENCE):
                try:
                    if sys.stdout.isatty():
                        print("\x1b[?25h", end="", flush=True)  # the cursor, which the bar hides
                    report(CommandError(self.describe_end()))
                finally:
                    os._exit(INTERRUPTED)
