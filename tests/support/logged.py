"""`python -m logged …` runs `icl-lens`, logs every chunk that it computes, and can be killed at a
given chunk.

Every process writes the names of its chunks, one per line, to a file $LOGGED/rank-pid, except those
of the task check. $LOGGED_DEATH="rank n" kills that rank by SIGKILL at the start of its nth chunk
(from 0). Checks are kept in $LOGGED-checks instead of the user's cache.
"""

import os
import signal
from pathlib import Path

from icl_lens.cli import main, stored_checks
from icl_lens.runs.stream import ChunkStream, chunk_name

computed = 0


def logging(chunks):
    def logged_each(self, kind, numbers, compute, **options):
        def logged(number):
            global computed
            rank = os.environ.get("RANK", "0")
            if os.environ.get("LOGGED_DEATH") == f"{rank} {computed}":
                os.kill(os.getpid(), signal.SIGKILL)
            computed += 1
            with (Path(os.environ["LOGGED"]) / f"{rank}-{os.getpid()}").open("a") as log:
                log.write(chunk_name(kind, number) + "\n")
            return compute(number)

        return chunks(self, kind, numbers, compute if kind == "check" else logged, **options)

    return logged_each


if __name__ == "__main__":
    ChunkStream.chunks = logging(ChunkStream.chunks)
    stored_checks.checks_folder = lambda: Path(f"{os.environ['LOGGED']}-checks")
    main()
