"""The control plane's words: requests, and what an answer must be before anything believes it.

No sockets.  docs/PROTOCOL.md, "Control plane".
"""
import json
import math
import secrets
from collections import namedtuple

from .errors import LayoutMismatch, Refused
from .frame import ACTORS_MAX, PROTOCOL
from .layout import Layout

Grant = namedtuple("Grant", "run actor epoch term")
Terms = namedtuple("Terms", "layout digest max_staleness aggregate need_weights optimizer "
                   "endpoints shm")
U32 = 1 << 32


def new_nonce() -> str:
    return secrets.token_hex(16)


def request(nonce: str, window: int, host: str = None, actor: int = None, layout: Layout = None,
            initial: bool = False, challenge: str = None) -> bytes:
    """host: of this machine's boot, when memory may be shared."""
    words = {"op": "hello", "protocol": PROTOCOL, "role": "actor", "nonce": nonce,
             "lanes": ["inline"], "window": window}
    if host is not None:
        words["lanes"].append("shm")
        words["host"] = host
    if actor is not None:
        words["actor"] = actor
    if layout is not None:
        words["layout"], words["initial"] = layout.to_json(), initial
    if challenge is not None:
        words["challenge"] = challenge
    return json.dumps(words).encode()


def report(op: str, grant: Grant, counts: dict, metrics: dict) -> bytes:
    """op: "report" or "bye".  JSON has no word for what is not finite."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return json.dumps({"op": op, "role": "actor", "run": grant.run.hex(), "actor": grant.actor,
                       "epoch": grant.epoch, **counts, "metrics": finite}).encode()


def answer(data: bytes, nonce: str):
    """The answer to the hello with this nonce; None for anything else."""
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(words, dict) or words.get("op") != "hello":
        return None
    return words if words.get("nonce", nonce) == nonce else None


def challenge(words: dict):
    """The word that is to be repeated, by who is alive; None: none was asked for."""
    word = words.get("challenge")
    return word if isinstance(word, str) and len(word) <= 16 else None


def refusal(words: dict) -> tuple:
    """(exception, whether the same request may succeed soon)."""
    message, word = words.get("message"), words.get("error")
    word = word if isinstance(word, str) else "refused"
    message = message if isinstance(message, str) else f"the service refused ({word})"
    error = LayoutMismatch(message) if word == "layout" else Refused(message, word)
    return error, words.get("retry") is True


def _integer(words: dict, key: str, low: int, high: int) -> int:
    value = words.get(key)
    if type(value) is not int or not low <= value < high:
        raise ValueError(f"no sound {key!r}")
    return value


def _hexadecimal(words: dict, key: str, digits: int) -> bytes:
    text = words.get(key)
    if not isinstance(text, str) or len(text) != digits:
        raise ValueError(f"no sound {key!r}")
    return bytes.fromhex(text)


def read_grant(words: dict) -> Grant:
    """Who and when a granting answer says that we are; ValueError."""
    return Grant(_hexadecimal(words, "run", 32), _integer(words, "actor", 0, ACTORS_MAX),
                 _integer(words, "epoch", 1, U32), _integer(words, "term", 0, U32))


def reachable(endpoint: str, address: str) -> str:
    """A broker bound to every interface is where the control endpoint is."""
    for anywhere in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(anywhere):
            return f"{address.rpartition(':')[0]}:{endpoint[len(anywhere):]}"
    return endpoint


def read_offer(words: dict):
    """(lane file, board) that the answer offers; None."""
    shm = words.get("shm")
    if not isinstance(shm, dict):
        return None
    paths = shm.get("slots"), shm.get("board")
    return paths if all(isinstance(path, str) and path for path in paths) else None


def read_terms(words: dict, address: str) -> Terms:
    """The rest of the first granting answer; ValueError."""
    ends, staleness = words.get("endpoints"), words.get("max_staleness")
    if not isinstance(ends, dict) or not all(
            isinstance(ends.get(name), str) for name in ("gradients", "weights", "acks")):
        raise ValueError("no sound 'endpoints'")
    return Terms(
        layout=Layout.from_json(words.get("layout")),
        digest=int.from_bytes(_hexadecimal(words, "digest", 16), "big"),
        max_staleness=staleness if type(staleness) is int else None,
        aggregate=words["aggregate"] if type(words.get("aggregate")) is int else 1,
        need_weights=words.get("need_weights") is True,
        optimizer=str(words.get("optimizer", "")),
        endpoints={name: reachable(ends[name], address)
                   for name in ("gradients", "weights", "acks")},
        shm=read_offer(words))
