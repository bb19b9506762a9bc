"""Nobody's bytes end a process, every refusal is counted by its reason, and whoever can be answered
is answered.  Everything goes over real sockets, from a peer that does not share the code."""
import concurrent.futures
import json
import os
import random
import signal
import socket
import struct

import numpy
import pytest
import zmq

from conftest import SANITIZED, SLOW, wait_for
from peer import (ACK, BF16, GRADIENT, GREETING, INIT, MAGIC, RAW, WEIGHTS, done, encode, events,
                  greeted, opened, ready, rss, safetensors)
from peer import service, tcp_service  # noqa: F401

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
MIB = 1 << 20
# What the allocator keeps after a burst of small messages; far below any size claimed in a header.
MEMORY_SLACK = 64 * MIB
ACTOR_GOOD = 100


def still_good(service):
    """Both processes live, and a client of the public API gets its gradients applied."""
    service.alive()
    count = done(service.client(actor=ACTOR_GOOD, elements=8, count=20, seed=SEED))
    assert count["acknowledged"] == 20, count
    assert (count["refused"], count["torn"], count["fallen"]) == (0, 0, 0), count
    service.alive()
    return service.top()


def counts(stats) -> dict:
    return {"queue": stats["queue"]["refused"], "optimizer": stats["optimizer"]["malformed"],
            "rejected": stats["optimizer"]["rejected_by"],
            "duplicates": stats["optimizer"]["duplicates"]}


# ---- frames ----

def test_frames_of_every_wrong_length_are_refused_and_counted(service):
    service.up()
    wire = service.wire()
    payload = bytes(4 * wire.elements)
    whole = encode(wire.frame(payload, sequence=1), payload)
    wrong = [whole[:length] for length in range(len(whole))]
    wrong += [whole + bytes(more) for more in range(1, 65)]
    for data in wrong:
        wire.send(data)
    assert wire.push() == 1
    assert wire.settled().version == 1
    stats = service.until(lambda s: s["optimizer"]["applied"] == 1, "the sound one")
    assert counts(stats) == {"queue": len(wrong), "optimizer": 0, "rejected": {}, "duplicates": 0}
    still_good(service)


# A header with one field wrong and a checksum that is right for it, so the checksum is not what
# finds it.  None of these can be answered: the broker cannot know for whom it is.
UNSOUND = [
    {"magic": MAGIC ^ 1}, {"magic": 0}, {"protocol": 0}, {"protocol": 2}, {"protocol": 0xffff},
    {"kind": 0}, {"kind": WEIGHTS}, {"kind": ACK}, {"kind": 5}, {"kind": 0xffff},
    {"kind": ACK, "encoding": RAW, "count": 0}, {"actor": 4096}, {"actor": 0xffffffff},
    {"epoch": 0}, {"encoding": RAW}, {"encoding": BF16}, {"encoding": 3},
    {"encoding": 0xffff}, {"lane": 1}, {"lane": 0xffff}, {"sequence": 0}, {"samples": 0},
    {"count": 0}, {"count": 7}, {"count": 9},
    {"count": 1 << 31}, {"count": (1 << 31) + 1}, {"count": (1 << 62) + 8},
    {"count": (1 << 64) - 1}, {"payload_bytes": 0}, {"payload_bytes": 31},
    {"payload_bytes": 33}, {"payload_bytes": (1 << 64) - 1},
    {"payload_bytes": (1 << 64) - 128}, {"reserved_a": 1},
    {"reserved_b": 1}, {"reserved_c": 1 << 63},
    {"count": (1 << 62) + 8, "payload_bytes": 32}, {"kind": INIT, "count": 9}]


def test_each_unsound_header_field_is_refused_and_counted(service):
    service.up()
    wire = service.wire()
    for changes in UNSOUND:
        before = service.stats()["queue"]["refused"]
        wire.push(**{"sequence": 1, **changes})
        service.until(lambda s, n=before: s["queue"]["refused"] == n + 1, f"{changes} refused")
    for crc in (0, 0xffffffff):
        wire.push(header_crc=crc, sequence=1)
    wire.push()
    assert wire.settled().version == 1
    stats = service.until(lambda s: s["optimizer"]["applied"] == 1, "the sound one")
    assert counts(stats) == {"queue": len(UNSOUND) + 2, "optimizer": 0, "rejected": {},
                             "duplicates": 0}
    still_good(service)


