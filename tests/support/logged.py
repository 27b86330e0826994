"""`python -m logged …` runs `icl-lens`, logs every chunk that it computes, and can be killed at a given chunk.

Every process writes the names of its chunks, one per line, to a file $LOGGED/rank-pid; the pilot batch is not logged.
$LOGGED_DEATH="rank n" kills that rank by SIGKILL at the start of its nth chunk (from 0).
"""

import os
import signal
from pathlib import Path

from icl_lens.cli import main
from icl_lens.locate.stream import ChunkStream, chunk_name

RANK = os.environ.get("RANK", "0")
computed = 0


def logging(each):
    def logged_each(self, kind, numbers, compute, **options):
        def logged(number):
            global computed
            if os.environ.get("LOGGED_DEATH") == f"{RANK} {computed}":
                os.kill(os.getpid(), signal.SIGKILL)
            computed += 1
            with (Path(os.environ["LOGGED"]) / f"{RANK}-{os.getpid()}").open("a") as log:
                log.write(chunk_name(kind, number) + "\n")
            return compute(number)

        return each(self, kind, numbers, logged, **options)

    return logged_each


if __name__ == "__main__":
    ChunkStream.chunks = logging(ChunkStream.chunks)
    main()
