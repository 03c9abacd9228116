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

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].lstrip("/")
        for kind, name, folder in self.server.repositories:
            files = {file.name: file for file in folder.iterdir() if file.is_file()}
            api = f"api/{kind}s/{name}"
            if path.startswith(f"{api}/revision/") or path == api:
                return self.answer(json.dumps({"id": name, "sha": COMMIT}).encode())
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in files.items()
            ]
            if path == f"{api}/tree/{COMMIT}":
                return self.answer(json.dumps(entries).encode())
            if path == f"{api}/paths-info/{COMMIT}":
                length = int(self.headers["Content-Length"])
                wanted = parse_qs(self.rfile.read(length).decode())["paths"]
                entries = [entry for entry in entries if entry["path"] in wanted]
                return self.answer(json.dumps(entries).encode())
            prefix = f"{'datasets/' if kind == 'dataset' else ''}{name}/resolve/"
            if path.startswith(prefix):
                file = path.removeprefix(prefix).partition("/")[2]
                if file not in files:
                    return self.answer(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
                self.server.downloaded += [file] if self.command == "GET" else []
                return self.answer(files[file].read_bytes())
            if path.startswith(f"{api}/tree/"):  # a folder, of which there is none
                return self.answer(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
        self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET  # noqa: N815

    def answer(self, body: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        etag = hashlib.sha1(body).hexdigest()
        for name, value in (
            ("Content-Length", len(body)), ("ETag", f'"{etag}"'), ("X-Repo-Commit", COMMIT),
            *headers.items(),
        ):  # fmt: skip
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


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
