"""The parts of actors/python/gradq that know no sockets: checksums, frames, layouts, the window,
shared memory, and the words of the control plane."""
import fcntl
import json
import math
import os
import random
import struct
import sys
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "actors/python"))
import gradq  # noqa: E402
from gradq import crc, frame, hello, lane, lane_shm  # noqa: E402
from gradq.errors import LayoutMismatch, Refused  # noqa: E402
from gradq.layout import Layout  # noqa: E402
from gradq.window import WINDOW_MAX, Sent, Window  # noqa: E402

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
VECTOR = numpy.array([1.5, -2.0, 0.1], "<f4")
# What gq_frame_encode of src/frame.c makes of the fields below: headers of a gradient of VECTOR, as
# float32, as bf16, in slot 2 of shared memory; and of an acknowledgement.
GOLDEN = {name: bytes.fromhex(text) for name, text in {
    "f32":
        "475251310100010007000000030000000200000001000000ef26f460b80d513700112233445566778899aabb"
        "ccddeeff050000000000000029000000000000000300000000000000140000000000000015cd853dfe9c9717"
        "00000000000000000c00000000000000000000000000000000000000000000003ec4e5cef4c764a0",
    "bf16":
        "475251310100010007000000030000000200000002000000ef26f460b80d513700112233445566778899aabb"
        "ccddeeff050000000000000029000000000000000300000000000000140000000000000015cd853dfe9c9717"
        "0000000000000000060000000000000000000000000000000000000000000000f0b5dcbbe9ac6a99",
    "shm":
        "475251310100010007000000030000000200000001000100ef26f460b80d513700112233445566778899aabb"
        "ccddeeff050000000000000029000000000000000300000000000000140000000200000015cd853dfe9c9717"
        "00000000000000000c0000000000000001000000000000000000000000000000000000004a1ccee9",
    "ack":
        "475251310100040007000000030000000200000000000000ef26f460b80d513700112233445566778899aabb"
        "ccddeeff09000000000000002900000000000000000000000000000000000000000000000100000000000000"
        "1e00000000000000280000000000000000000000000000000000000000000000057ab108746e798c",
}.items()}
ACK_PAYLOAD = struct.pack("<QQQQII", 9, 6, 2, 8, 9, 0)
COMMON = {"actor": 7, "epoch": 3, "term": 2, "digest": 0x37510db860f426ef, "version": 41,
          "run": bytes(17 * i for i in range(16))}
SENT_NS = 1700000000123456789
GRADIENT = {**COMMON, "kind": frame.GRADIENT, "sequence": 5, "samples": 20, "sent": SENT_NS}


@pytest.fixture
def chance():
    print(f"SEED={SEED}")
    return random.Random(SEED)


# Checksums

