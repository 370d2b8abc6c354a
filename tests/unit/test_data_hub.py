"""Sets from a hub that is a server of the test's own: pinned, resumed after a broken connection, once for all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.data.hub import fetch

COMMIT = "c" * 40
FILES = {
    "data/train-0.jsonl": b'{"problem": "1+1", "answer": "2", "images": []}\n' * 4000,
    "README.md": b"a set\n",
}
BIG = "data/train-0.jsonl"


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of a hub. cut: bytes of the big file before the connection breaks, for `breaks` times."""

    breaks = 0
    cut = 65_536
    gets: list[tuple[str, str]]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/hiyouga/geometry3k"):
            if f"/revision/{COMMIT}" in self.path or "/revision/v1" in self.path or "/tree/" in self.path:
                return self._api()
            return self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        self._file(body=True)

    def _api(self) -> None:
        if "/tree/" in self.path:
            entries = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in FILES.items()]
            return self._json(entries)
        siblings = [{"rfilename": name} for name in FILES]
        self._json({"id": "hiyouga/geometry3k", "sha": COMMIT, "siblings": siblings})

    def _json(self, body: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _file(self, *, body: bool) -> None:
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        if name not in FILES:
            return self._json({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"})
        data = FILES[name]
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        for key, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        self.server.gets.append((name, asked))
        if name == BIG and self.server.breaks:
            self.server.breaks -= 1
            self.wfile.write(data[start : start + self.server.cut])
            self.wfile.flush()
            self.connection.shutdown(2)
            return
        self.wfile.write(data[start:])


def _etag(data: bytes) -> str:
    return sha256(data).hexdigest()[:40]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(("127.0.0.1", 0), Handler)
    server.gets = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(
        "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 14
    )  # what is kept, is kept in chunks
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_set_is_fetched_once_and_stays_what_it_is(hub: Hub, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as processes:  # as many trainers of one machine
        commits = list(processes.map(lambda _: fetch("geometry3k", "train", tmp_path, "v1"), range(3)))
    assert commits == [COMMIT] * 3
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES
    assert sorted(name for name, _ in hub.gets) == sorted(FILES)
    hub.gets.clear()
    assert fetch("geometry3k", "train", tmp_path, COMMIT) == COMMIT
    assert not hub.gets
    with pytest.raises(OmnifleetError) as caught:
        fetch("geometry3k", "train", tmp_path, "v2")
    assert caught.value.reason is Reason.CONFLICT


def test_a_broken_download_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    hub.breaks = 1
    try:
        fetch("geometry3k", "train", tmp_path, "v1")
    except OmnifleetError as error:
        assert error.retryable and error.reason is Reason.UNAVAILABLE
        fetch("geometry3k", "train", tmp_path, "v1")
    assert (tmp_path / BIG).read_bytes() == FILES[BIG]
    ranges = [asked for name, asked in hub.gets if name == BIG]
    assert ranges[0] == "" and len(ranges) == 2
    assert int(ranges[1].removeprefix("bytes=").rstrip("-")) > 0


def test_unknown_sets_and_revisions_say_so(hub: Hub, tmp_path: Path) -> None:
    for name, revision in (("geometry3k", "nowhere"), ("unheard-of", "v1")):
        with pytest.raises(OmnifleetError) as caught:
            fetch(name, "train", tmp_path / name, revision)
        assert caught.value.reason is Reason.NOT_FOUND
