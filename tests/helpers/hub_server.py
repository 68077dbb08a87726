"""A model hub on loopback: the endpoints `huggingface_hub` uses to upload, list and download.

Objects are stored by SHA256 as a hub does, commits as lists of path -> file. Faults can be planted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")
LFS_NBYTES = 10 * 2**20


@dataclass(frozen=True)
class StoredFile:
    """One file of a commit; `content` of an LFS file is its object."""

    content: bytes
    is_lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob_id(self) -> str:
        """Git's hash of the file, or of the pointer that stands for an LFS object."""
        content = self.content
        if self.is_lfs:
            text = "version https://git-lfs.github.com/spec/v1\n"
            content = f"{text}oid sha256:{self.sha256}\nsize {len(content)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def describe(self, path: str) -> dict[str, Any]:
        """Entry of a listing."""
        entry = {"type": "file", "path": path, "size": len(self.content), "oid": self.blob_id}
        if self.is_lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}
        return entry


@dataclass(frozen=True)
class Commit:
    """State of a repository after a commit, and what the commit brought."""

    oid: str
    files: dict[str, StoredFile]
    added: tuple[str, ...]
    title: str


@dataclass
class Repo:
    """One repository."""

    private: bool
    commits: list[Commit] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, StoredFile]:
        """Files of the newest commit."""
        return self.commits[-1].files

    def add(self, files: dict[str, StoredFile], title: str) -> str:
        """Commit files on top of what is there."""
        before = self.commits[-1].files if self.commits else {}
        oid = hashlib.sha1(f"{len(self.commits)}{title}".encode()).hexdigest()
        self.commits.append(Commit(oid, {**before, **files}, tuple(files), title))
        return oid

    def at(self, revision: str) -> Commit | None:
        """Commit of a revision."""
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit.oid == revision), None)


@dataclass
class Hub:
    """State of the server, what it was asked, and its faults.

    `max_puts`: objects taken before every further one gets status 500. `commit_status`: answer of
    every commit, when not 0. `stalls`: uploads of objects get no answer. `spoils`: this path is
    stored with other contents than were sent.
    """

    token: str = "hf_right"
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    puts: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    max_puts: int | None = None
    commit_status: int = 0
    spoils: str = ""
    stalls: threading.Event | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def make_repo(self, name: str, *, private: bool = False) -> Repo:
        """Make a repository with the first commit that a hub makes."""
        repo = self.repos[name] = Repo(private)
        repo.add({".gitattributes": StoredFile(b"*.safetensors filter=lfs\n", False)}, "initial")
        return repo


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub on a free port of loopback."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.stalls is not None:
            hub.stalls.set()
        server.shutdown()
        server.server_close()
        thread.join()


