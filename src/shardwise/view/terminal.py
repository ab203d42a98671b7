"""Where answers and failures go: one of two forms on stdout, progress and faults on stderr, and the exit code.

Exit codes: 0 ok, 1 our fault, 2 bad input, 3 nothing fits, 4 a check failed, 5 a needed library is missing,
74 input or output failed, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

OUR_FAULT: Final = 1
BAD_INPUT: Final = 2
NOTHING_FITS: Final = 3
CHECK_FAILED: Final = 4
LIBRARY_MISSING: Final = 5
IO_FAILED: Final = 74
INTERRUPTED: Final = 130

NARROWEST: Final = 72
"""Columns below which the tables would lose some of theirs: a narrower terminal wraps the lines itself."""


def emit(as_json: bool, data: Callable[[], dict[str, Any]], page: Callable[[int], RenderableType]) -> None:
    """Print one of the two forms of an answer; `page` is asked for with the width that it has."""
    if as_json:
        sys.stdout.write(json.dumps(data(), indent=2, allow_nan=False) + "\n")
        return
    out = console()
    out.width = max(out.width, NARROWEST)
    with out.capture() as printed:  # written by ourselves: rich takes a closed pipe for a failure of ours
        out.print(page(out.width))
    sys.stdout.writelines(f"{row.rstrip()}\n" for row in printed.get().splitlines())


def line(said: str | dict[str, Any]) -> None:
    """Print one line at once; a dict as JSON."""
    print(said if isinstance(said, str) else json.dumps(said, allow_nan=False), flush=True)


def console(stderr: bool = False) -> Console:
    """A console that prints what it is given: no markup in names, no colours guessed into numbers."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


@contextmanager
def working(what: str) -> Generator[Callable[[str], None]]:
    """A line on stderr while something takes time, where that is a terminal; call the value to say another one."""
    if not sys.stderr.isatty():
        yield _nowhere
        return
    with console(stderr=True).status(what) as status:
        yield status.update


@contextmanager
def bar() -> Generator[Callable[[int, int, str], None]]:
    """A progress bar on stdout; call the value with (done, of how many, what is said beside it). It redraws itself then
    alone, by no thread of its own, and begins with the first call: before that a process may still fork."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    said = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    shown = Progress(said, BarColumn(10), TimeRemainingColumn(), console=console(), auto_refresh=False, expand=True)
    task = shown.add_task("", start=False)

    def draw(done: int, total: int, text: str) -> None:
        if not shown.live.is_started:
            shown.start()
            shown.start_task(task)
        shown.update(task, completed=done, total=total, description=text, refresh=True)

    try:
        yield draw
    finally:
        shown.stop()


def _nowhere(said: str) -> None:
    del said


SECOND_S = 3.0
"""How long a process with nothing to add leaves the word to the one that speaks."""


@contextmanager
def guard(debug: bool, speaks: bool = True) -> Generator[None]:
    """Turn every failure into its exit code and a text that says what to do; a traceback only on request.

    `speaks` False is for a process among many that finds the same as another: of bad input it says nothing, and stays
    a moment, since a launcher ends them all as soon as one has left.

    Every error of bad input carries `faults`, a list of all that is wrong: that is how it is told from a fault of ours.
    """
    try:
        yield
        sys.stdout.flush()  # so that a closed pipe is noticed here
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        fail(INTERRUPTED, ["interrupted"])
    except BrokenPipeError:
        # The reader has left; what the interpreter flushes at its end must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(IO_FAILED) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if debug or package in ("", "shardwise"):
            _ours(error, debug)
        fail(LIBRARY_MISSING, [f"this command needs {package}, which is not installed: pip install 'shardwise[train]'"])
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        fail(IO_FAILED, [f"{named}{error.strerror or error}"])
    except Exception as error:
        faults: list[str] | None = getattr(error, "faults", None)
        if faults is None:
            _ours(error, debug)
        if not speaks:
            time.sleep(SECOND_S)
            raise typer.Exit(BAD_INPUT) from None
        fail(BAD_INPUT, list(faults))


def _ours(error: Exception, debug: bool) -> NoReturn:
    """An unexpected failure: one line that names it, and how to tell us."""
    if debug:
        raise error
    said = " ".join(str(error).split())[:300]
    hint = "this is a fault of shardwise: please report it, with what the same command prints with --debug"
    fail(OUR_FAULT, [f"{type(error).__name__}: {said}", hint])


def printable(text: str) -> str:
    """Names of files and keys come from others: none of them may send control codes to the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def fail(code: int, lines: Sequence[str]) -> NoReturn:
    """Say the lines on stderr and leave."""
    for text in lines:
        print(f"shardwise: {printable(text)}", file=sys.stderr)
    raise typer.Exit(code)