@pytest.mark.parametrize("way", [crc.by_table, crc.by_numpy, crc.crc32c])
def test_crc32c_has_the_check_value_of_its_polynomial(way):
    assert way(b"123456789") == 0xE3069283
    assert way(b"") == 0
    assert way(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert way(b"\xff" * 32) == 0x62A8AB43


def test_crc32c_by_numpy_is_that_by_table_at_every_length(chance):
    for size in (*range(80), 1023, 1024, 1025, 4096, 30001):
        data = chance.randbytes(size)
        assert crc.by_numpy(data) == crc.by_table(data), size
        assert crc.crc32c(numpy.frombuffer(data, numpy.uint8)) == crc.by_table(data), size


def test_crc32c_by_isal_is_that_by_table_in_parts_as_well(chance, monkeypatch):
    """ISA-L is a package that gradq itself is built with."""
    monkeypatch.setattr(crc, "ISAL_BYTES_MAX", 1000)
    way = crc.by_isal()
    for size in (0, 1, 999, 1000, 1001, 30001):
        data = chance.randbytes(size)
        assert way(data) == way(numpy.frombuffer(data, numpy.uint8)) == crc.by_table(data), size
    assert way(numpy.ones((3, 5), "f4")) == crc.by_table(numpy.ones(15, "f4"))
    with pytest.raises(OSError):
        crc.by_isal("libnothing.so.2")


def test_crc32c_prefers_the_wheel_that_is_installed(monkeypatch):
    monkeypatch.setattr(crc, "_accelerated", lambda data: 42)
    assert crc.crc32c(b"123456789") == 42
    monkeypatch.setattr(crc, "_accelerated", None)
    assert crc.crc32c(b"123456789") == 0xE3069283


# Frames

@pytest.mark.parametrize("encoding", ["f32", "bf16"])
def test_a_gradient_has_the_bytes_that_c_makes(encoding):
    inline = lane.Inline(3, frame.ENCODINGS[encoding])
    inline.reserve()[:] = VECTOR
    data = bytes(inline.seal(**GRADIENT))
    payload = VECTOR.tobytes() if encoding == "f32" else bytes.fromhex("c03f00c0cd3d")
    assert data == GOLDEN[encoding] + payload
    head = frame.decode_header(data)
    assert (head.sequence, head.samples, head.version, head.count) == (5, 20, 41, 3)
    assert frame.payload_is_whole(head, data)


def test_a_descriptor_has_the_bytes_that_c_makes():
    head = frame.encode_header(0, encoding=frame.F32, lane=frame.SHM, slot=2, finite=1, count=3,
                               payload_bytes=12, **GRADIENT)
    assert head == GOLDEN["shm"] and frame.decode_header(head).slot == 2


def test_an_acknowledgement_of_c_is_read():
    data = GOLDEN["ack"] + ACK_PAYLOAD
    head = frame.decode_header(data)
    assert frame.payload_is_whole(head, data)
    assert (head.actor, head.epoch, head.term, head.version, head.applied) == (7, 3, 2, 41, 30)
    assert frame.decode_ack(data) == frame.Ack(9, 6, 2, 8, 9, 0)


@pytest.mark.parametrize("name", GOLDEN)
def test_no_damaged_header_is_a_frame(name, chance):
    payload = {"f32": VECTOR.tobytes(), "bf16": bytes(6), "shm": b"", "ack": ACK_PAYLOAD}[name]
    data = GOLDEN[name] + payload
    assert frame.decode_header(data) is not None
    for size in range(len(data)):
        assert frame.decode_header(data[:size]) is None, size
    assert frame.decode_header(data + b"\0") is None
    for bit in range(8 * frame.HEADER_BYTES):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert frame.decode_header(damaged) is None, bit
    for _ in range(1000):
        frame.decode_header(chance.randbytes(chance.randrange(300)))


WRONG = [{"actor": 4096}, {"lane": 2}, {"slot": 1}, {"finite": 1}, {"kind": 5}, {"encoding": 0},
         {"encoding": 3}, {"count": 4}, {"count": 0, "payload_bytes": 0}, {"payload_bytes": 8},
         {"sequence": 0}, {"samples": 0}, {"epoch": 0}, {"reserved": b"\1" + bytes(11)},
         {"protocol": 2}, {"magic": b"GRQ2"}, {"kind": frame.INIT, "encoding": frame.BF16},
         {"kind": frame.ACK}, {"count": (1 << 31) + 1, "payload_bytes": 4 * ((1 << 31) + 1)}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_no_header_whose_fields_disagree_is_a_frame(wrong):
    fields = {"encoding": frame.F32, "count": 3, "payload_bytes": 12, **GRADIENT}
    sound = frame.encode_header(0, **fields) + bytes(12)
    assert frame.decode_header(sound) is not None
    assert frame.decode_header(frame.encode_header(0, **{**fields, **wrong}) + bytes(12)) is None


def test_bf16_rounds_as_the_protocol_says():
    numbers = numpy.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F8000, 0x7F800001, 0xFF800000,
                           0x80000000, 0x00018000], "<u4").view("<f4")
    assert frame.bf16(numbers).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80,
                                            0x8000, 0x0002]


def test_a_vector_that_was_sent_cannot_be_written():
    inline = lane.Inline(3, frame.F32)
    vector = inline.reserve()
    assert inline.reserve() is vector
    inline.seal(**GRADIENT)
    inline.note_sent()
    with pytest.raises(ValueError, match="read-only"):
        vector[0] = 1
    assert inline.reserve() is not vector


