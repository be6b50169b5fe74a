"""What the user asks of the launcher by signals."""

import signal
import threading


class Signals:
    """What the user's signals ask for. interrupted: to stop in order (Ctrl-C, SIGTERM, a closed
    terminal). stacks: to write the stacks of all processes to their logs (Ctrl-\\)."""

    def __init__(self) -> None:
        self.interrupted, self.stacks = threading.Event(), threading.Event()

    def listen(self) -> None:
        """Take the signals of this process. SIGHUP stays ignored where it is, as ``nohup`` wants
        it."""
        ends = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self.interrupted)
        for number, event in {**ends, signal.SIGQUIT: self.stacks}.items():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_, event=event: event.set())
