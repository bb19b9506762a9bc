"""supervisord with two rules added: an expected exit is never "too quick", and neither is SIGKILL.

Not on a gradient's path: the parent of every process of a run.  Must never look at gradients.

supervisord judges an exit by its code only after `startsecs`; before that it restarts whatever
the code says.  A process that refuses its configuration (exit 2 or 78) does so at once, and would
come back twenty times; an actor that finished early with exit 0 would do its work again.

Nobody kills itself with SIGKILL: it is the memory killer's, an administrator's or a test's doing
and says nothing about the program.  Counted as a failed start it would lengthen the wait before
the next one, and after `startretries` of them supervisord would give the process up.
"""

import os
import signal
import sys
import time

from supervisor import supervisord
from supervisor.options import decode_wait_status
from supervisor.process import Subprocess

_finish = Subprocess.finish


def finish(self, pid, sts):
    code, _ = decode_wait_status(sts)
    killed = os.WIFSIGNALED(sts) and os.WTERMSIG(sts) == signal.SIGKILL
    if killed or code in self.config.exitcodes:
        self.laststart = min(self.laststart, time.time() - self.config.startsecs - 1)
    return _finish(self, pid, sts)


if __name__ == "__main__":
    Subprocess.finish = finish
    supervisord.main(sys.argv[1:])