# Layouts

def test_a_layout_splits_what_it_joined():
    layout = Layout({"w": (2, 3), "scalar": (), "b": [3]})
    arrays = {"b": numpy.arange(3), "w": numpy.arange(6.0).reshape(2, 3), "scalar": 9}
    vector = numpy.empty(layout.count, "<f4")
    layout.join(arrays, vector)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 9, 0, 1, 2]
    for name, array in layout.split(vector).items():
        assert (array == arrays[name]).all() and array.shape == layout.shapes[name]
    layout.join(vector[::-1], vector)
    assert vector.tolist() == [2, 1, 0, 9, 5, 4, 3, 2, 1, 0]
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert Layout({"b": (3,), "w": (2, 3), "scalar": ()}) != layout, "the order counts"


@pytest.mark.parametrize("shapes", [
    {}, {"": (1,)}, {"n" * 128: (1,)}, {"w": (0,)}, {"w": (1,) * 9}, {"w": (1 << 31, 2)},
    {3: (1,)}, {f"w{i}": () for i in range(4097)}, {"a\0b": (1,)}, {"\ud800": (1,)}, {"w": 3},
    {"w": (2.0,)}, {"w": "3"}], ids=lambda shapes: ascii(shapes)[:30])
def test_what_the_protocol_allows_no_layout_is_refused(shapes):
    with pytest.raises(LayoutMismatch):
        Layout(shapes)


@pytest.mark.parametrize("answer", [
    None, 3, "layout", [], [3], [{"name": "w"}], [{"shape": [1]}], [{"name": "w", "shape": 3}],
    [{"name": "w", "shape": ["1"]}], [{"name": "w", "shape": [1.0]}],
    [{"name": "w", "shape": [True]}], [{"name": [], "shape": [1]}],
    [{"name": "w", "shape": [1]}, {"name": "w", "shape": [2]}], {"name": "w", "shape": [1]}],
    ids=str)
def test_no_other_answer_is_a_layout(answer):
    with pytest.raises(ValueError):
        Layout.from_json(answer)


@pytest.mark.parametrize(("arrays", "said"), [
    ({"w": numpy.zeros((2, 3))}, "b is missing"),
    ({"w": numpy.zeros((3, 2)), "b": numpy.zeros(3)}, r"w has shape \(3, 2\), not \(2, 3\)"),
    ({"w": numpy.zeros((2, 3)), "b": numpy.zeros(3), "c": 0}, "c is no tensor of the model"),
    (numpy.zeros(8), r"shape \(8,\).*9 elements"), (1.0, "9 elements")], ids=str)
def test_a_gradient_of_another_shape_is_refused_with_the_name(arrays, said):
    layout = Layout({"w": (2, 3), "b": (3,)})
    with pytest.raises(LayoutMismatch, match=said):
        layout.join(arrays, numpy.empty(9, "<f4"))


@pytest.mark.parametrize("odd", [
    numpy.zeros(3, complex), numpy.array(["1", "2", "3"]), numpy.array([1.5, None, 2]),
    numpy.ma.masked_array(numpy.zeros(3), [True, False, False]),
    numpy.zeros(3, "datetime64[s]"), numpy.zeros(3, "V2")], ids=lambda odd: str(odd.dtype))
def test_what_is_no_plain_real_number_is_refused_with_the_name(odd):
    layout, vector = Layout({"weight": (3,)}), numpy.full(3, 7, "<f4")
    for arrays, name in (({"weight": odd}, "weight is"), (odd, "what came is")):
        with pytest.raises(LayoutMismatch, match=name):
            layout.join(arrays, vector)
    assert vector.tolist() == [7, 7, 7]


