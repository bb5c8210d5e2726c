"""Print a story of the embedded world that no model has read, and a question about it.

python examples/story.py [SEED] > story.txt; the right answer goes to stderr.
"""

import sys

from kvmap.demo import world


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    document = next(world.documents("evaluation", 1, 512, seed))
    question = document.questions[0]
    print(f"{document.text} {question.prompt}")
    print(f"{question.prompt} {question.answer}", file=sys.stderr)


if __name__ == "__main__":
    main()
