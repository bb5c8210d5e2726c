"""Print a story of the embedded world that no model has read, and a question about it.

python examples/story.py [SEED] > story.txt; the right answer goes to stderr. The question joins
two facts: tiny-l can do so, tiny-s and tiny-m cannot.
"""

import argparse
import sys

from kvmap.demo import world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("seed", type=int, nargs="?", default=0, help="another one, another story")
    document = next(world.documents("evaluation", 1, 512, parser.parse_args().seed))
    question = next(one for one in document.questions if one.kind == "two_hop")
    print(f"{document.text} {question.prompt}")
    print(f"{question.prompt} {question.answer}", file=sys.stderr)


if __name__ == "__main__":
    main()