@pytest.mark.parametrize(("settings", "said"), [
    ({"timeout": math.nan}, "timeout nan"), ({"timeout": -1}, "timeout -1"),
    ({"timeout": None}, "timeout None"), ({"resend": math.nan}, "resend nan"),
    ({"initial": {"a": numpy.zeros(2), "b": numpy.array([1, math.inf])}}, "not finite.* in b:"),
    ({"initial": {"w": numpy.array([1e300])}}, "not finite.* in w:")], ids=str)
def test_what_a_client_cannot_begin_with_is_said_at_once(tmp_path, settings, said):
    with numpy.errstate(over="ignore"), pytest.raises(ValueError, match=said):
        gradq.Client(f"ipc://{tmp_path}/nobody", **settings)


# The window

def window(size: int = 4, given: int = 0) -> Window:
    """Time-outs without jitter."""
    one = Window(size, 1.0, uniform=lambda low, high: (low + high) / 2)
    for number in range(given):
        assert one.add(Sent(b"", (1, number)), 0.0) == number + 1
    return one


def test_the_window_is_full_at_its_size_and_open_again_when_one_is_settled():
    one = window(2, given=2)
    assert not one.room
    assert [sent.age for sent in one.settle(1, 0)] == [(1, 0)]
    assert one.room and len(one) == 1 and one.cumulative == 1


def test_no_number_is_given_out_beyond_the_map_of_an_acknowledgement():
    one = window(WINDOW_MAX, given=WINDOW_MAX)
    one.settle(0, (1 << WINDOW_MAX) - 2)  # all but the first, which is lost
    assert list(one.on_the_way) == [1] and not one.room
    one.settle(WINDOW_MAX, 0)
    assert one.room


def test_numbers_go_on_behind_one_that_waits_for_its_step():
    one = window(WINDOW_MAX, given=WINDOW_MAX)
    one.settle(0, (1 << WINDOW_MAX) - 2, 1)  # one of these came late, and waits
    assert list(one.on_the_way) == [1] and one.room
    one.add(Sent(b"", (1, 0)), 0.0)
    assert not one.room
    one.settle(0, 0, WINDOW_MAX + 2)
    assert not one.room, "of a number never given out"
    one.settle(0, 0, WINDOW_MAX)
    assert one.room and list(one.on_the_way) == [1, WINDOW_MAX + 1]


def test_settling_takes_the_cumulative_and_the_map_and_nothing_else():
    one = window(6, given=6)
    assert [sent.age[1] for sent in one.settle(1, 0b1010)] == [0, 2, 4]  # numbers 1, 3, 5
    assert list(one.on_the_way) == [2, 4, 6]
    assert one.settle(0, 0) == [], "older ones change nothing"
    assert one.cumulative == 1
    for cumulative, beyond in ((7, 0), (5, 0b10), (1 << 63, 0), (0, 1 << 63)):
        assert one.settle(cumulative, beyond) == [], "of numbers never given out"
    assert list(one.on_the_way) == [2, 4, 6] and one.cumulative == 1


def test_time_outs_double_up_to_four_times_and_the_oldest_is_first():
    one = window(2, given=2)
    assert one.due(0.99) is None
    now, pauses = 1.0, []
    sent = one.on_the_way[1]
    assert one.due(now) is sent
    for _ in range(5):
        one.note_resent(sent, now)
        pauses.append(sent.due - now)
    assert pauses == [2, 4, 4, 4, 4] and one.resent == 5
    assert one.due(now) is one.on_the_way[2]


def test_time_outs_differ_by_a_quarter_either_way():
    dues = []
    for _ in range(200):
        one = Window(1, 1.0)
        one.add(Sent(b"", (1, 0)), 0.0)
        dues.append(one.on_the_way[1].due)
    assert 0.75 <= min(dues) < 0.85 < 1.15 < max(dues) <= 1.25


def test_a_later_life_that_lacks_a_settled_number_shows():
    one = window(4, given=4)
    one.settle(1, 0b10)  # 1 and 3
    assert not one.lacks(1, 0b10) and not one.lacks(4, 0)
    assert one.lacks(0, 0b101), "the cumulative fell"
    assert one.lacks(1, 0), "3 is missing"
    assert not one.lacks(3, 0)


