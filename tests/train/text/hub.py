"""A server with the part of the Hub's API that downloads use."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PREFIXES = {"model": "", "dataset": "datasets/"}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].lstrip("/")
        content = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        wanted = parse_qs(content).get("paths")  # by default all
        for kind, name, folder in self.server.repositories:
            api, resolve = f"api/{kind}s/{name}", f"{PREFIXES[kind]}{name}/resolve/"
            files = {file.name: file for file in folder.iterdir() if file.is_file()}
            if path == api or path.startswith(f"{api}/revision/"):
                return self.answer(json.dumps({"id": name, "sha": COMMIT}).encode())
            if path in (f"{api}/tree/{COMMIT}", f"{api}/paths-info/{COMMIT}"):
                entries = [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                    for name, file in files.items()
                    if wanted is None or name in wanted
                ]
                return self.answer(json.dumps(entries).encode())
            file = path.removeprefix(resolve).partition("/")[2]
            if path.startswith(resolve) and file in files:
                self.server.downloaded += [file] if self.command == "GET" else []
                return self.answer(files[file].read_bytes())
            if path.startswith((resolve, f"{api}/tree/")):  # there are no folders
                return self.answer(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
        self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET  # noqa: N815

    def answer(self, body: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        etag = hashlib.sha1(body).hexdigest()
        sent = {"Content-Length": str(len(body)), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        for name, value in {**sent, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def use(server: Any, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Make `huggingface_hub` download from a server; it reads the environment when imported."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


@contextlib.contextmanager
def serve(*repositories: tuple[str, str, Path]) -> Iterator[Any]:
    """Serve repositories, each a kind ("model" or "dataset"), a name and a folder.

    Yields the server, whose `url` is that of the Hub and whose `downloaded` has names of files.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.repositories, server.downloaded = repositories, []  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