def test_what_names_its_sender_is_answered_with_the_reason(service):
    service.up()
    wire = service.wire()
    holes = {float("nan"): "nonfinite", float("inf"): "nonfinite", float("-inf"): "nonfinite"}
    expected, refused = {}, 0
    cases = [({"digest": 0}, None, "layout"),
             ({"digest": int(wire.grant["digest"], 16) ^ 1 << 63}, None, "layout"),
             ({}, numpy.zeros(7), "count"), ({}, numpy.zeros(9), "count"),
             ({}, numpy.zeros(1), "count"), ({"payload_crc": 0}, None, "checksum"),
             ({"payload_crc": 0xffffffff}, None, "checksum")]
    for place in (0, 3, 7):  # first, middle, last: no vector lane is left out
        for number, reason in holes.items():
            vector = numpy.ones(8)
            vector[place] = number
            cases.append(({}, vector, reason))
    for changes, vector, reason in cases:
        sequence = wire.push(vector, **changes)
        ack = wire.settled(sequence)
        refused += 1
        assert (ack.refused, ack.refused_sequence, ack.refused_reason, ack.version) == (
            refused, sequence, reason, 0), (changes, vector, ack)
        expected[reason] = expected.get(reason, 0) + 1
    wire.push(numpy.full(8, 3.0e38))  # large is not infinite
    assert wire.settled().version == 1
    stats = service.until(lambda s: s["optimizer"]["applied"] == 1, "the sound one")
    assert counts(stats)["rejected"] == expected
    assert stats["optimizer"]["rejected"] == len(cases)


def test_frames_of_another_run_an_old_epoch_or_sent_twice_change_nothing(service):
    service.up()
    old = service.wire(actor=0)
    wire = service.wire(actor=0)
    assert wire.grant["epoch"] > old.grant["epoch"]
    wire.push(run=bytes(16))
    service.until(lambda s: s["optimizer"]["malformed"] == 1, "another run's to be counted")
    old.push(numpy.ones(8))
    wire.sequence = 0
    wire.push(numpy.ones(8))
    assert wire.settled().version == 1
    for _ in range(3):
        wire.push(numpy.ones(8), sequence=1)
    service.until(lambda s: s["optimizer"]["duplicates"] == 3, "duplicates to be counted")
    socket = wire.subscribe()
    frame, vector = wire.next_weights(socket)
    assert frame.version == 1 and (vector == -1).all()


# Numbers and epochs that no sound peer uses.  The map of an acknowledgement spans 64 numbers.
IMPOSSIBLE = [{"epoch": 1 << 31}, {"epoch": (1 << 32) - 1}, {"actor": 77}, {"sequence": 65},
              {"sequence": 66}, {"sequence": 1 << 32}, {"sequence": (1 << 64) - 1}]


def test_epochs_never_granted_and_numbers_beyond_the_map_are_counted_and_change_nothing(service):
    service.up()
    wire = service.wire()
    for i, changes in enumerate([{"epoch": wire.grant["epoch"] + 1}, *IMPOSSIBLE], 1):
        wire.push(numpy.ones(8), **{"sequence": 1, **changes})
        service.until(lambda s, n=i: s["optimizer"]["malformed"] == n, f"{changes} to be counted")
    wire.push(numpy.ones(8), sequence=1)
    ack = wire.settled(1)
    assert (ack.cumulative, ack.beyond, ack.refused, ack.version) == (1, 0, 0, 1)
    stats = service.until(lambda s: s["optimizer"]["applied"] == 1, "the sound one")
    assert counts(stats)["rejected"] == {} and counts(stats)["duplicates"] == 0
    still_good(service)