def test_any_order_of_losses_settles_each_gradient_once(chance):
    """A ledger beside a window, with acknowledgements lost, doubled and late."""
    one, came, cumulative, said, settled = window(8), set(), 0, [(0, 0)], []
    for turn in range(5000):
        now = float(turn)
        if one.room:
            one.add(Sent(b"", (1, one.sequence + 1)), now)
        for number in [number for number, sent in one.on_the_way.items() if sent.due <= now]:
            one.note_resent(one.on_the_way[number], now)
            if chance.random() < 0.5:
                assert number <= cumulative + 64
                came.add(number)
        while cumulative + 1 in came:
            cumulative += 1
        said.append((cumulative, sum(1 << number - cumulative - 1
                                     for number in came if number > cumulative)))
        if chance.random() < 0.5:
            settled += [sent.age[1] for sent in one.settle(*chance.choice(said[-5:]))]
        assert not one.lacks(*said[-1])
    assert len(settled) == len(set(settled)) > 1000
    assert set(settled) <= came and set(one.on_the_way) | set(settled) == set(
        range(1, one.sequence + 1))


# Shared memory

RUN, COUNT, SLOTS, DIGEST, TERM = bytes(range(16)), 5000, 3, 77, 4
GRANT = hello.Grant(RUN, 3, 9, TERM)


@pytest.fixture
def shared(tmp_path):
    """shared(lane={}, board={}) -> paths of both files as an optimizer makes them, but for those
    fields; version 7 is in block 2."""
    def make(lane: dict = None, board: dict = None) -> tuple:
        head = {"magic": b"GQF1", "layout": 1, "run": RUN, "actor": 3, "epoch": 9, "count": COUNT,
                "slots": SLOTS, "slot_bytes": 5 * 4096, **(lane or {})}
        data = bytearray(12288 + SLOTS * 5 * 4096)
        lane_shm.LANE.pack_into(data, 0, *head.values())
        struct.pack_into("<I", data, lane_shm.TERM, TERM)
        (tmp_path / "lane").write_bytes(data)
        head = {"magic": b"GQB1", "version": 1, "run": RUN, "term": TERM, "blocks": 12,
                "digest": DIGEST, "count": COUNT, "block_bytes": 5 * 4096, "at": 4096,
                **(board or {})}
        data = bytearray(4096 + 12 * 5 * 4096)
        lane_shm.BOARD.pack_into(data, 0, *head.values())
        struct.pack_into("<I", data, lane_shm.SHOWN, 2)
        struct.pack_into("<Q", data, lane_shm.VERSIONS + 8 * 2, 7)
        at = 4096 + 2 * 5 * 4096 + 128
        data[at:at + 4 * COUNT] = numpy.arange(COUNT, dtype="<f4").tobytes()
        (tmp_path / "board").write_bytes(data)
        return str(tmp_path / "lane"), str(tmp_path / "board")
    return make


def shm(paths: tuple) -> lane_shm.Shm:
    return lane_shm.Shm(paths, GRANT, DIGEST, COUNT, SLOTS - 1)


def word(path: str, at: int) -> int:
    return struct.unpack_from("<I", Path(path).read_bytes(), at)[0]


def test_weights_are_copied_from_the_block_that_is_shown_and_the_lease_is_given_back(shared):
    paths = shared()
    one = shm(paths)
    assert word(paths[0], lane_shm.ATTACHED) == 1 and one.newest() == (TERM, 7)
    age, vector = one.weights()
    assert age == (TERM, 7) and (vector == numpy.arange(COUNT)).all()
    assert word(paths[0], lane_shm.LEASE) == 0
    with open(paths[1], "r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<I", 0xFFFFFFFF), lane_shm.SHOWN)
    assert one.newest() is None and one.weights() is None
    one.close()


