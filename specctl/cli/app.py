"""Entry point: pick a command, import that one only, turn every failure into an exit status.

Invariants: exit 0 clean, 1 findings, 2 usage or internal fault, 130 interrupted; no traceback
without SPECCTL_DEBUG=1; stdout carries answers only. `specctl --help` and `--version` import
neither typer nor a command. Only public names of typer are used.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specctl import __version__
from specctl.cli import output
from specctl.cli.registry import BY_NAME, COMMANDS, Command

if TYPE_CHECKING:
    import typer

EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """Run the command line of this process and exit."""
    if sys.stdout is None:  # closed by the caller, who wants the exit status only
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be valid text
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    try:
        status = _dispatch(list(arguments))
        sys.stdout.flush()  # while a failure can still be said
        return status
    except KeyboardInterrupt:
        output.talk("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; flushing stdout at exit would fail again.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  (replaces a closed stream)
        return EXIT_FINDINGS
    except Exception as error:  # a fault of ours is said as one, with what to send us
        if os.environ.get("SPECCTL_DEBUG") == "1":
            raise
        return _report(error)


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("--help", "-h", "help"):
        output.answer(root_help())
        return 0
    if first == "--version":
        output.answer(f"specctl {__version__}")
        return 0
    if first not in BY_NAME:
        kind = "option" if first.startswith("-") else "command"
        known = ["--help", "--version"] if kind == "option" else list(BY_NAME)
        return _usage(f"there is no {kind} `{first}`", near=first, known=known, command=None)
    return _call(BY_NAME[first], arguments[1:])


def _call(command: Command, arguments: list[str]) -> int:
    import typer

    usage_error: type[Exception] = typer.BadParameter.__bases__[0]  # its base has no public name
    parser = build(command)
    try:
        status = parser.main(
            args=arguments, prog_name=f"specctl {command.name}", standalone_mode=False
        )
    except typer.Abort:
        raise KeyboardInterrupt from None
    except usage_error as error:
        return _usage_of(error, command)
    if status == EXIT_INTERRUPTED:
        output.talk("interrupted")
    return status if isinstance(status, int) else 0


def build(command: Command) -> Any:
    """Import a command and return its parser; the examples of the table end its help."""
    import typer
    from typer.main import get_command

    module = importlib.import_module(f"specctl.cli.commands.{command.function}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    lines = "\n".join(f"  {example}" for example in command.examples)
    app.command(name=command.name, epilog=f"\b\nExamples:\n{lines}")(
        getattr(module, command.function)
    )
    return get_command(app)


def root_help() -> str:
    """Return the text of `specctl --help`."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            "Usage: specctl COMMAND [ARGS]...",
            "",
            "Find every fact about a speculative-decoding draft and its target, check them,",
            "write them down once, and run what was written down.",
            "",
            "Commands:",
            *lines,
            "",
            "Options:",
            "  --version  Show the version",
            "  --help     Show this text; `specctl COMMAND --help` has examples",
            "",
            "Examples:",
            "  specctl inspect path/to/draft",
            "  specctl manifest path/to/target path/to/draft -o manifest.yaml",
            '  specctl generate manifest.yaml "What is a draft model?"',
        ]
    )


def _usage_of(error: Exception, command: Command) -> int:
    option = getattr(error, "option_name", None)
    context: typer.Context | None = getattr(error, "ctx", None)
    if option is not None and context is not None and hasattr(error, "possibilities"):
        known = [name for param in context.command.params for name in param.opts]
        message = f"`specctl {command.name}` has no option `{option}`"
        return _usage(message, near=option, known=[*known, "--help"], command=command)
    text: str = getattr(error, "format_message", error.__str__)().rstrip(".")
    text = text.replace(": Value error, ", ": ")  # how pydantic begins the words of a validator
    return _usage(text[:1].lower() + text[1:], near=None, known=[], command=command)


def _usage(message: str, *, near: str | None, known: list[str], command: Command | None) -> int:
    from difflib import get_close_matches

    output.talk(f"error: {message}")
    matches = get_close_matches(near, known, n=1) if near else []
    if matches:
        output.talk(f"   help: did you mean `{matches[0]}`?")
    name = f"specctl {command.name}" if command else "specctl"
    what = "options and examples" if command else "commands"
    output.talk(f"   more: `{name} --help` lists the {what}")
    return EXIT_USAGE


def _report(error: Exception) -> int:
    from specctl.contract.diagnostics import DiagnosticError

    if isinstance(error, DiagnosticError):
        for diagnostic in error.diagnostics:
            output.talk_diagnostic(diagnostic)
        return EXIT_FINDINGS
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("specctl"):
        output.talk(f"error: the Python package `{error.name}` is not installed")
        output.talk("   help: `specctl doctor` names the command that installs it")
        return EXIT_USAGE
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  (its buffer cannot be flushed)
        output.talk(f"error: the answer cannot be written: {error.strerror}")
        return EXIT_USAGE
    output.talk(f"internal fault: {type(error).__name__}: {error}")
    output.talk("   This is a defect of specctl, not of your files. Please report it with the")
    output.talk("   command line and, if there is one, the manifest; SPECCTL_DEBUG=1 adds a trace.")
    return EXIT_USAGE