def test_numbers_that_come_in_any_order_are_applied_once_and_shown_in_the_map(service):
    print(f"SEED={SEED}")
    service.up()
    wire = service.wire()
    numbers = list(range(1, 65))
    random.Random(SEED).shuffle(numbers)
    came, version = set(), 0
    for number in numbers:
        for _ in range(2):  # the second one is a duplicate
            wire.push(numpy.ones(8), sequence=number)
        came.add(number)
        version += 1
        cumulative = next(n for n in range(65) if n + 1 not in came)
        beyond = sum(1 << n - cumulative - 1 for n in came if n > cumulative)
        while True:
            ack = wire.next_ack()
            if ack.version == version:
                break
        assert (ack.cumulative, ack.beyond) == (cumulative, beyond), (sorted(came), ack)
    assert (cumulative, beyond) == (64, 0)
    service.until(lambda s: (s["optimizer"]["applied"], s["optimizer"]["duplicates"],
                             s["optimizer"]["malformed"]) == (64, 64, 0), "64, and 64 duplicates")


def test_first_weights_that_are_not_finite_or_of_another_size_start_nothing(service):
    service.up()
    wire = service.wire(hello=False)
    wire.grant = wire.ask(wire.hello_request())
    assert wire.grant["ok"] and wire.grant["need_weights"]
    wire.run = bytes.fromhex(wire.grant["run"])
    wire.gradients = wire.connect(zmq.PUSH, wire.grant["endpoints"]["gradients"])
    for vector in (numpy.full(8, numpy.nan), numpy.zeros(9), numpy.zeros(7)):
        wire.push(vector, kind=INIT, sequence=0, samples=0)
    wire.push(numpy.zeros(8), payload_crc=1, kind=INIT, sequence=0, samples=0)
    service.until(lambda s: s["queue"]["delivered"] == 4, "all to be delivered")
    assert wire.ask(wire.hello_request())["need_weights"]
    said = events(service.optimizer.stderr, "first weights refused; the run waits for others")
    assert [line["reason"] for line in said] == ["nonfinite"], "once, whoever goes on offering"
    still_good(service)


def test_multipart_messages_are_refused_whole(service):
    service.up()
    wire = service.wire()
    payload = bytes(32)
    whole = encode(wire.frame(payload, sequence=1), payload)
    for parts in ([whole, whole], [whole, b""], [b"", whole], [whole[:128], whole[128:]],
                  [whole] * 100):
        wire.send(parts)
    wire.push(numpy.ones(8))
    assert wire.settled().version == 1, "none of the parts was applied"
    service.until(lambda s: s["queue"]["refused"] == 5, "five refused")
    still_good(service)


def test_frame_above_queue_bytes_costs_its_sender_the_connection_and_nobody_else(service):
    service.up(broker=("--queue-bytes", "64K"))
    wire = service.wire()
    before = rss(service.broker.pid)
    for _ in range(5):
        payload = bytes(64 * 1024)
        wire.send(encode(wire.frame(payload, sequence=1), payload))
    stats = still_good(service)
    assert stats["queue"]["bytes"] == 0
    assert rss(service.broker.pid) - before < MEMORY_SLACK or SANITIZED


def test_layout_whose_frames_exceed_queue_bytes_is_refused_with_the_option_to_change(service):
    service.up(broker=("--queue-bytes", "4096"))
    answer = service.wire(hello=False).ask(service.wire(2000, hello=False).hello_request())
    assert answer["ok"] is False and "--queue-bytes" in answer["message"]


# ---- control ----

WRONG = [None, True, False, 0, -1, 1.5, 10**15, -2**63, "", "x", "ü" * 3000, [], [[]], [0], {},
         {"a": {}}, "ab" * 16]
FIELDS = {
    "hello": {"protocol": 1, "role": "actor", "nonce": "00" * 16, "lanes": ["inline"], "actor": 7,
              "layout": [{"name": "w", "shape": [8]}], "initial": True},
    "layout": {"nonce": "x", "from": "00"},
    "stats": {"nonce": "x"},
    "report": {"role": "actor", "run": "", "actor": 7, "epoch": 1, "pushed": 1, "acknowledged": 1,
               "refused": 0, "resent": 0, "metrics": {"return_mean": 1}},
    "bye": {"role": "actor", "run": "", "actor": 7, "epoch": 1, "pushed": 1, "metrics": {}}}


def test_a_wrong_type_in_every_field_of_every_request_is_survived(service):
    service.up()
    service.wire(actor=0)  # the run has a model
    wire = service.wire(hello=False)
    for op, fields in FIELDS.items():
        for field in (*fields, "op"):
            for wrong in WRONG:
                wire.ask({"op": op, **fields, field: wrong}, timeout=0)
    # One socket, one order: the answer to a nonce of our own is behind all of that.
    wire.control.close()
    after = service.wire(hello=False)
    answer = after.ask({"op": "hello", "protocol": 99, "nonce": "n"})
    assert answer["error"] == "invalid" and "protocol 1" in answer["message"]
    still_good(service)


