"""Hand a context from one server to another, each a process of its own.

    python examples/two_servers.py m-l.map story.txt [TOKENS]

The first has the source, the map and the target's lowest layers: it reads, maps and ships the
cache. The second has the target alone and goes on for TOKENS tokens, 1 if not given. Prints what
they hold and say, and ends with an error where one process by itself says something else.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from kvmap import CacheMap, UsageError, load
from kvmap.cache import load_mapped, save
from kvmap.errors import KvmapError
from kvmap.handoff import check_pair, finish, map_context
from kvmap.models import load_lowest, prefill, save_lowest
from kvmap.text import read_file
from kvmap.transfer import continuation, prompt_ids, transfer


def source_server(cmap: str, lowest: str, prompt: str, shipped: str) -> None:
    """Read a prompt and write the cache that is shipped."""
    mapping, layers = CacheMap.load(cmap), load_lowest(lowest)
    source = load(mapping.source.name)
    check_pair(mapping, source, layers)
    ids = prompt_ids(source.tokenizer, read_file(Path(prompt)))
    cache, _ = prefill(source, ids)
    mapped = map_context(mapping, layers, cache, ids)
    save(mapped, shipped, mapping.target, mapping.options.native_head)


def target_server(model: str, shipped: str, prompt: str, tokens: str) -> None:
    """Go on after a prompt whose cache was shipped, and print the text."""
    target = load(model)
    mapped, made_for, native_head = load_mapped(shipped)
    if made_for.digest != target.signature.digest:
        raise UsageError(f"{shipped}: is a cache of {made_for.name}; map it for {model}")
    ids = prompt_ids(target.tokenizer, read_file(Path(prompt)))
    done = finish(target, mapped, ids, native_head)
    print(continuation(target, done.cache, ids, int(tokens)))


SERVERS = {"source": source_server, "target": target_server}


def run_server(role: str, *arguments: object) -> str:
    """Run a server in a process of its own and return what it prints."""
    command = [sys.executable, __file__, role, *map(str, arguments)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(f"the {role}'s server has failed")
    return ended.stdout.strip()


def main(cmap: str, prompt: str, tokens: int) -> None:
    """Set up both servers, let them work, and compare with one process."""
    mapping = CacheMap.load(cmap)
    source, target = load(mapping.source.name), load(mapping.target.name)
    ids = prompt_ids(source.tokenizer, read_file(Path(prompt)))
    with tempfile.TemporaryDirectory() as folder:
        lowest, shipped = Path(folder, "lowest"), Path(folder, "shipped")
        save_lowest(target, mapping.options.read_layers, lowest)
        run_server("source", cmap, lowest, prompt, shipped)
        said = run_server("target", mapping.target.name, shipped, prompt, tokens)
        whole = target.model.get_memory_footprint()
        print(f"lowest layers: {lowest.stat().st_size} bytes, the whole target: {whole} bytes")
        print(f"shipped cache: {shipped.stat().st_size} bytes")
    done = transfer(mapping, source, target, ids)
    alone = continuation(target, done.handoff.cache, ids, tokens).strip()
    print(f"two servers: {said}\none process: {alone}")
    if said != alone:
        sys.exit("the two differ")


def command_line() -> None:
    """Run what is asked for: both servers, or as one of them."""
    if sys.argv[1:2] and sys.argv[1] in SERVERS:
        SERVERS[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("map")
    parser.add_argument("prompt", help="a text file")
    parser.add_argument("tokens", type=int, nargs="?", default=1)
    given = parser.parse_args()
    main(given.map, given.prompt, given.tokens)


if __name__ == "__main__":
    try:
        command_line()
    except KvmapError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
