"""gradq-exporter as a process: its pages against Prometheus' own checker and the broker's own
figures, and what HTTP peers and a dead broker can do to it, which is nothing.

Run from the root of the tree, after `make`:
    /usr/bin/python3 -m pytest tests/process/test_exporter.py
The broker is a stand-in that answers what the test says, except in the runs at the end.
"""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest

from conftest import BUILD, ROOT, wait_for
from test_top import Broker, top

GRADQ = ROOT / "tools/gradq"
DASHBOARD = ROOT / "docs/grafana/gradq.json"
# As in tools/gradq-exporter.c.
CONNECTIONS_MAX = 32
ODD = 'a\\b "c"\nd{e="f"} 1 # \u00e4'
ESCAPED = 'a\\\\b \\"c\\"\\nd{e=\\"f\\"} 1 # \u00e4'
# Every field that the protocol names, so that every family is on the page.
FULL = {
    "op": "stats", "ok": True, "address": "ipc:///x", "program": "gradq-broker 0",
    "uptime_ms": 1500,
    "queue": {"depth": 5, "capacity": 256, "bytes": 640, "bytes_capacity": 1 << 28,
              "received": 12345678901, "delivered": 12345678896, "refused": 2},
    "relay": {"weights": 31, "acks": 32, "malformed": 33, "repeated": 34},
    "control_malformed": 35,
    "optimizer": {"state": "alive", "run": "ab" * 16, "name": ODD, "version": 7, "term": 3,
                  "applied": 8, "rejected": 11, "rejected_by": {"nonfinite": 10, ODD: 1},
                  "duplicates": 12, "lsn": 13, "rolled_back": 14, "malformed": 15,
                  "staleness_p50": 1, "staleness_p99": 4, "staleness_max": 6, "apply_us_p50": 12,
                  "apply_us_p99": 2500, "publish_us_p50": 21, "published": 22,
                  "checkpoint_version": 5, "parameters": 1000, "last_seen_ms": 250},
    "actors": [{"id": 0, "state": "alive", "lane": "shm", "epoch": 2, "pushed": 9,
                "acknowledged": 8, "refused": 1, "resent": 3, "received": 10, "return_mean": 21.5,
                "last_seen_ms": 12},
               {"id": 3, "state": "silent", "lane": None, "epoch": 1, "pushed": 4,
                "acknowledged": None, "refused": 0, "resent": 0, "received": 4,
                "return_mean": None, "last_seen_ms": 8000}]}
# Worked out from FULL by hand.
EXPECTED = {
    "gradq_up": 1, "gradq_optimizer_up": 1, "gradq_broker_uptime_seconds": 1.5,
    "gradq_queue_depth": 5, "gradq_queue_capacity": 256, "gradq_queue_bytes": 640,
    "gradq_queue_capacity_bytes": 268435456, "gradq_received_total": 12345678901,
    "gradq_delivered_total": 12345678896, "gradq_refused_total": 2,
    "gradq_relayed_weights_total": 31, "gradq_relayed_acks_total": 32,
    "gradq_relay_repeated_total": 34, 'gradq_malformed_total{where="control"}': 35,
    'gradq_malformed_total{where="relay"}': 33, 'gradq_malformed_total{where="optimizer"}': 15,
    "gradq_optimizer_last_seen_seconds": 0.25, "gradq_optimizer_version": 7,
    "gradq_optimizer_term": 3, "gradq_checkpoint_version": 5, "gradq_parameters": 1000,
    "gradq_applied_total": 8, "gradq_duplicates_total": 12, "gradq_published_total": 22,
    "gradq_journal_records_total": 13, "gradq_rolled_back_total": 14,
    'gradq_staleness{quantile="0.5"}': 1, 'gradq_staleness{quantile="0.99"}': 4,
    'gradq_staleness{quantile="1"}': 6, 'gradq_apply_seconds{quantile="0.5"}': 12e-6,
    'gradq_apply_seconds{quantile="0.99"}': 2.5e-3, 'gradq_publish_seconds{quantile="0.5"}': 21e-6,
    'gradq_rejected_total{reason="nonfinite"}': 10,
    f'gradq_rejected_total{{reason="{ESCAPED}"}}': 1,
    f'gradq_info{{program="gradq-broker 0",rule="{ESCAPED}",run="{"ab" * 16}"}}': 1,
    'gradq_actor_up{actor="0"}': 1, 'gradq_actor_up{actor="3"}': 0,
    'gradq_actor_epoch{actor="0"}': 2, 'gradq_actor_epoch{actor="3"}': 1,
    'gradq_actor_pushed_total{actor="0"}': 9, 'gradq_actor_pushed_total{actor="3"}': 4,
    'gradq_actor_acknowledged_total{actor="0"}': 8,
    'gradq_actor_refused_total{actor="0"}': 1, 'gradq_actor_refused_total{actor="3"}': 0,
    'gradq_actor_resent_total{actor="0"}': 3, 'gradq_actor_resent_total{actor="3"}': 0,
    'gradq_actor_received_total{actor="0"}': 10, 'gradq_actor_received_total{actor="3"}': 4,
    'gradq_actor_return_mean{actor="0"}': 21.5,
    'gradq_actor_last_seen_seconds{actor="0"}': 0.012,
    'gradq_actor_last_seen_seconds{actor="3"}': 8}


