"""The scheduler's room. STARTED: when this process began to import it, by the monotonic clock, which all processes share."""

import time

STARTED = time.monotonic()
