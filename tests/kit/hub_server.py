"""A server on this machine that speaks the part of the Hugging Face Hub's HTTP that uploads and downloads use."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_" + "a" * 34


class HubServer(ThreadingHTTPServer):
    """Repositories in memory: `files` by repository and path, and the `commits` in their order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits: list[tuple[str, str, str]] = []
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.is_down = False
        self.may_store = threading.Event()  # cleared, it holds back the objects that are put
        self.may_store.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        if self.server.is_down:
            return self._answer({"error": "down for maintenance"}, 503)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and not path.startswith("/objects/"):
            return self._answer({"error": "Invalid username or password."}, 401)
        for method, pattern, answer in _ROUTES:
            if self.command == method and (found := re.fullmatch(pattern, path)):
                return answer(self, body, *found.groups())
        return self._answer({"error": f"no route for {self.command} {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815 - the base calls them so

    def create_repo(self, body: bytes) -> None:
        values = json.loads(body)
        name = "/".join(filter(None, (values.get("organization") or "me", values["name"])))
        if name in self.server.files:
            return self._answer({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
        self.server.files[name] = {".gitattributes": b""}
        if values.get("private") or values.get("visibility") == "private":  # by the release of the client
            self.server.private.add(name)
        return self._answer({"url": f"{self.server.url}/{name}", "name": name})

    def repo_info(self, body: bytes, repo: str, revision: str | None = None) -> None:
        files = self.server.files.get(repo)
        if files is None:
            return self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        siblings = [{"rfilename": name} for name in files]
        sha = f"{len(self.server.commits):040x}"
        return self._answer(
            {"id": repo, "sha": sha, "private": repo in self.server.private, "siblings": siblings, "tags": []}
        )

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        files = self.server.files[repo]
        self._answer(
            [{"type": "file", "path": name, "size": len(each), "oid": _sha1(each)} for name, each in files.items()]
        )

    def validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        front = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        assert front is not None
        assert isinstance(yaml.safe_load(front[1]), dict)
        self._answer({"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        files = json.loads(body)["files"]
        self._answer(
            {
                "files": [
                    {
                        "path": each["path"],
                        "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for each in files
                ]
            }
        )

    def lfs_batch(self, body: bytes, repo: str) -> None:
        objects = []
        for each in json.loads(body)["objects"]:
            href = f"{self.server.url}/objects/{each['oid']}"
            actions = {} if each["oid"] in self.server.objects else {"actions": {"upload": {"href": href}}}
            objects.append({"oid": each["oid"], "size": each["size"], "authenticated": True, **actions})
        self._answer({"transfer": "basic", "objects": objects})

    def put_object(self, body: bytes, oid: str) -> None:
        assert self.server.may_store.wait(60)
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self._answer({})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        files = dict(self.server.files[repo])
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            else:
                assert operation["key"] == "deletedFile"
                del files[value["path"]]
        self.server.files[repo] = files
        self.server.commits.append((repo, revision, header["value"]["summary"]))
        oid = f"{len(self.server.commits):040x}"
        url = f"{self.server.url}/{repo}/commit/{oid}"
        self._answer({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def create_branch(self, body: bytes, repo: str, branch: str) -> None:
        self._answer({})

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        content = self.server.files[repo].get(path)
        if content is None:
            return self._answer({"error": "no such file"}, 404, X_Error_Code="EntryNotFound")
        sha = f"{len(self.server.commits):040x}"
        return self._answer(content, ETag=f'"{_sha1(content)}"', X_Repo_Commit=sha)


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = [
    ("POST", "/api/repos/create", _Handler.create_repo),
    ("POST", "/api/validate-yaml", _Handler.validate_yaml),
    ("GET", f"/api/models/{_REPO}", _Handler.repo_info),
    ("GET", f"/api/models/{_REPO}/revision/([^/]+)", _Handler.repo_info),
    ("GET", f"/api/models/{_REPO}/tree/([^/]+)", _Handler.tree),
    ("POST", f"/api/models/{_REPO}/preupload/([^/]+)", _Handler.preupload),
    ("POST", f"/api/models/{_REPO}/commit/([^/]+)", _Handler.commit),
    ("POST", f"/api/models/{_REPO}/branch/([^/]+)", _Handler.create_branch),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", "/objects/([0-9a-f]+)", _Handler.put_object),
    ("HEAD", f"/{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
    ("GET", f"/{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
]


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    """A running server; it ends with the context."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
