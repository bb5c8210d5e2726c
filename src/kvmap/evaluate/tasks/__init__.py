"""Tasks by name: each is a function from options to items.

Adding one is a function and a line in `TASKS`. Names not listed here are tasks of
lm-evaluation-harness, which `evaluate.harness` runs.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmap.evaluate.items import Task
from kvmap.evaluate.tasks.conversations import chat, coqa, demo_conversations
from kvmap.evaluate.tasks.demo import demo
from kvmap.evaluate.tasks.needle import needle
from kvmap.evaluate.tasks.options import TaskOptions
from kvmap.evaluate.tasks.perplexity import perplexity, wikitext2

TASKS: dict[str, Callable[[TaskOptions], Task]] = {
    "chat": chat,
    "coqa": coqa,
    "demo": demo,
    "demo_conversations": demo_conversations,
    "needle": needle,
    "perplexity": perplexity,
    "text": perplexity,
    "wikitext2": wikitext2,
}

__all__ = ["TASKS", "TaskOptions"]