LAYOUTS = [[], {}, [1], [{}], [{"name": "w"}], [{"shape": [8]}], [{"name": 1, "shape": [8]}],
           [{"name": "w", "shape": 8}], [{"name": "w", "shape": [0]}],
           [{"name": "w", "shape": [-8]}], [{"name": "w", "shape": [8.0]}],
           [{"name": "w", "shape": ["8"]}], [{"name": "", "shape": [8]}],
           [{"name": "w" * 128, "shape": [8]}], [{"name": "w", "shape": [1] * 9}],
           [{"name": "w", "shape": [2**31, 2]}], [{"name": "w", "shape": [2**62, 4]}],
           [{"name": "w", "shape": [4]}, {"name": "w", "shape": [4]}],
           [{"name": f"w{i}", "shape": [1]} for i in range(4097)],
           [{"name": "w", "shape": [9]}], [{"name": "v", "shape": [8]}],
           [{"name": "w", "shape": [2, 4]}], [{"name": "w", "shape": [8]}, {"name": "v",
                                                                           "shape": [1]}]]


def test_a_layout_that_is_malformed_or_another_is_refused_with_a_sentence(service):
    service.up()
    service.wire(actor=0)
    for layout in LAYOUTS:
        wire = service.wire(hello=False)
        answer = wire.ask(wire.hello_request(layout=layout))
        assert answer is not None, layout
        assert answer["ok"] is False and answer["error"] in ("layout", "invalid", "malformed"), (
            layout, answer)
        assert len(answer["message"]) > 20, answer
    still_good(service)


def test_bytes_that_are_no_request_are_counted_and_not_answered(service):
    service.up()
    wire = service.wire(hello=False, name=bytes(range(1, 256)))  # the longest, binary identity
    texts = [b"", b"\0", b"{", b"[]", b"1", b"null", b'"op"', b"\xff\xfe\xfd", b'{"op": "\xff"}',
             b'{"op": "stats"} trailing', b"[" * 500_000, b'{"a":' * 200_000,
             b'{"op": "stats", "op2": 1e999}', random.Random(SEED).randbytes(100_000)]
    for text in texts:
        wire.control.send(text)
    wire.control.send_multipart([b"", b'{"op": "stats"}'])  # what a REQ socket would send
    wire.control.send_multipart([b'{"op": "stats"}'] * 2)
    answer = wire.ask({"op": "stats"})
    assert answer["ok"] and answer["control_malformed"] == len(texts) + 2
    for request in ({}, {"op": 1}, {"op": "no such"}, {"op": ""}):
        assert wire.ask(request)["error"] == "invalid"
    still_good(service)


def test_control_message_above_its_bound_costs_its_sender_the_connection(service):
    service.up()
    wire = service.wire(hello=False)
    before = rss(service.broker.pid)
    for _ in range(20):
        wire.control.send(b'{"op": "stats", "x": "' + b"x" * MIB + b'"}')
    still_good(service)
    assert rss(service.broker.pid) - before < MEMORY_SLACK or SANITIZED


@pytest.mark.parametrize("metrics", [
    {"return_mean": "x" * 900_000}, {str(i): 0.5 for i in range(40_000)},
    {"y" * 500_000: 1}, {"deep": "@"}], ids=["long", "many", "name", "deep"])
def test_one_actors_report_cannot_blind_the_monitor(service, metrics):
    service.up()
    nested = "[" * 2000 + "]" * 2000  # the parser's own limit is 2048
    text = json.dumps({"op": "report", "role": "actor", "actor": 5, "epoch": 1,
                       "metrics": metrics}).replace('"@"', nested)
    wire = service.wire(hello=False)
    for actor in range(5, 8):
        wire.control.send(text.replace('"actor": 5', f'"actor": {actor}').encode())
    wire.ask({"op": "stats"})
    stats = still_good(service)
    assert any(actor["id"] == ACTOR_GOOD for actor in stats["actors"])


# ---- every endpoint ----