@pytest.fixture
def broker(run_dir):
    one = Broker(f"ipc://{run_dir}/control")
    yield one
    one.stop()


def url_of(process) -> tuple:
    """(host, port) that the exporter printed."""
    said = wait_for(lambda: re.match(r"http://([\d.]+):(\d+)/metrics\n", process.stdout), 60,
                    "the URL")
    return said[1], int(said[2])


def exporter(start, *words):
    return start("gradq-exporter", "--listen", "127.0.0.1:0", "--interval-ms", 50, *words)


def ask(place, path="/metrics", method="GET", timeout=60):
    """(status, headers, body) of one request."""
    connection = http.client.HTTPConnection(*place, timeout=timeout)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def samples(page: str) -> dict:
    """{series as it stands: value}; each series stands there once."""
    found = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            assert series not in found, line
            found[series] = float(value)
    return found


def page_where(place, condition, what):
    """The first page of figures for which condition(samples) holds."""
    def look():
        status, _, page = ask(place)
        assert status == 200
        return page if condition(samples(page)) else None
    return wait_for(look, 60, what)


def promtool_check(page: str):
    """Prometheus' own opinion of a page; skips where there is no promtool."""
    tool = shutil.which("promtool", path=f"{ROOT / 'build'}:{os.environ['PATH']}")
    if tool is None:
        reason = "no promtool; type tools/setup.sh test"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    answer = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, text=True,
                            timeout=120, check=False)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


# ---- the pages ----

def test_every_figure_is_on_the_page_once_with_its_value_in_base_units(broker, start):
    broker.answer = json.dumps(FULL).encode()
    place = url_of(exporter(start, "--address", broker.address))
    status, headers, page = ask(place)
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(page_where(place, lambda s: "gradq_queue_drain_seconds" in s, "a rate"))
    # Nothing is delivered, and the queue is not empty.
    assert found.pop("gradq_queue_drain_seconds") == float("inf")
    assert found == EXPECTED
    for line in page.splitlines():
        name = re.match(r"(?:# \w+ )?(\w+)", line)[1]
        assert f"# HELP {name} " in page and f"# TYPE {name} " in page


def test_promtool_accepts_the_full_page_an_empty_answer_and_a_silent_broker(broker, start):
    broker.answer = json.dumps(FULL).encode()
    place = url_of(exporter(start, "--address", broker.address))
    promtool_check(page_where(place, lambda s: "gradq_queue_drain_seconds" in s, "a rate"))
    broker.answer = b'{"ok": true, "queue": {}}'
    promtool_check(page_where(place, lambda s: "gradq_queue_depth" not in s, "the empty answer"))
    broker.answer = b'{"ok": false}'
    promtool_check(page_where(place, lambda s: s == {"gradq_up": 0}, "the refusal"))


@pytest.mark.parametrize("change", [
    {"optimizer": None, "actors": None, "relay": 5},
    {"optimizer": {"state": 7, "name": [], "version": "7", "rejected_by": {"x": None}}},
    {"actors": [None, 5, {"id": -1}, {"id": 4096}, {"id": 1.0}, {"id": "2"}, {},
                {"id": 5, "pushed": 1}, {"id": 5, "pushed": 2}]}])
def test_an_answer_with_wrong_types_or_an_id_twice_leaves_figures_out_and_harms_nothing(
        broker, start, change):
    broker.answer = json.dumps({**FULL, **change}).encode()
    place = url_of(exporter(start, "--address", broker.address))
    page = page_where(place, lambda s: s["gradq_up"] == 1, "an answer")
    found = samples(page)
    assert found["gradq_queue_depth"] == 5
    if "optimizer" in change:
        assert found["gradq_optimizer_up"] == 0 and "gradq_optimizer_version" not in found
        assert not any(series.startswith("gradq_rejected_total") for series in found)
    else:
        actors = {series for series in found if series.startswith("gradq_actor_")}
        assert actors == {'gradq_actor_up{actor="5"}', 'gradq_actor_pushed_total{actor="5"}'}
        assert found['gradq_actor_pushed_total{actor="5"}'] == 2
    promtool_check(page)


