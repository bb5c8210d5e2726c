"""`kvmap models`: the names that commands take for checkpoints."""

from kvmap.cli import options
from kvmap.cli.output import Output, table

EXAMPLES = ("kvmap models", "kvmap models --json")


def run(as_json: options.Json = False) -> None:
    """List the model names known."""
    from kvmap import demo, names

    known = [{"name": name, "location": "in this package"} for name in demo.MODELS]
    known += [{"name": name, "location": where} for name, (where, _) in names.KNOWN.items()]
    rows = [(entry["name"], entry["location"]) for entry in known]
    Output(as_json).document({"models": known}, lambda: table(("name", "checkpoint"), rows))