GARBAGE = [b"", b"\0", b"\1", b"\1" * 40, b"\0" * 64, b"GRQ1", bytes(127), bytes(128), bytes(4096)]
# For each of the six endpoints, the socket types that its own accepts.
KINDS = [("DEALER", "REQ", "ROUTER"), ("PUSH",), ("PULL",), ("XPUB",), ("XSUB", "SUB"),
         ("XSUB", "SUB")]


def test_garbage_on_every_endpoint_from_every_kind_of_socket_is_survived(service):
    print(f"SEED={SEED}")
    service.up()
    generator = random.Random(SEED)
    garbage = GARBAGE + [generator.randbytes(generator.randrange(1, 3000)) for _ in range(50)]
    # A wrong kind of socket is turned away by ZeroMQ; a right one is ours to survive.
    for endpoint, kinds in zip(service.endpoints(), KINDS):
        for kind in kinds:
            wire = service.wire(hello=False)
            if kind == "SUB":
                peer = wire.connect(zmq.SUB, endpoint)
                for data in garbage:
                    peer.setsockopt(zmq.SUBSCRIBE, data)
            elif kind != "PULL":  # one that pulls would take gradients, as an optimizer does
                manual = {"XPUB_MANUAL": 1} if kind == "XPUB" else {}
                peer = wire.connect(getattr(zmq, kind), endpoint, SNDHWM=10000, **manual)
                send_all(peer, kind, garbage)
    for endpoint in service.endpoints():
        for kind in ("PAIR", "REP", "PUSH", "PUB", "STREAM"):
            wire = service.wire(hello=False)
            wire.connect(getattr(zmq, kind), endpoint)
    service.until(lambda s: s["relay"]["malformed"] >= len(garbage), "the relay's count")
    still_good(service)


def send_unasked(peer):
    """Let an XPUB with XPUB_MANUAL send the relay whatever it has, not only what it subscribes to.
    XPUB drops what is sent before the subscription."""
    assert peer.poll(5000 * SLOW) and peer.recv()[0] == 1
    peer.setsockopt(zmq.SUBSCRIBE, b"")


def send_all(peer, kind: str, garbage: list):
    """Each alone, and then some in parts."""
    if kind == "XPUB":
        send_unasked(peer)
    for message in [[data] for data in garbage] + [garbage[:3], [b""] * 20]:
        try:
            peer.send_multipart(message, zmq.DONTWAIT)
        except zmq.ZMQError:  # REQ waits for an answer, ROUTER knows nobody, a queue is full
            continue


def test_forged_publications_are_counted_and_reach_no_client(service):
    """From somebody at the relay's inner side: unsound frames end there."""
    service.up()
    wire = service.wire()
    socket = wire.subscribe()
    wire.next_weights(socket)
    peer = wire.connect(zmq.XPUB, service.endpoints()[3], XPUB_MANUAL=1)
    send_unasked(peer)
    payload = bytes(32)
    frames = [encode(wire.frame(payload, **{"kind": WEIGHTS, "version": 9, **changes}), payload)
              for changes in ({"magic": 0}, {"count": 7}, {"lane": 1}, {"kind": GRADIENT},
                              {"kind": INIT}, {"reserved_b": 1})]
    frames.append(encode(wire.frame(payload, kind=WEIGHTS), payload, header_crc=0))
    for data in frames:
        peer.send(data)
    peer.send_multipart([encode(wire.frame(payload, kind=WEIGHTS), payload)] * 2)
    service.until(lambda s: s["relay"]["malformed"] == len(frames) + 1, "the relay's count")
    wire.push(numpy.ones(8))
    wire.settled()
    while True:
        frame, _ = wire.next_weights(socket)
        assert frame.version <= 1
        if frame.version == 1:
            break
    still_good(service)


# ---- below ZeroMQ ----

RAW_KINDS = [b"DEALER", b"PUSH", b"PULL", b"PUB", b"SUB", b"SUB"]


def raw_connections(port: int, count: int = 1) -> list:
    return [socket.create_connection(("127.0.0.1", port), timeout=10 * SLOW) for _ in range(count)]