def test_stats_json_is_the_object_that_gradq_top_prints(broker, start):
    broker.answer = json.dumps(FULL).encode()
    place = url_of(exporter(start, "--address", broker.address))
    page_where(place, lambda s: s["gradq_up"] == 1, "an answer")
    status, headers, text = ask(place, "/stats.json")
    assert status == 200 and headers["Content-Type"] == "application/json"
    ours = json.loads(text)
    theirs = json.loads(top("--address", broker.address, "--once", "--json").stdout)
    for one in (ours, theirs):
        assert one.pop("time") > 0
        for rate in ("in_per_s", "out_per_s", "drain_s"):
            one.pop(rate, None)
    assert ours == theirs and ours["optimizer"]["name"] == ODD


# ---- the broker dies ----

def test_a_dead_broker_gives_up_0_and_a_new_one_up_1(run_dir, start):
    address = f"ipc://{run_dir}/control"
    process = exporter(start, "--address", address)
    place = url_of(process)
    for _ in range(2):
        page_where(place, lambda s: s == {"gradq_up": 0}, "silence")
        silent = json.loads(ask(place, "/stats.json")[2])
        assert set(silent) == {"time", "silent_s", "error"}
        assert "did not answer" in silent["error"]
        one = Broker(address)
        try:
            page_where(place, lambda s: s["gradq_up"] == 1 and s["gradq_queue_depth"] == 5, "up")
        finally:
            one.stop()
    assert process.running() and process.stderr.count("answers again") == 2


def test_the_run_directory_names_the_address_now(broker, run_dir, start):
    place = url_of(exporter(start, "--run", run_dir))
    assert samples(ask(place)[2]) == {"gradq_up": 0}
    (run_dir / "address").write_text(broker.address + "\n")
    page_where(place, lambda s: s["gradq_up"] == 1, "the broker of the run")


# ---- HTTP peers ----

