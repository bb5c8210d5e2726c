"""The world's words: every token the demo models can read or say.

Each class of answer (names, foods, jobs, ...) is disjoint from every other and
from the words of the connecting prose, so a wrong answer can never be right by
accident. No word stands for two things.
"""

from __future__ import annotations

SPECIAL = ("<unk>", "<pad>", "<bos>", "<eos>")

MEN = ("tom", "ben", "sam", "leo", "max", "jack", "paul", "hugo", "adam", "finn", "carl", "owen")
WOMEN = (
    "mia",
    "ann",
    "eva",
    "lucy",
    "nora",
    "ruth",
    "clara",
    "jane",
    "ella",
    "rosa",
    "ida",
    "vera",
)
NAMES = MEN + WOMEN
FOODS = (
    "tea", "milk", "bread", "soup", "rice", "cake", "fish", "corn",
    "honey", "cheese", "plums", "nuts", "beans", "jam", "eggs", "pears",
)  # fmt: skip
JOBS = (
    "baker", "doctor", "farmer", "painter", "sailor", "teacher", "miner", "tailor",
    "singer", "driver", "judge", "guard", "clerk", "pilot", "cook", "smith",
)  # fmt: skip
THINGS = (
    "silk", "wool", "coal", "salt", "gold", "iron", "glass", "paper", "wood", "clay",
    "oil", "wax", "lace", "linen", "amber", "ivory", "copper", "brass", "pearls", "rubies",
)  # fmt: skip
PLACES = (
    "ashore", "uphill", "inland", "abroad", "north", "south", "east", "west",
    "indoors", "downtown", "upstairs", "home", "underground", "overseas", "offshore", "upstream",
)  # fmt: skip
COLORS = (
    "red", "blue", "green", "yellow", "black", "white", "brown", "pink",
    "gray", "purple", "orange", "golden",
)  # fmt: skip
NUMBERS = (
    "one", "two", "three", "four", "five", "six",
    "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
TIMES = ("dawn", "noon", "dusk", "night")

CLASSES = {
    "name": NAMES,
    "food": FOODS,
    "job": JOBS,
    "thing": THINGS,
    "place": PLACES,
    "color": COLORS,
    "number": NUMBERS,
}

GRAMMAR = (
    "here", "is", "a", "story", ".", "the", "of", "at", "to", "and", "so",
    "they", "serve", "people", "call", "friends", "gave", "banks", "pay", "coins",
    "artists", "paint", "roads", "lead", "return", "merchants", "hand", "hands",
    "who", "what", "gets", "works", "as", "owns", "owner", "looks", "now", "holds",
    "most", "least", "him", "her",
)  # fmt: skip

ADJECTIVES = (
    "small", "old", "quiet", "soft", "long", "cold", "warm", "gentle", "bright", "slow",
    "narrow", "empty", "heavy", "distant",
)  # fmt: skip
NOUNS = (
    "wind", "river", "road", "hill", "cloud", "field", "stone", "rain", "light", "shadow",
    "meadow", "bird", "leaf", "valley", "fence", "pond", "path", "snow", "tree", "sky",
)  # fmt: skip
VERBS = (
    "moved", "rested", "waited", "shone", "turned", "drifted", "lay", "stood", "faded", "wandered",
)  # fmt: skip
PREPOSITIONS = ("over", "under", "beside", "behind", "near", "along")
ADVERBS = ("slowly", "again", "softly", "still", "alone", "together")
LINKS = ("while", "because", "until", "before", "after")
PROSE = ADJECTIVES + NOUNS + VERBS + PREPOSITIONS + ADVERBS + LINKS


def vocabulary() -> tuple[str, ...]:
    """List every token in the order of its id."""
    classes = tuple(word for members in CLASSES.values() for word in members)
    return SPECIAL + GRAMMAR + TIMES + classes + PROSE
