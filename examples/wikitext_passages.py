"""Cut WikiText-2's articles that an evaluation does not read into passages to calibrate on.

    python examples/wikitext_passages.py pair/target wikitext-2-raw-v1/test.jsonl > passages.jsonl

`kvmap eval --tasks wikitext2 --length 1024 --limit 12` reads the first 12,288 tokens of the joined
rows. Passages are of the articles after the one in which these end, so nothing of what is measured
is fitted on. Each is of whole paragraphs, 516 tokens or more. With --beside, rows of another text
are shuffled in.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

from transformers import AutoTokenizer

HEADING = re.compile(r" = [^=].*[^=] = ?\n?")


def articles(rows: list[str]) -> list[list[str]]:
    """Return the rows of each article; what comes before the first heading is one too."""
    found: list[list[str]] = [[]]
    for row in rows:
        if HEADING.fullmatch(row):
            found.append([])
        found[-1].append(row)
    return [article for article in found if article]


def passages(article: list[str], least: int, count) -> list[str]:
    """Return an article's passages of at least so many tokens; a shorter rest is left out."""
    found, current = [], []
    for part in "\n\n".join(filter(str.strip, article)).split("\n\n"):
        current.append(part)
        if sum(count("\n\n" + part) for part in current) >= least:
            found.append("\n\n".join(current))
            current = []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a folder with the tokenizer")
    parser.add_argument("rows", type=Path, help="WikiText-2's rows, a JSON line each")
    parser.add_argument("--skip", type=int, default=12288, help="tokens that are evaluated on")
    parser.add_argument("--tokens", type=int, default=516, help="of a passage, at least")
    parser.add_argument("--beside", type=Path, help="JSON lines with a column `text`")
    parser.add_argument("--rows-beside", type=int, default=0, help="how many of these")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    read, found = 0, []
    for article in articles(texts(given.rows)):
        if read > given.skip:
            found += passages(article, given.tokens, count)
        read += count("\n\n".join(article))
    found += texts(given.beside)[: given.rows_beside] if given.beside else []
    random.Random(0).shuffle(found)
    sys.stdout.writelines(json.dumps({"text": text}) + "\n" for text in found)


def texts(path: Path) -> list[str]:
    """Return the column `text` of a file of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


if __name__ == "__main__":
    main()