class AnswerError(Exception):
    """Ends a request with this status."""

    def __init__(self, status: int, message: str, **data: Any) -> None:
        super().__init__(message)
        self.status = status
        self.data = {"error": message, **data}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Silence: the requests are recorded."""

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        """Read the body, find the endpoint, send what it says."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b"".join(self.read_chunks())
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        headers: dict[str, str] = {}
        try:
            if self.command == "PUT":
                status, data = 200, self.take_object(path.rpartition("/")[2], body)
            elif "/resolve/" in path:
                status, (data, headers) = 200, self.resolve(path)
            else:
                status, data = 200, self.call_api(path, body)
        except AnswerError as error:
            status, data = error.status, error.data
            headers = {"X-Error-Message": str(error), "Retry-After": "0"}
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def read_chunks(self) -> Iterator[bytes]:
        """Pieces of a body sent in chunks."""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def call_api(self, path: str, body: bytes) -> Any:
        """Everything but objects and downloads; all of it wants the token."""
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise AnswerError(401, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            return {"type": "user", "name": "team", "orgs": []}
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            text = json.loads(body)["content"]
            return {
                "errors": [],
                "warnings": [] if text.startswith("---\n") else [{"message": "?"}],
            }
        if path.endswith(".git/info/lfs/objects/batch"):
            name = path.removeprefix("/").removesuffix(".git/info/lfs/objects/batch")
            return self.list_transfers(self.find_repo(name), name, json.loads(body))
        if path.startswith("/lfs/verify/"):
            asked = json.loads(body)
            objects = self.find_repo(path.removeprefix("/lfs/verify/")).objects
            if len(objects.get(asked["oid"], b"")) != asked["size"]:
                raise AnswerError(422, "the object is not there")
            return {}
        parts = path.split("/")
        if parts[:3] != ["", "api", "models"] or len(parts) < 5:
            raise AnswerError(404, f"no such endpoint: {path}")
        name = "/".join(parts[3:5])
        return self.call_repo(self.find_repo(name), name, parts[5:], body)

    def call_repo(self, repo: Repo, name: str, parts: list[str], body: bytes) -> Any:
        """Endpoints of one repository."""
        action, revision = (parts + ["info", "main"])[:2] if len(parts) < 2 else parts[:2]
        commit = repo.at(revision)
        if commit is None:
            raise AnswerError(404, f"no revision {revision}")
        if action in ("info", "revision"):
            siblings = [{"rfilename": path} for path in commit.files]
            info = {"id": name, "modelId": name, "sha": commit.oid, "private": repo.private}
            return {**info, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
        if action == "tree":
            asked = parse_qs(urlsplit(self.path).query)
            assert asked["recursive"] == ["true"]
            return [file.describe(path) for path, file in sorted(commit.files.items())]
        if action == "preupload":
            return {"files": [self.choose_mode(repo, f) for f in json.loads(body)["files"]]}
        if action == "commit":
            return self.commit(repo, name, body)
        raise AnswerError(404, f"no such endpoint: {action}")

    def find_repo(self, name: str) -> Repo:
        if name not in self.hub.repos:
            raise AnswerError(404, "Repository not found")
        return self.hub.repos[name]

    def create(self, asked: dict[str, Any]) -> Any:
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            raise AnswerError(409, "You already created this model repo", url=url)
        is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.make_repo(name, private=is_private)
        return {"url": url, "name": name}

    def choose_mode(self, repo: Repo, asked: dict[str, Any]) -> dict[str, Any]:
        is_lfs = asked["path"].endswith(LFS_SUFFIXES) or asked["size"] > LFS_NBYTES
        known = repo.files.get(asked["path"])
        answer = {"path": asked["path"], "uploadMode": "lfs" if is_lfs else "regular"}
        oid = None if known is None else known.sha256 if known.is_lfs else known.blob_id
        return {**answer, "shouldIgnore": False, **({"oid": oid} if oid else {})}

    def list_transfers(self, repo: Repo, name: str, asked: dict[str, Any]) -> Any:
        """The batch call of git LFS: where to put which objects; none for those that are there."""
        objects = []
        for item in asked["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in repo.objects:
                href = f"{self.hub.url}/lfs/objects/{name.replace('/', '+')}/{item['oid']}"
                verify = {"href": f"{self.hub.url}/lfs/verify/{name}"}
                entry["actions"] = {
                    "upload": {"href": f"{href}?Signature=secret"},
                    "verify": verify,
                }
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    def take_object(self, oid: str, body: bytes) -> Any:
        """Store an object under its hash."""
        hub = self.hub
        if hub.stalls is not None:
            hub.stalls.wait()
        if hashlib.sha256(body).hexdigest() != oid:
            raise AnswerError(400, "the object has another hash")
        with hub.lock:
            if hub.max_puts is not None and len(hub.puts) >= hub.max_puts:
                raise AnswerError(500, "Internal error")
            hub.puts.append(oid)
        name = urlsplit(self.path).path.split("/")[-2].replace("+", "/")
        self.find_repo(name).objects[oid] = body
        return b""

    def commit(self, repo: Repo, name: str, body: bytes) -> Any:
        """A commit in newline-delimited JSON."""
        if self.hub.commit_status:
            raise AnswerError(self.hub.commit_status, "The store is closed for maintenance")
        lines = [json.loads(line) for line in body.splitlines()]
        files = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
                files[value["path"]] = StoredFile(content, False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in repo.objects:
                    raise AnswerError(422, f"object {value['oid']} is not there")
                files[value["path"]] = StoredFile(repo.objects[value["oid"]], True)
            else:
                raise AnswerError(400, f"{line['key']} is not for an upload")
        if self.hub.spoils in files:
            file = files[self.hub.spoils]
            files[self.hub.spoils] = StoredFile(file.content[:-1] + b"!", file.is_lfs)
        oid = repo.add(files, lines[0]["value"]["summary"])
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid}

    def resolve(self, path: str) -> tuple[bytes, dict[str, str]]:
        """A download."""
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, file_path = rest.partition("/")
        commit = self.find_repo(name).at(revision)
        if commit is None or file_path not in commit.files:
            raise AnswerError(404, "Entry not found")
        file = commit.files[file_path]
        headers = {"ETag": f'"{file.blob_id}"', "X-Repo-Commit": commit.oid}
        if file.is_lfs:
            headers |= {
                "X-Linked-ETag": f'"{file.sha256}"',
                "X-Linked-Size": str(len(file.content)),
            }
        return file.content, headers
