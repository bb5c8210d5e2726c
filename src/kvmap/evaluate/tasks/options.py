"""What a user can ask of a task, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATED = 100


@dataclass(frozen=True)
class TaskOptions:
    """Options all tasks read what they need from.

    Attributes:
        tokenizer: The pair's; both models share it.
        limit: Largest number of questions, chunks or turns; None takes all there are, and
            GENERATED of a task that is generated and has no end.
        lengths: Context lengths in tokens; a task with one natural length takes the first,
            and its own default where there is none.
        seed: Of what is generated.
        data: Folder or file with local rows in hub columns; None reads the hub.
        text: Name or path of the text that the task `text` reads.
        turn: Turn, from 1, at which a conversation is handed over.
        history: What conversations take earlier turns to have answered: "own" or "gold".
    """

    tokenizer: Any
    limit: int | None = 100
    lengths: tuple[int, ...] = ()
    seed: int = 0
    data: Path | None = None
    text: str = "demo"
    turn: int = 1
    history: str = "own"

    @property
    def generated(self) -> int:
        """Number of questions of a task that is generated."""
        return GENERATED if self.limit is None else self.limit
