"""What a client raises.  Each message says what happened and what to do about it.

    Error
      Unreachable     no broker answers at the address
      Timeout         something did not come in time (also a TimeoutError)
      LayoutMismatch  the model here is not the run's, or a gradient is not of the model's shape
      Refused         the service refused a request for good; .word says why to a program
      Fenced          another process has taken this actor's id over: this one has to end
      RunReplaced     another run has taken the address over: open a new client
      Closed          the client is closed, or belongs to another process (after a fork)
"""


class Error(Exception):
    """Of any kind below."""


class Unreachable(Error, ConnectionError):
    pass


class Timeout(Error, TimeoutError):
    pass


class LayoutMismatch(Error, ValueError):
    pass


class Refused(Error):
    def __init__(self, message: str, word: str = "refused"):
        super().__init__(message)
        self.word = word


class Fenced(Error):
    pass


class RunReplaced(Error):
    pass


class Closed(Error):
    pass
