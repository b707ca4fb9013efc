"""What the test harness raises. A refusal by the compiler is re-raised as its own class instead."""

from __future__ import annotations

from zeco_compile.kernels.errors import ZecoError


class HarnessError(ZecoError):
    """The harness was asked for something it cannot do, or a rank did not do its part."""


class RankFailed(HarnessError):
    """A rank raised something that is not a ZecoError; the message holds its traceback."""


class RankDied(RankFailed):
    """The process of a rank ended in the middle of an example."""


class RankTimedOut(RankFailed):
    """A rank did not answer in time; the message holds the traceback of what it was doing."""


class NotEquivalent(HarnessError, AssertionError):
    """The compiled, sharded run gave something else than the unsharded eager run."""


class NotRefused(HarnessError, AssertionError):
    """A model that should have been refused ran, or some rank failed in another way."""


class RemoteTraceback(Exception):
    """Carries the text of a traceback from another process, as the cause of the exception re-raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text
