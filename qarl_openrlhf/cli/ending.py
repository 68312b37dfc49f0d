"""A command as a process: its result, its error, or the signal that ended it is the last thing it says."""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class SignalEnding:
    """Within, SIGTERM, SIGINT and SIGHUP (its terminal is closed) end a command with one line and status 128 + signal; what it holds is given back on the way.

    A second signal ends it at once. Does nothing outside of the main thread, where Python has no signals, and for a signal
    that the process ignores (nohup). ``advice``: the end of the line, asked for when it is told.
    """

    def __init__(self, command: str):
        self.command = command
        self.advice: Callable[[], str] = str
        self.received: signal.Signals | None = None
        self.before: dict = {}

    def __enter__(self) -> "SignalEnding":
        self.take()
        return self

    def take(self) -> None:
        """Put the handlers in place; again after a library has put its own there."""
        if threading.current_thread() is not threading.main_thread() or self.received:
            return
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.before.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._end)

    def _end(self, number: int, frame) -> NoReturn:
        self.received = signal.Signals(number)
        for taken in self.before:
            signal.signal(taken, signal.SIG_DFL)
        raise KeyboardInterrupt  # the one exception that Ray's waiting calls let through

    def __exit__(self, kind, error, trace) -> None:
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if self.received or handler is None else handler)
        if self.received and kind:
            with suppress(OSError):  # the terminal has gone
                sys.stdout.flush()
            with suppress(OSError):
                print(f"{_line(self.command, self.received)}{self.advice()}", file=sys.stderr, flush=True)
            raise SystemExit(128 + self.received) from None


def end_at_signals(command: str) -> None:
    """Until a :class:`SignalEnding` takes over, SIGTERM, SIGINT and SIGHUP end the process at once, with its line and status.

    For the imports of a module that is run: they take seconds, hold nothing, and turn a KeyboardInterrupt into errors of their own.
    """

    def end(number: int, frame) -> NoReturn:
        with suppress(OSError):  # the terminal has gone
            os.write(2, f"{_line(command, signal.Signals(number))}\n".encode())
        os._exit(128 + number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def _line(command: str, received: signal.Signals) -> str:
    return f"{command}: {'interrupted' if received == signal.SIGINT else 'terminated'} ({received.name})"


def own_process(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and end the process with its status, as the interpreter would, but for the taking down of native libraries.

    Triton's nanobind lists every function it still holds then, some 30 lines, and has no switch for it outside C++. What Python
    registered with atexit (worker processes, temporary files) runs first, then an error is told, then the process ends.
    vLLM tells errors only, unless VLLM_LOGGING_LEVEL says otherwise.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    status, message = 0, ""
    try:
        main()
    except SystemExit as ending:
        if isinstance(ending.code, int):
            status = ending.code
        elif ending.code is not None:
            status, message = 1, f"{ending.code}\n"
    except BaseException as error:
        status, message = (130 if isinstance(error, KeyboardInterrupt) else 1), traceback.format_exc()
    sys.stdout.flush()
    atexit._run_exitfuncs()
    sys.stderr.write(message)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # whoever read it has gone
            pass
    os._exit(status)
