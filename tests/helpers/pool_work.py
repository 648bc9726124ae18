"""What worker processes do in the tests of `parity.pool`."""

import os
import signal
import time


def work(item: str) -> str:
    if item == "raises":
        raise ValueError("no such thing")
    if item == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "hangs":
        time.sleep(600)
    return item.upper()
