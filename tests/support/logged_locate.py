"""`icl-lens` for tests of several processes: logs the prompts of every batch it computes, and can die of one.

In $LOCATE_LOG every process leaves a file named rank-pid with a JSON list of prompts a line. $LOCATE_DEATH,
"rank number", kills that rank by SIGKILL at the start of its batch of that number (from 0). $LOCATE_STOP likewise
stops it (SIGSTOP), as a machine that is gone. $LOCATE_PAUSE makes every batch so many seconds longer.
"""

import json
import os
import signal
import time
from pathlib import Path

from icl_lens.cli import main
from icl_lens.locate import locate

RANK = os.environ.get("RANK", "0")
first_pass = locate._Search.first_pass
computed = 0


def logged(search, rows, *others):
    global computed
    for name, kind in (("LOCATE_DEATH", signal.SIGKILL), ("LOCATE_STOP", signal.SIGSTOP)):
        if os.environ.get(name) == f"{RANK} {computed}":
            os.kill(os.getpid(), kind)
    time.sleep(float(os.environ.get("LOCATE_PAUSE", "0")))
    computed += 1
    with (Path(os.environ["LOCATE_LOG"]) / f"{RANK}-{os.getpid()}").open("a") as log:
        log.write(json.dumps(rows) + "\n")
    return first_pass(search, rows, *others)


if __name__ == "__main__":
    locate._Search.first_pass = logged
    main()
