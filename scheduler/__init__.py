"""The scheduler's room. STARTED: when this process began to import the room, in seconds of the
monotonic clock that all processes share."""

import time

STARTED = time.monotonic()
