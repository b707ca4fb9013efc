"""Debug dumps: the graph before and after every pass, and the report, as files and in PyTorch's trace.

With ``debug_dir`` (or ``ZECO_DEBUG``) set, one folder per rank and graph::

    <debug_dir>/rank0/graph0/00_user_graph.py         as Dynamo captured it
                             01_after_recognize.py    and so on, one per pass
                             report.json, report.md
                             error.txt                if the compilation was refused or failed

The same texts go into the structured trace of ``TORCH_TRACE``, where tlparse shows them, and a line on each
file to the logger ``zeco_compile.debug``. Contract: an unusable folder is an error before the first pass;
once compiling, nothing here raises, since a dump must not end a compilation (a full disk is logged as an
error). Each file is complete on disk before the next pass starts, so a crash leaves everything up to it.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import fx

from zeco_compile.errors import DebugFolderUnusable
from zeco_compile.passes.report import Report
from zeco_compile.passes.torch_private import is_dynamo_restart
from zeco_compile.settings import Settings
from zeco_compile.torch_private import trace_artifact

logger = logging.getLogger(__name__)

_OUR_FILES = re.compile(r"\d\d_\w+\.py|report\.json|report\.md|error\.txt")


class DebugDump:
    """Writes what happens to one graph on one rank. Prints nothing if neither a folder nor a trace wants it.

    Raises `DebugFolderUnusable` on construction if the folder cannot be made or written to. Files that an
    earlier run left for the same rank and graph are removed, so that a folder never mixes two runs.
    """

    def __init__(self, settings: Settings, rank: int, graph_index: int) -> None:
        self.rank = rank
        self.graph_index = graph_index
        self.folder: Path | None = None
        self._graphs = 0
        if settings.debug_dir is not None:
            self.folder = settings.debug_dir / f"rank{rank}" / f"graph{graph_index}"
            _prepare(self.folder)

    def graph(self, name: str, gm: fx.GraphModule) -> None:
        """Keeps the graph as it is now, as ``NN_name.py`` with NN counting up from 00."""
        file_name = f"{self._graphs:02d}_{_file_part(name)}.py"
        self._graphs += 1
        self._keep(file_name, "string", lambda: self._readable(name, gm))

    def report(self, report: Report) -> None:
        """Keeps the report; called again, it replaces what was kept before."""
        self._keep("report.json", "json", lambda: json.dumps(report.to_dict(), indent=2) + "\n")
        self._keep("report.md", "string", report.to_markdown)

    @contextmanager
    def compiling(self, report: Report, gm: fx.GraphModule) -> Iterator[None]:
        """Around all passes over `gm`: keeps the report at the end, whether they succeed or raise.

        When they raise, the half-changed graph (``NN_when_it_failed.py``) and the error's text and traceback
        (``error.txt``) are kept as well, and the exception goes on. A request to Dynamo to trace again is no
        failure, and leaves only the graphs.
        """
        try:
            yield
        except BaseException as error:
            if not is_dynamo_restart(error):
                report.error = f"{type(error).__name__}: {error}".rstrip()
                text = f"{report.error}\n\n{''.join(traceback.format_exception(error))}"
                self.graph("when_it_failed", gm)
                self._keep("error.txt", "string", lambda: text)
                self.report(report)
            raise
        self.report(report)

    def _readable(self, name: str, gm: fx.GraphModule) -> str:
        code = gm.print_readable(print_output=False, include_stride=True, include_device=True)
        heading = f"# {name.replace('_', ' ')}: graph {self.graph_index} on rank {self.rank}"
        return f"{heading}\n{code.rstrip()}\n"

    def _keep(self, file_name: str, encoding: Literal["string", "json"], make: Callable[[], str]) -> None:
        made: list[str] = []

        def text() -> str:
            if not made:
                made.append(_text_or_why_not(file_name, make))
            return made[0]

        trace_artifact(f"zeco_graph{self.graph_index}_{file_name}", encoding, text)
        if self.folder is None:
            return
        path = self.folder / file_name
        try:
            path.write_text(text(), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            logger.error("could not write %s: %s; the compilation goes on without it", path, error)
        else:
            logger.debug("wrote %s", path)


def _text_or_why_not(file_name: str, make: Callable[[], str]) -> str:
    """The text of a file; when making it raises (a graph that a pass left broken), the traceback instead."""
    try:
        return make()
    except Exception as error:
        logger.error("could not print %s: %s: %s", file_name, type(error).__name__, error)
        comment = traceback.format_exc().rstrip().replace("\n", "\n# ")
        return f"# This could not be printed:\n# {comment}\n"


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _OUR_FILES.fullmatch(path.name):
                path.unlink()
        # Permission bits do not tell whether a write will succeed (read-only mounts, quotas): so write.
        probe = folder / ".writable"
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        raise DebugFolderUnusable(folder, error) from error


def _file_part(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "graph"
