"""What the user can put right: shown as one sentence, without a traceback.

A message says where, what was found, what was expected and what to run next.
"""


class KvmapError(Exception):
    """Stop with one sentence; the command line exits with `exit_code`."""

    exit_code = 1


class UsageError(KvmapError):
    """Wrong usage, or input that cannot be used: a bad option, file or pair of models."""

    exit_code = 2


class FloorMissed(KvmapError):
    """The work was done, but its result is below a floor of quality or speed asked for."""

    exit_code = 3
