"""A small server that speaks the hub's API as huggingface_hub uses it: make a repository, commit, download by range.

It can misbehave: cut connections, serve other bytes, refuse.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class _Server(ThreadingHTTPServer):
    def handle_error(self, *arguments: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients that are killed
            super().handle_error(*arguments)


class HubServer:
    """`with HubServer() as hub:` serves at `hub.endpoint`."""

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}  # by repository: (hash, files), oldest first
        self.objects: dict[str, bytes] = {}  # large files by SHA-256
        self.requests: Counter[str] = Counter()
        self.cut_after: dict[str, list[int]] = {}  # by file: where the next downloads break off
        self.replaced: dict[str, list[bytes]] = {}  # by file: what the next downloads give instead
        self.down = False
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add_commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Files on top of those that are there; the hash of the commit."""
        history = self.commits.setdefault(repo, [])
        files = {**(history[-1][1] if history else {}), **files}
        text = json.dumps(
            [len(history), *((name, hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items()))]
        )
        history.append((hashlib.sha1(text.encode()).hexdigest(), files))
        return history[-1][0]

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        history = self.commits.get(repo, [])
        if revision == "main":
            return history[-1] if history else None
        return next((commit for commit in history if commit[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, data: Any = None, **headers: str) -> None:
        body = b"" if data is None else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # --- uploads -----------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        body, path = self._body(), unquote(urlsplit(self.path).path)
        self.hub.requests[f"POST {path}"] += 1
        if self.hub.down:
            return self._answer(503)
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            sent = json.loads(body)
            repo = f"{sent.get('organization') or 'me'}/{sent['name']}"
            known = repo in self.hub.commits
            self.hub.commits.setdefault(repo, [])
            return self._answer(409 if known else 200, {"url": f"{self.hub.endpoint}/{repo}"})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**item, "actions": {"upload": {"href": f"{self.hub.endpoint}/store/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return self._answer(
                200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json"
            )
        if "preupload" in parts:
            files = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".png")) else "regular",
                 "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            return self._answer(200, {"files": files})
        if "commit" in parts:
            return self._commit("/".join(parts[2:4]), body)
        self._answer(404)

    def _commit(self, repo: str, body: bytes) -> None:
        files = {}
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "lfsFile":
                files[item["value"]["path"]] = self.hub.objects[item["value"]["oid"]]
        commit = self.hub.add_commit(repo, files)
        url = f"{self.hub.endpoint}/{repo}/commit/{commit}"
        self._answer(200, {"success": True, "commitUrl": url, "commitOid": commit, "pullRequestUrl": None})

    def do_PUT(self) -> None:
        body = self._body()
        digest = self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != digest:
            return self._answer(400)
        self.hub.objects[digest] = body
        self._answer(200)

    # --- downloads ---------------------------------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        self._resolve()

    def do_GET(self) -> None:
        self._resolve()

    def _resolve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests[f"{self.command} {path.rpartition('/')[2]}"] += 1
        if self.hub.down:
            return self._answer(503)
        parts = path.strip("/").split("/")
        if len(parts) < 5 or parts[2] != "resolve":
            return self._answer(404)
        repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        if repo not in self.hub.commits:
            return self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        found = self.hub.find(repo, revision)
        if found is None:
            return self._answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        commit, files = found
        if name not in files:
            return self._answer(404, {"error": "no such file"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        data = files[name]
        etag = hashlib.sha256(data).hexdigest()  # of the right contents, whatever is sent
        if self.command == "GET" and self.hub.replaced.get(name):
            data = self.hub.replaced[name].pop(0)
        start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]) if "Range" in self.headers else 0
        self.send_response(206 if start else 200)
        headers = {
            "Content-Length": len(data) - start,
            "ETag": f'"{etag}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cut_after.get(name)
        if cuts:
            self.wfile.write(data[start : start + cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(data[start:])
