"""`python -m logged icl_lens …`: the program, which logs every chunk it computes.

In $LOGGED every process leaves a file named rank-pid with a JSON list of the chunks of a piece of work a line.
$LOGGED_DEATH, "rank number", kills that rank by SIGKILL at the start of its piece of that number (from 0).
$LOGGED_REFUSE, "rank name", makes that rank raise InputError for chunks whose name begins so.
$LOGGED_PAUSE makes every piece so many seconds longer.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from icl_lens.errors import InputError
from icl_lens.locate import runner

RANK = os.environ.get("RANK", "0")
computed = 0


def logging(each):
    def logged_each(self, work, compute):
        def logged(number, names):
            global computed
            if os.environ.get("LOGGED_DEATH") == f"{RANK} {computed}":
                os.kill(os.getpid(), signal.SIGKILL)
            refusing, _, refused = os.environ.get("LOGGED_REFUSE", "").partition(" ")
            if refusing == RANK and names[0].startswith(refused):
                raise InputError(f"refused by rank {RANK}")
            time.sleep(float(os.environ.get("LOGGED_PAUSE", "0")))
            computed += 1
            with (Path(os.environ["LOGGED"]) / f"{RANK}-{os.getpid()}").open("a") as log:
                log.write(json.dumps(list(names)) + "\n")
            return compute(number, names)

        return each(self, work, logged)

    return logged_each


if __name__ == "__main__":
    runner.Runner.compute_all = logging(runner.Runner.compute_all)
    sys.argv.pop(1)
    from icl_lens.cli import main

    main()