def test_a_lease_is_announced_before_the_block_is_read_and_begun_anew_when_it_moves(shared):
    paths = shared()
    one, leased = shm(paths), [2, 5]

    class Fence:
        """Where the optimizer may come in between."""

        def __enter__(self):
            assert word(paths[0], lane_shm.LEASE) == 1 + leased.pop(0), "announced"
            with open(paths[1], "r+b") as file:
                os.pwrite(file.fileno(), struct.pack("<I", 5), lane_shm.SHOWN)
                os.pwrite(file.fileno(), struct.pack("<Q", 8), lane_shm.VERSIONS + 8 * 5)

        def __exit__(self, *_):
            pass
    one.board._fence = Fence()
    assert one.weights()[0] == (TERM, 8) and leased == []
    one.close()


def test_slots_hold_their_numbers_and_are_used_again_when_they_are_settled(shared):
    paths = shared()
    one, sent = shm(paths), []
    for number in (1, 2):
        one.reserve()[:] = number
        sent.append(one.seal(**{**GRADIENT, "sequence": number}))
        one.note_sent()
    heads = [frame.decode_header(each) for each in sent]
    assert [head.slot for head in heads] == [0, 1] and all(head.lane == 1 for head in heads)
    holds = struct.unpack_from("<3Q", Path(paths[0]).read_bytes(), lane_shm.HOLDS)
    assert holds == (1, 2, 0)
    inline = one.to_inline(sent[1])
    head = frame.decode_header(inline)
    assert (head.lane, head.sequence, head.sent) == (0, 2, SENT_NS)
    assert frame.payload_is_whole(head, inline) and inline[128:] == numpy.full(COUNT, 2,
                                                                               "<f4").tobytes()
    one.settled(sent[0])
    assert [one.reserve() is one.reserve(), one._reserved[0]] == [True, 2]
    one.note_sent()
    one.reserve()
    assert one._reserved[0] == 0
    holds = struct.unpack_from("<3Q", Path(paths[0]).read_bytes(), lane_shm.HOLDS)
    assert holds == (0, 2, 0), "a descriptor that comes late does not match"
    one.close()


def test_an_acknowledgement_that_is_being_written_is_none(shared):
    paths = shared()
    one = shm(paths)
    assert one.ack() is None, "none was written yet"
    with open(paths[0], "r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<4Q2I2Q", 9, 6, 2, 8, 9, 3, 41, TERM),
                  lane_shm.ACK)
        assert one.ack() == ((TERM, 41), frame.Ack(9, 6, 2, 8, 9, 3))
        os.pwrite(file.fileno(), struct.pack("<I", 3), lane_shm.TURN)
        assert one.ack() is None
    one.close()


LOCKED = fcntl.LOCK_EX | fcntl.LOCK_NB


@pytest.mark.parametrize(("which", "field", "value"), [
    (which, field, value) for which, fields in {
        "lane": {"magic": b"GQF2", "layout": 2, "run": bytes(16), "actor": 4, "epoch": 8,
                 "count": COUNT + 1, "slots": 2, "slot_bytes": 4096},
        "board": {"magic": b"GQB2", "version": 2, "run": bytes(16), "term": 5, "blocks": 13,
                  "digest": 1, "count": 1, "block_bytes": 4096, "at": 0}}.items()
    for field, value in fields.items()] + [("lane", "slots", 66), ("lane", "slots", 4)], ids=str)
def test_files_of_somebody_else_are_not_taken_and_not_kept(shared, which, field, value):
    paths = shared(**{which: {field: value}})
    with pytest.raises(ValueError, match="is not"):
        shm(paths)
    with open(paths[0], "rb") as file:
        fcntl.flock(file, LOCKED)  # nobody holds it
    assert word(paths[0], lane_shm.ATTACHED) == 0


def test_a_lane_file_that_is_locked_short_or_no_file_is_not_taken(shared, tmp_path):
    paths = shared()
    with open(paths[0], "rb") as file:
        fcntl.flock(file, LOCKED)
        with pytest.raises(ValueError, match="another process's"):
            shm(paths)
    for path in paths:
        size = os.path.getsize(path)
        os.truncate(path, 5000)
        with pytest.raises(ValueError, match="no file of"):
            shm(paths)
        os.truncate(path, size)
        shared()
    os.symlink(paths[0], tmp_path / "link")
    for odd in (str(tmp_path / "link"), str(tmp_path / "nothing"), str(tmp_path)):
        with pytest.raises((OSError, ValueError)):
            shm((odd, paths[1]))
    one = shm(paths)
    one.close()
    shm(paths).close()  # close gave the lock back