def test_a_header_that_claims_8_gib_reserves_nothing_on_any_port(tcp_service):
    service = tcp_service
    service.up()
    before = rss(service.broker.pid)
    first = int(service.address.rsplit(":", 1)[1])
    kept = []
    for i, kind in enumerate(RAW_KINDS):
        one = greeted(first + i, kind)
        kept.append(one)
        try:
            one.sendall(b"\x02" + struct.pack(">Q", 8 << 30) + b"x" * 1000)
            one.sendall(b"y" * 100_000)
        except OSError:  # turned away already
            pass
        # ZeroMQ ends the connection rather than reserve what was claimed.
        one.settimeout(10 * SLOW)
        try:
            while one.recv(4096):
                pass
        except ConnectionError:
            pass
    still_good(service)
    if not SANITIZED:
        assert rss(service.broker.pid) - before < MEMORY_SLACK
    for one in kept:
        one.close()


def descriptors(process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


HTTP = b"GET / HTTP/1.1\r\n\r\n"


def test_raw_garbage_on_every_port_is_survived(tcp_service):
    service = tcp_service
    print(f"SEED={SEED}")
    service.up()
    generator = random.Random(SEED)
    first = int(service.address.rsplit(":", 1)[1])
    # The last three are sound handshakes of ZMTP 1.0 and 2.0.
    texts = [HTTP, b"\0" * 1000, b"\xff" * 1000, GREETING[:10], GREETING,
             GREETING + b"\x04\xff" + bytes(255), GREETING + ready(b"NOSUCH"),
             generator.randbytes(50_000), b"\1\0", b"\x03ab",
             b"\xff\0\0\0\0\0\0\0\1\x7f\1\5\0\0"]
    before, kept = descriptors(service.broker), []
    for port in range(first, first + 6):
        for text in texts:
            one, = raw_connections(port)
            kept.append(one)
            try:
                one.sendall(text)
            except OSError:
                continue
    service.alive()
    assert service.stats()["ok"]
    for one in kept:
        one.close()
    wait_for(lambda: descriptors(service.broker) <= before + 5, 30, "them to be let go")
    still_good(service)


def test_a_stray_connection_where_gradients_are_handed_out_gets_none(tcp_service):
    service = tcp_service
    service.up()
    wire = service.wire(actor=0)
    wire.push()
    wire.settled()  # so all its connections are there
    before = descriptors(service.broker)
    one, = raw_connections(int(service.address.rsplit(":", 1)[1]) + 2)
    one.sendall(HTTP)
    for _ in range(20):
        wire.push()
    service.until(lambda s: s["queue"]["delivered"] == 22, "first weights and 21 gradients")
    one.close()
    wait_for(lambda: descriptors(service.broker) <= before, 30, "it to be let go")
    wire.push()
    wire.settled()
    # This peer sends nothing twice: had one gone astray, it would be missing.
    service.until(lambda s: s["optimizer"]["applied"] == 22, "22")


SHORT_CONNECTIONS = 1000 if SANITIZED else 10_000


def test_ten_thousand_short_connections_leave_neither_memory_nor_descriptors(tcp_service):
    service = tcp_service
    service.up()
    client = opened(service.client(actor=0, elements=8, count=10**9, seed=SEED))
    service.until(lambda s: s["optimizer"]["applied"] > 100, "a client that trains")
    pid, first = service.broker.pid, int(service.address.rsplit(":", 1)[1])
    before, used = descriptors(service.broker), rss(pid)

    def come_and_go(i: int):
        kind = i // 6 % 4
        one, = raw_connections(first + i % 6)
        try:
            one.sendall((b"", GREETING[:32], GREETING, GREETING + ready(RAW_KINDS[i % 6]))[kind])
        except OSError:  # turned away already
            pass
        one.close()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in pool.map(come_and_go, range(SHORT_CONNECTIONS)):
            pass
    applied = service.stats()["optimizer"]["applied"]
    service.until(lambda s: s["optimizer"]["applied"] > applied + 100, "training to go on")
    # The relay and the queue look at least once a second, so the pipes of the gone are freed.
    wait_for(lambda: descriptors(service.broker) <= before + 5, 30, "the descriptors to be closed")
    client.signal(signal.SIGTERM)
    count = done(client)
    assert (count["status"], count["refused"], count["torn"]) == ("closed", 0, 0), count
    service.until(lambda s: s["optimizer"]["applied"] == count["pushed"], "each of them once")
    still_good(service)
    if not SANITIZED:
        assert rss(pid) - used < MEMORY_SLACK


# ---- starting ----

@pytest.mark.parametrize("words, shown", [
    (["--optimizer", "nosuch"], ["nosuch", "adam", "rmsprop", "sgd"]),
    (["--optimizer", "./nosuch.so"], ["nosuch.so"]),
    (["--optimizer", "adam", "--set", "lrr=1"], ["lrr", "lr", "beta1", "clip_norm"]),
    (["--optimizer", "adam", "--set", "beta1=2"], ["beta1"]),
    (["--optimizer", "adam", "--set", "lr=abc"], ["lr", "abc"]),
    (["--optimizer", "adam", "--set", "lr=nan"], ["lr"]),
    (["--optimizer", "adam", "--set", "epsilon=jax"], ["epsilon", "torch", "tensorflow"]),
    (["--optimizer", "adam", "--set", "lr"], ["lr"]),
    (["--address", "nowhere"], ["nowhere", "tcp://HOST:PORT"]),
    (["--address", "tcp://127.0.0.1:65535"], ["65535", "PORT"]),
    (["--address", "ipc://" + "x" * 200], ["path"]),
], ids=lambda each: None if isinstance(each, list) and "--" not in each[0] else " ".join(each)[:40])
def test_a_bad_setting_exits_78_and_names_what_is_right(start, run_dir, words, shown):
    process = start("gradq-optimizer", "--run", run_dir / "run", *words)
    assert process.wait() == 78, process.report()
    for word in shown:
        assert word in process.stderr, process.stderr


@pytest.mark.parametrize("name, shown", [("wrong_abi", "ABI"), ("wrong_size", "size"),
                                         ("no_symbol", "gq_optimizer_plugin"),
                                         ("no_apply", "apply")])
def test_a_plugin_that_does_not_fit_exits_78_and_says_why(start, build, run_dir, name, shown):
    path = build / f"tests/plugins/{name}.so"
    assert path.exists(), "make tests"
    process = start("gradq-optimizer", "--run", run_dir / "run", "--optimizer", path)
    assert process.wait() == 78, process.report()
    assert shown.lower() in process.stderr.lower(), process.stderr


def broken_files(directory) -> dict:
    good = safetensors(directory / "good", {"w": numpy.zeros(8, numpy.float32)}).read_bytes()
    return {"empty": b"", "short": good[:-1], "header only": good[:8], "long": good + b"x",
            "huge header": struct.pack("<Q", 1 << 60) + good[8:], "no json": good[:8] + b"x" * 100,
            "overlap": good.replace(b"[0, 32]", b"[8, 40]"), "nan": good[:-4] + b"\xff" * 4,
            "half": good.replace(b"F32", b"F16"), "elsewhere": None}


@pytest.mark.parametrize("kind", ["empty", "short", "header only", "long", "huge header",
                                  "no json", "overlap", "nan", "half", "elsewhere"])
def test_a_damaged_file_for_init_exits_78_with_its_name(start, run_dir, kind):
    data, path = broken_files(run_dir)[kind], run_dir / "init.safetensors"
    if data is not None:
        path.write_bytes(data)
    process = start("gradq-optimizer", "--run", run_dir / "run", "--init", path)
    assert process.wait() == 78, process.report()
    assert "init.safetensors" in process.stderr


def test_an_unreachable_broker_ends_an_actor_with_69_in_time(start, run_dir, tcp_address):
    for address in (f"ipc://{run_dir}/nobody", tcp_address):
        process = start("gradq-actor", "--address", address, "--timeout-ms", 300)
        assert process.wait(5) == 69, process.report()
        assert address in process.stderr


@pytest.mark.parametrize("program", ["broker", "optimizer", "actor", "top", "try", "bench",
                                     "replay"])
def test_an_unknown_option_exits_2_and_is_named(start, build, program):
    if not (build / f"gradq-{program}").exists():
        pytest.skip(f"gradq-{program} is not built")
    for word in ("--no-such-option", "--addres=x", "-z", "stray"):
        process = start(f"gradq-{program}", word)
        assert process.wait() == 2, process.report()
        assert word.split("=")[0].lstrip("-") in process.stderr