def test_other_paths_are_404_other_methods_405_and_head_has_no_body(broker, start):
    place = url_of(exporter(start, "--address", broker.address))
    for path in ("/", "/metrics/", "/stats", "/../metrics", "//metrics", "/METRICS"):
        assert ask(place, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"):
        for path in ("/metrics", "/stats.json"):
            status, headers, _ = ask(place, path, method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD"), method
    status, headers, body = ask(place, "/metrics", "HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 50 and body == ""
    assert ask(place, "/metrics?x=1")[0] == 200


def test_many_scrapes_at_once_are_all_answered_and_the_broker_is_not_asked_for_them(
        broker, start):
    broker.answer = json.dumps(FULL).encode()
    begun = time.monotonic()
    place = url_of(start("gradq-exporter", "--address", broker.address,
                         "--listen", "127.0.0.1:0", "--interval-ms", 2000))
    answers = []

    def scrape():
        for _ in range(10):
            answers.append(ask(place, timeout=120))

    threads = [threading.Thread(target=scrape) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    asked = broker.asked
    assert len(answers) == 500 and {status for status, _, _ in answers} == {200}
    # However long all that took: once at the start, and then once in 2 s.
    assert asked <= 2 + (time.monotonic() - begun) / 2
    for page in {page for _, _, page in answers}:
        found = samples(page)
        found.pop("gradq_queue_drain_seconds", None)
        # On a very busy machine our stand-in may have been silent for a moment.
        assert found in (EXPECTED, {"gradq_up": 0})


def test_peers_that_never_finish_are_ended_and_nonsense_harms_nothing(broker, start):
    process = exporter(start, "--address", broker.address)
    place = url_of(process)
    for nonsense in (b"\x00" * 100000, b"GET " + b"/" * 100000, b"\xff\r\n\r\n", b"GET\r\n\r\n",
                     b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\nx",
                     b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 20000):
        with socket.create_connection(place, timeout=60) as one:
            try:
                one.sendall(nonsense)
                one.shutdown(socket.SHUT_WR)
                one.recv(100)
            except OSError:
                pass  # it hung up, as it may, before or after our last byte
    # Each sends a byte now and then, so none is idle; together they hold every connection.
    slow = [socket.create_connection(place, timeout=60) for _ in range(CONNECTIONS_MAX + 4)]
    over = threading.Event()

    def drip():
        while not over.wait(0.2):
            for one in slow:
                try:
                    one.send(b"G")
                except OSError:
                    pass
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert ask(place, timeout=120)[0] == 200
    finally:
        over.set()
        thread.join(60)
        for one in slow:
            one.close()
    assert process.running()
    assert process.stop() == 0


# ---- how it starts ----

@pytest.mark.parametrize("listen", ["", "5610", "127.0.0.1", "127.0.0.1:", ":5610", "::1:5610",
                                    "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:1x", "[]:1",
                                    "no.such.host.invalid:1"])
def test_a_wrong_place_to_listen_is_refused_with_a_sentence(start, listen):
    process = start("gradq-exporter", "--listen", listen)
    assert process.wait(60) == 2
    assert process.stderr.startswith("gradq-exporter: --listen"), process.stderr


def test_a_port_that_is_taken_is_told(broker, start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = start("gradq-exporter", "--address", broker.address,
                        "--listen", f"127.0.0.1:{other.getsockname()[1]}")
        assert process.wait(60) == 1
    assert "choose another port" in process.stderr


# ---- the dashboard ----

def test_every_name_in_the_dashboard_is_exported(broker, start):
    broker.answer = json.dumps(FULL).encode()
    place = url_of(exporter(start, "--address", broker.address))
    page = page_where(place, lambda s: "gradq_queue_drain_seconds" in s, "a rate")
    exported = set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [variable["definition"] for variable in board["templating"]["list"]
                    if "definition" in variable]
    used = {name for each in expressions for name in re.findall(r"gradq_\w+", each)}
    assert used - exported == set()
    assert {"gradq_up", "gradq_queue_depth", "gradq_queue_capacity", "gradq_received_total",
            "gradq_staleness", "gradq_optimizer_version", "gradq_actor_return_mean",
            "gradq_rejected_total"} <= used
    assert any(variable["type"] == "datasource" for variable in board["templating"]["list"])
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in board["panels"]
               for target in panel["targets"])


# ---- under the supervisor ----

def gradq(command, run, *words):
    return subprocess.run([GRADQ, command, "--run", run, "--build", BUILD, *map(str, words)],
                          capture_output=True, text=True, timeout=240, check=False,
                          stdin=subprocess.DEVNULL)


@pytest.fixture
def run(run_dir):
    yield run_dir / "run"
    assert gradq("down", run_dir / "run").returncode == 0


def rows(run):
    status = json.loads(gradq("status", run, "--json").stdout)
    return {row["name"]: row for row in status["processes"]}


def test_up_starts_it_prints_where_and_it_comes_back_there(run):
    answer = gradq("up", run, "--detach", "--actors", 1, "--no-tensorboard",
                   "--metrics-listen", "127.0.0.1:0")
    assert answer.returncode == 0, answer.stderr
    said = re.search(r"^metrics: http://([\d.]+):(\d+)/metrics$", answer.stdout, re.MULTILINE)
    assert said, answer.stdout
    assert said[0] in gradq("status", run).stdout
    assert f"metrics: {json.loads(gradq('status', run, '--json').stdout)['metrics']}" == said[0]
    place = said[1], int(said[2])
    found = samples(page_where(place, lambda s: s.get("gradq_applied_total", 0) > 0, "gradients"))
    assert found["gradq_optimizer_up"] == 1 and found['gradq_actor_up{actor="0"}'] == 1
    theirs = json.loads(top("--run", run, "--once", "--json").stdout)
    assert found["gradq_queue_capacity"] == theirs["queue"]["capacity"]
    assert found["gradq_parameters"] == theirs["optimizer"]["parameters"]
    assert found["gradq_applied_total"] <= theirs["optimizer"]["applied"]
    promtool_check(ask(place)[2])
    before = rows(run)
    os.kill(before["exporter"]["pid"], signal.SIGKILL)
    page_where(place, lambda s: s["gradq_up"] == 1, "its return")
    after = rows(run)
    assert after["exporter"]["pid"] != before["exporter"]["pid"]
    assert all(after[name]["pid"] == before[name]["pid"] for name in ("broker", "optimizer"))


def test_a_port_that_is_taken_ends_no_run(run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        answer = gradq("up", run, "--actors", 1, "--no-tensorboard", "--max-steps", 2000,
                       "--metrics-listen", f"127.0.0.1:{other.getsockname()[1]}")
    assert answer.returncode == 0, answer.stderr
    assert "done: " in answer.stdout and "metrics: " not in answer.stdout
    assert "no metrics" in answer.stderr and "choose another port" in answer.stderr


def test_it_is_off_unless_asked_for_and_resume_remembers(run):
    words = ("--actors", 0, "--detach", "--no-tensorboard")
    for more, there in (((), False), (("--metrics-listen", "127.0.0.1:0"), True),
                        (("--resume",), True), (("--resume", "--metrics-listen", "off"), False)):
        answer = gradq("up", run, *words, *more)
        assert answer.returncode == 0, answer.stderr
        assert ("metrics: http" in answer.stdout) == there
        assert ("exporter" in rows(run)) == there
        assert gradq("down", run).returncode == 0
