"""Upload a published folder to a model hub: weights first, what makes a loader find them last."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from .base_weights import is_weight_like
from .errors import UploadError, make_list
from .hub import call_hub, library_bars, make_offline_error
from .model_card import CARD_NAME, make_card, needs_card
from .progress import log
from .request import check_repo_name
from .upload_files import (
    COMMIT_NBYTES,
    COMMIT_NUM_FILES,
    ENTRY_NAMES,
    Artifact,
    LocalFile,
    order_commits,
    read_artifact,
)
from .validate import ADAPTER, validate_artifact

T = TypeVar("T")
# How long a merge waits for the hub's word on the token before it starts.
ASK_SECONDS = 30.0
# Files that a repository may have of its own.
OWN_NAMES = frozenset({CARD_NAME, ".gitattributes"})


@dataclass(frozen=True)
class UploadReport:
    """What an upload did; `num_sent` and `nbytes_sent` leave out what the hub had already."""

    repo_id: str
    url: str
    num_files: int
    num_sent: int
    nbytes_sent: int


def upload_artifact(
    path: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    base_model: str | Path | None = None,
    is_checked: bool = False,
    quiet: bool = False,
    timeout: float = 1800.0,
    on_progress: Callable[[], None] = lambda: None,
    commit_num_files: int = COMMIT_NUM_FILES,
    commit_nbytes: int = COMMIT_NBYTES,
) -> UploadReport:
    """Upload a published folder; what the repository holds already is not sent again.

    Token, endpoint and offline mode are those of `huggingface_hub`.

    Args:
        path: The published folder. It is only read.
        repo_id: `ORG/REPO`; created when it does not exist. Other files in it stay.
        private: Make a new repository private; an existing one must be private.
        base_model: Base of the model, for the model card.
        is_checked: The folder was verified just now; else it is rechecked first.
        quiet: Nothing on stderr.
        timeout: Seconds without progress.
        on_progress: Called while the upload moves; may raise to give up.
        commit_num_files: Most files of one commit.
        commit_nbytes: Most bytes of one commit, unless one file is larger.

    Returns:
        What was uploaded.

    Raises:
        RequestError: `repo_id` is no repository's name.
        ArtifactError: The folder differs from its manifest.
        UploadError: The upload failed, or the repository differs from the folder afterwards.
    """
    check_repo_name(repo_id)
    if not is_checked:
        validate_artifact(path)
    artifact = read_artifact(Path(path))
    named = base_model if needs_card(artifact.manifest) else None
    hint = make_resume_command(path, repo_id, private=private, base_model=named)
    upload = Upload(artifact, repo_id, private, base_model, quiet, timeout, on_progress, hint)
    with library_bars(enabled=not quiet):
        return upload.execute(commit_num_files, commit_nbytes)


def check_hub() -> str | None:
    """Refuse an upload that cannot work, before the work it follows; returns a remark or None.

    Raises:
        UploadError: Offline mode, no token, or a token the hub does not know.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        raise make_offline_error()
    try:
        call_hub("to say whose token this is", HfApi().whoami, timeout=ASK_SECONDS)
    except UploadError as error:
        if error.error_id == "upload-denied":
            raise
        # Not every hub answers this question, and the hub may be back when it is needed.
        return f"the hub could not be asked about the token: {error.found or error.what}"
    return None


def make_resume_command(
    path: str | Path, repo_id: str, *, private: bool, base_model: str | Path | None
) -> str:
    """The command that goes on with an upload."""
    words = ["python", "-m", "dist_merge", "upload", "--artifact", str(path)]
    words += ["--hf_upload_path", repo_id]
    words += ["--private"] if private else []
    words += ["--base_model", str(base_model)] if base_model is not None else []
    return shlex.join(words)