# The control plane

GRANTED = {"op": "hello", "ok": True, "nonce": "n", "protocol": 1, "run": "00" * 16, "term": 1,
           "version": 0, "actor": 3, "epoch": 9, "layout": [{"name": "w", "shape": [2]}],
           "parameters": 2, "digest": "0123456789abcdef", "lane": "inline", "aggregate": 1,
           "endpoints": {"gradients": "tcp://*:1", "weights": "ipc://x", "acks": "tcp://h:3"},
           "max_staleness": None, "need_weights": True, "optimizer": "sgd"}


def test_a_grant_is_read():
    words = hello.answer(json.dumps(GRANTED).encode(), "n")
    assert hello.read_grant(words) == hello.Grant(bytes(16), 3, 9, 1)
    terms = hello.read_terms(words, "tcp://host:5600")
    assert (terms.digest, terms.need_weights, terms.max_staleness) == (0x0123456789abcdef, True,
                                                                       None)
    assert terms.endpoints == {"gradients": "tcp://host:1", "weights": "ipc://x",
                               "acks": "tcp://h:3"}


@pytest.mark.parametrize(("key", "value"), [
    (key, value) for key, values in {
        "run": [None, 3, "00" * 15, "zz" * 16], "actor": [None, -1, 4096, "3", 1.0, True],
        "epoch": [0, 1 << 32, None], "term": [-1, 1 << 32], "layout": [None, []],
        "digest": [3, "0123", "x" * 16], "endpoints": [None, {}, {"gradients": 1}],
    }.items() for value in values], ids=str)
def test_a_grant_that_makes_no_sense_is_none(key, value):
    words = {**GRANTED, key: value}
    with pytest.raises(ValueError):
        hello.read_grant(words)
        hello.read_terms(words, "tcp://host:5600")


@pytest.mark.parametrize("data", [
    b"", b"\xff\xfe", b"[]", b"3", b"{}", b'{"op": "stats"}', b'{"op": "hello", "nonce": "other"}',
    b"[" * 100_000, b"1" * 100_000, b'{"op": "hello", "nonce": 3}'],
    ids=lambda data: str(data[:20]))
def test_other_bytes_are_no_answer(data):
    assert hello.answer(data, "n") is None


def test_refusals_have_their_word_and_say_whether_to_ask_again():
    error, again = hello.refusal({"error": "full", "message": "all ids are taken", "retry": False})
    assert isinstance(error, Refused) and error.word == "full" and not again
    assert str(error) == "all ids are taken"
    error, again = hello.refusal({"error": "layout", "message": "m", "retry": True})
    assert isinstance(error, LayoutMismatch) and again
    for odd in ({}, {"error": 3, "message": [], "retry": 1}):
        error, again = hello.refusal(odd)
        assert isinstance(error, Refused) and not again


def test_requests_are_what_the_protocol_says():
    words = json.loads(hello.request("n", 2, actor=5, layout=Layout({"w": (2,)}), initial=True,
                                     challenge="c"))
    assert words == {"op": "hello", "protocol": 1, "role": "actor", "nonce": "n", "window": 2,
                     "lanes": ["inline"], "actor": 5, "layout": [{"name": "w", "shape": [2]}],
                     "initial": True, "challenge": "c"}
    metrics = {"a": 1.5, "b": math.nan, "c": math.inf}
    words = json.loads(hello.report("bye", hello.Grant(bytes(16), 3, 9, 1), {"pushed": 4}, metrics))
    assert words["metrics"] == {"a": 1.5} and words["pushed"] == 4 and words["run"] == "00" * 16


def test_nonces_differ():
    nonces = [hello.new_nonce() for _ in range(100)]
    assert len(set(nonces)) == 100
    assert all(len(nonce) == 32 and set(nonce) <= set("0123456789abcdef")
               for nonce in nonces)
