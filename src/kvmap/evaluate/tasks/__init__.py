"""Tasks by name: each is a function from options to items.

Adding one is a function and a line in `TASKS`. Names not listed here are tasks of
lm-evaluation-harness, which `evaluate.harness` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvmap.evaluate.items import Task
from kvmap.evaluate.tasks.conversations import COQA, chat, coqa, demo_conversations
from kvmap.evaluate.tasks.demo import demo
from kvmap.evaluate.tasks.needle import needle
from kvmap.evaluate.tasks.options import TaskOptions
from kvmap.evaluate.tasks.perplexity import WIKITEXT, perplexity, wikitext2
from kvmap.evaluate.tasks.rows import Source

TASKS: dict[str, Callable[[TaskOptions], Task]] = {
    "chat": chat,
    "coqa": coqa,
    "demo": demo,
    "demo_conversations": demo_conversations,
    "needle": needle,
    "text": perplexity,
    "wikitext2": wikitext2,
}

# Where the rows of those are that read some.
SOURCES: dict[str, Source] = {"coqa": COQA, "wikitext2": WIKITEXT}
CONVERSATIONS = ("chat", "coqa", "demo_conversations")
OTHERS = "tasks of the harness"
# What reads an option, where not all do.
READ_BY = {
    "lengths": ("demo", "demo_conversations", "needle", "text", "wikitext2"),
    # Diagnostics read it where no task brings contexts of its own.
    "text": ("text", OTHERS),
    "data": ("chat", "coqa", "wikitext2", OTHERS),
    "turn": CONVERSATIONS,
    "history": CONVERSATIONS,
    "alternate": CONVERSATIONS,
    "few_shot": (OTHERS,),
}


def is_read(option: str, names: Iterable[str]) -> bool:
    """Say whether some of these tasks reads an option."""
    return any((name if name in TASKS else OTHERS) in READ_BY[option] for name in names)


__all__ = ["SOURCES", "TASKS", "TaskOptions", "is_read"]