@dataclass(frozen=True)
class Upload:
    """One upload; `hint` is the command that goes on with it."""

    artifact: Artifact
    repo_id: str
    private: bool
    base_model: str | Path | None
    quiet: bool
    timeout: float
    on_progress: Callable[[], None]
    hint: str

    def call(self, what: str, action: Callable[[], T]) -> T:
        """Run one call of the hub's library."""
        return call_hub(
            what,
            action,
            folder=self.artifact.folder,
            timeout=self.timeout,
            on_progress=self.on_progress,
            hint=self.hint,
        )

    def execute(self, commit_num_files: int, commit_nbytes: int) -> UploadReport:
        """Create the repository, send what it lacks, and compare."""
        from huggingface_hub import HfApi

        api = HfApi()
        url = self.open_repo(api)
        remote = self.list_remote(api)
        self.check_remains(remote)
        files = [*self.artifact.files, *self.make_card(remote)]
        missing = [f for f in self.watch(files) if not f.equals(remote.get(f.path))]
        # Other contents under a name of ours: a model is replaced, which must not show halfway.
        replaces = any(f.path in remote and f.path not in OWN_NAMES for f in missing)
        commits = order_commits(
            missing,
            at_once=replaces or self.artifact.manifest.artifact_type == ADAPTER,
            num_files=commit_num_files,
            nbytes=commit_nbytes,
        )
        nbytes = sum(f.nbytes for f in missing)
        log(
            f"upload: {len(missing)} of {len(files)} files, {nbytes / 2**20:.1f} MiB, in "
            f"{len(commits)} commit(s) to {url}",
            enabled=not self.quiet,
        )
        revision = None
        for number, batch in enumerate(commits, start=1):
            revision = self.send(api, batch, title=f"part {number} of {len(commits)}")
        self.compare(self.list_remote(api, revision), files)
        return UploadReport(self.repo_id, url, len(files), len(missing), nbytes)

    def watch(self, files: Sequence[LocalFile]) -> Iterator[LocalFile]:
        """Give the files one by one, counting progress: comparing them may read them."""
        for file in files:
            self.on_progress()
            yield file

    def open_repo(self, api: Any) -> str:
        """Create the repository unless it exists; returns its address.

        Raises:
            UploadError: It should be private and is public.
        """
        create = partial(api.create_repo, self.repo_id, private=self.private or None, exist_ok=True)
        url = str(self.call(f"creating `{self.repo_id}`", create))
        if self.private:
            ask = partial(api.repo_info, self.repo_id)
            if not self.call(f"asking about `{self.repo_id}`", ask).private:
                raise UploadError(
                    "upload-public",
                    f"`{self.repo_id}` exists and is public, but --private was given",
                    hint="make it private on the hub, choose another name, or leave out --private",
                )
        return url

    def list_remote(self, api: Any, revision: str | None = None) -> dict[str, Any]:
        """Files of the repository, by path."""

        def ask() -> dict[str, Any]:
            tree = api.list_repo_tree(self.repo_id, recursive=True, revision=revision)
            return {entry.path: entry for entry in tree if hasattr(entry, "blob_id")}

        return self.call(f"listing `{self.repo_id}`", ask)

    def check_remains(self, remote: Mapping[str, Any]) -> None:
        """Refuse a repository where a loader would find files of another model beside ours.

        Raises:
            UploadError: With those files.
        """
        own = {file.path for file in self.artifact.files}
        folders = {PurePosixPath(path).parent for path in own if is_weight_like(path)}
        remains = [
            path
            for path in set(remote) - own
            if (is_weight_like(path) and PurePosixPath(path).parent in folders)
            or path in ENTRY_NAMES
        ]
        if remains:
            raise UploadError(
                "upload-mixed",
                f"`{self.repo_id}` holds files of another model that loaders would take for parts "
                f"of this one: {make_list(remains)}",
                hint="nothing was uploaded or deleted; choose another repository, or delete these",
            )

    def make_card(self, remote: Mapping[str, Any]) -> list[LocalFile]:
        """A model card, where neither the folder nor the repository has one."""
        if CARD_NAME in remote:
            return []
        content = make_card(
            self.artifact.folder,
            self.artifact.manifest,
            repo_id=self.repo_id,
            base_model=self.base_model,
        )
        if content is None:
            return []
        sha256 = hashlib.sha256(content).hexdigest()
        return [LocalFile(CARD_NAME, content, len(content), sha256)]

    def send(self, api: Any, files: Sequence[LocalFile], *, title: str) -> str:
        """Send files and commit them; returns the commit.

        The library hashes what it sends by itself: handing it the manifest's hashes would make
        the comparison afterwards one of the manifest with itself.
        """
        from huggingface_hub import CommitOperationAdd

        additions = [
            CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=file.content)
            for file in files
        ]
        send = partial(
            api.preupload_lfs_files, self.repo_id, additions=additions, free_memory=False
        )
        self.call(f"uploading to `{self.repo_id}`", send)
        commit = partial(
            api.create_commit,
            self.repo_id,
            operations=additions,
            commit_message=f"Upload by dist_merge, {title}",
        )
        return str(self.call(f"committing to `{self.repo_id}`", commit).oid)

    def compare(self, remote: Mapping[str, Any], files: Sequence[LocalFile]) -> None:
        """Compare the repository with the folder.

        Raises:
            UploadError: A file is missing there or has another hash.
        """
        wrong = [f.path for f in self.watch(files) if not f.equals(remote.get(f.path))]
        if wrong:
            raise UploadError(
                "upload-differs",
                f"after the upload `{self.repo_id}` has other contents than the local folder: "
                f"{make_list(wrong)}",
                hint=f"do not use the repository; try again: {self.hint}",
            )
