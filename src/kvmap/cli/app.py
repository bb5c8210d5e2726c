"""The `kvmap` command: its subcommands, its exit codes, and how it fails.

Exit codes: 0 done; 1 error; 2 wrong usage or incompatible input; 3 a floor missed;
130 stopped by Ctrl-C. An error is one sentence; `KVMAP_DEBUG=1` shows the traceback.
"""

import os
import sys
import warnings
from importlib import import_module
from typing import Annotated

import typer

import kvmap
from kvmap.cli.options import examples
from kvmap.cli.output import complain
from kvmap.errors import KvmapError

# In the order in which they are used; each names its module in this package.
COMMANDS = {
    "collect": "collect",
    "select-layers": "select_layers",
    "fit": "fit",
    "compose": "compose",
    "lowest": "lowest",
    "transfer": "transfer",
    "eval": "evaluate",
    "report": "report",
    "bench": "bench",
    "show": "show",
    "plan": "plan",
    "models": "models",
}

# How Python, torch on a device and torch on a CPU say so.
NO_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory")

app = typer.Typer(
    name="kvmap",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _name, _module in COMMANDS.items():
    _command = import_module(f"kvmap.cli.{_module}")
    app.command(_name, epilog=examples(*_command.EXAMPLES))(_command.run)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvmap {kvmap.__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "kvmap fit tiny-m tiny-l -o m-l.map",
        "kvmap transfer m-l.map --prompt-file notes.txt --generate 32",
    )
)
def _kvmap(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print kvmap's version."
        ),
    ] = False,
) -> None:
    """Map one language model's KV cache onto another's, so that it need not read again.

    Exit codes: 0 done, 1 error, 2 wrong usage or incompatible input, 3 a floor missed,
    130 stopped. KVMAP_DEBUG=1 shows tracebacks.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run a command line and exit with its code."""
    debug = os.environ.get("KVMAP_DEBUG", "") not in ("", "0")
    _open_streams()
    _silence_libraries(debug)
    code = _run(arguments, debug)
    try:
        sys.stdout.flush()
    except OSError as error:
        # Let nothing complain once more when Python closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0 and not isinstance(error, BrokenPipeError):  # whose reader has gone
            complain(f"the output: could not be read or written ({error.strerror})")
            code = 1
    sys.exit(code)


def _open_streams() -> None:
    """Give every stream that the caller has closed a place to go; print what it cannot spell."""
    # In this order each takes its own number, which no file that is opened later shall have.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(arguments: list[str] | None, debug: bool) -> int:
    stdout = sys.stdout
    try:
        app(arguments, prog_name="kvmap")
    except SystemExit as stop:
        if sys.stdout is not stdout:  # put away, for its reader has gone
            return 0
        return stop.code if isinstance(stop.code, int) else 0
    except KvmapError as error:
        return _fail(str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        where, reason = error.filename or "the output", error.strerror or type(error).__name__
        return _fail(f"{where}: could not be read or written ({reason})", 1, debug)
    except Exception as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        if any(name in found for name in NO_MEMORY):
            return _fail("there is not enough memory; --dry-run says what is needed", 1, debug)
        return _fail(f"unexpected {found}; run it with KVMAP_DEBUG=1 for the traceback", 1, debug)
    return 0


def _fail(sentence: str, code: int, debug: bool) -> int:
    if debug:
        raise
    complain(sentence)
    return code


def _silence_libraries(debug: bool) -> None:
    """Keep other libraries' bars and warnings out of the way of what kvmap itself says."""
    if debug:
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
