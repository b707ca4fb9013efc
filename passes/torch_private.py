"""Private PyTorch API that the passes lean on: one named function or class each, one test each.

The tests are in ``tests/passes/test_torch_private.py``. When a PyTorch release moves one of these, that test
says which, and this file is the only one of the passes to change.
"""

from __future__ import annotations

from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, UncapturedHigherOrderOpError


class LoudBackendError(ShortenTraceback, UncapturedHigherOrderOpError):
    """Base of exceptions that a backend may raise and that reach the user as they are.

    Dynamo treats exceptions from a backend in three places, and each wants another type:

    - ``OutputGraph._call_user_compiler`` wraps everything in ``BackendCompilerFailed``, and turns some
      fake-tensor exceptions into a graph break, but re-raises a ``ShortenTraceback``.
    - ``ConvertFrame.__call__`` falls back to eager under ``torch._dynamo.config.suppress_errors``, for every
      exception but an ``UncapturedHigherOrderOpError``. For this package eager on a slice of the sequence is a
      wrong number, so the fallback must not happen whatever that setting says.
    - ``_TorchDynamoContext`` strips Dynamo's own frames from the traceback for both types, and keeps
      ``__cause__`` only for the second.
    """

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)
        self.message = message

    def __str__(self) -> str:
        """The message as raised. Dynamo appends the user's stack, which the message already names the line of,
        and advice on debugging Dynamo to ``args`` on the way out."""
        return self.message


def is_dynamo_restart(error: BaseException) -> bool:
    """Whether `error` asks Dynamo to trace the frame once more. It is a message to Dynamo, not a failure."""
    return isinstance(error, RestartAnalysis)
