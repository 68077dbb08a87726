"""Uploads through the real library to a real HTTP server on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_merge import ModelMergerConfig, merge_model, validate_artifact
from dist_merge.errors import RequestError
from tests.conftest import Lab
from tests.end_to_end.test_merge import list_tree, merge_arguments
from tests.helpers.hub_server import Hub, StoredFile, serve_hub
from tests.helpers.launch import Finished, make_environment, python, torchrun

pytestmark = pytest.mark.slow

REPO = "team/my-model"
ENTRIES = {"model_index.json", "merge_manifest.json"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and an environment in which started processes find it and its token."""
    with serve_hub() as hub:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


def merge(lab: Lab, target: Path, **options: Any) -> Path:
    """Merge the fp32 run into several weight files."""
    config: dict[str, Any] = {
        "local_dir": lab.run() / "actor",
        "base_model": lab.base,
        "target_dir": target,
        "trust_checkpoint": True,
        "max_shard_size": "100KB",
        "quiet": True,
    }
    merge_model(ModelMergerConfig(**{**config, **options}))
    return target


@pytest.fixture(scope="module")
def pipeline(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published pipeline."""
    return merge(lab, tmp_path_factory.mktemp("pipeline") / "out")


@pytest.fixture(scope="module")
def transformer(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published lone transformer."""
    target = tmp_path_factory.mktemp("transformer") / "out"
    return merge(lab, target, output_format="transformer")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published adapter; its base is known by name."""
    root = tmp_path_factory.mktemp("adapter")
    arguments = ["--out", root / "runs", "--cases", "qwen"]
    done = torchrun("tests.helpers.train_lora", arguments, nproc=2)
    assert done.code == 0, done.stderr
    config = ModelMergerConfig(
        local_dir=root / "runs" / "qwen" / "lora_only",
        base_model="Qwen/Qwen-Image",
        target_dir=root / "out",
        lora_config=root / "runs" / "qwen" / "config",
        trust_checkpoint=True,
        quiet=True,
    )
    merge_model(config)
    return root / "out"


def upload(artifact: Path, *extra: object, repo: str = REPO) -> Finished:
    """Run the command `upload`."""
    arguments = ["upload", "--artifact", artifact, "--hf_upload_path", repo, *extra]
    return python("dist_merge", arguments)


def resume_command(artifact: Path, *extra: str) -> str:
    """What a failed upload tells the user to run."""
    words = ["python -m dist_merge upload --artifact", str(artifact), "--hf_upload_path", REPO]
    return " ".join([*words, *extra])


def assert_remote_equals(hub: Hub, artifact: Path, *others: str) -> None:
    """The repository holds exactly the folder, and `others`."""
    files = hub.repos[REPO].files
    local = list_tree(artifact)
    assert set(files) == set(local) | {".gitattributes"} | set(others)
    for path, content in local.items():
        assert files[path].content == content, path


def download(artifact: Path) -> None:
    """Fetch the repository into a folder with the real library."""
    code = (
        "import sys; from huggingface_hub import snapshot_download; "
        "snapshot_download(sys.argv[1], local_dir=sys.argv[2], ignore_patterns='.gitattributes')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, REPO, str(artifact)],
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(artifact / ".cache")


def test_upload_pipeline_remote_equals_folder(hub: Hub, pipeline: Path, tmp_path: Path) -> None:
    """Catches lost or altered files, an early entry file, a written-to artifact, a second send."""
    before = list_tree(pipeline)
    done = upload(pipeline)
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["repo_id"] == REPO
    assert report["num_files"] == report["num_sent"] == len(before)
    assert list_tree(pipeline) == before
    assert_remote_equals(hub, pipeline)
    repo = hub.repos[REPO]
    assert not repo.private
    assert sum(file.is_lfs for file in repo.files.values()) > 3
    *firsts, last = repo.commits
    assert set(last.added) >= ENTRIES
    assert any(path.endswith(".index.json") for path in last.added)
    assert not any(path.endswith(".safetensors") for path in last.added)
    assert len(firsts) > 1
    assert not any(ENTRIES & set(commit.files) for commit in firsts)
    download(tmp_path / "copy")
    validate_artifact(tmp_path / "copy")
    puts = list(hub.puts)
    done = upload(pipeline)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["num_sent"] == 0
    assert hub.puts == puts
    assert repo.commits[-1] is last


def test_upload_dies_resumed_sends_the_rest(hub: Hub, pipeline: Path) -> None:
    """Catches a half upload that looks whole, objects sent twice, a touched artifact."""
    before = list_tree(pipeline)
    hub.max_puts = 3
    done = upload(pipeline)
    assert done.code == 1
    assert "error[upload-failed]" in done.stderr
    assert resume_command(pipeline) in done.stderr
    assert "500" in done.stderr
    assert "Signature" not in done.stderr.partition("error[")[2], "signed addresses are secrets"
    assert list_tree(pipeline) == before
    assert not ENTRIES & set(hub.repos[REPO].files)
    assert len(hub.puts) == 3
    hub.max_puts = None
    done = upload(pipeline)
    assert done.code == 0, done.stderr
    assert len(hub.puts) == len(set(hub.puts)), "an object was sent twice"
    assert_remote_equals(hub, pipeline)


def test_upload_dies_between_commits_resumed_skips_committed(hub: Hub, pipeline: Path) -> None:
    """Catches a resume that commits again what is there."""
    code = (
        "import sys; from dist_merge.upload import upload_artifact; "
        "r = upload_artifact(sys.argv[1], sys.argv[2], quiet=True, commit_num_files=2); "
        "print(r.num_sent)"
    )
    command = [sys.executable, "-c", code, str(pipeline), REPO]
    hub.max_puts = 4
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run(command, env=make_environment(), **options)
    assert "UploadError" in done.stderr
    committed = set(hub.repos[REPO].files) - {".gitattributes"}
    assert len(committed) == 4
    assert all(path.endswith(".safetensors") for path in committed), "weights go first"
    hub.max_puts = None
    done = subprocess.run(command, env=make_environment(), **options)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(list_tree(pipeline)) - 4
    added = [path for commit in hub.repos[REPO].commits for path in commit.added]
    assert len(added) == len(set(added))
    assert len(hub.puts) == len(set(hub.puts))
    assert_remote_equals(hub, pipeline)


def test_upload_wrong_token_says_so(
    hub: Hub, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a message that does not name the token."""
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    done = upload(pipeline)
    assert done.code == 1
    assert "error[upload-denied]" in done.stderr
    assert "HF_TOKEN" in done.stderr
    assert "hf_wrong" not in done.stderr
    assert resume_command(pipeline) in done.stderr
    assert hub.repos == {}


def test_upload_existing_repo_keeps_its_files(hub: Hub, pipeline: Path) -> None:
    """Catches a wiped repository, and a model that is replaced in visible steps."""
    repo = hub.make_repo(REPO)
    own = {
        "images/example.png": StoredFile(b"picture", False),
        "README.md": StoredFile(b"---\nlicense: mit\n---\nmine\n", False),
        "model_index.json": StoredFile(b"{}", False),
    }
    repo.add(own, "mine")
    done = upload(pipeline)
    assert done.code == 0, done.stderr
    assert_remote_equals(hub, pipeline, "images/example.png", "README.md")
    assert repo.files["README.md"] == own["README.md"]
    assert len(repo.commits) == 3, "one commit, so that no reader sees a mixture"


def test_upload_beside_other_weights_refused(hub: Hub, pipeline: Path) -> None:
    """Catches an index of an older model that loaders would prefer."""
    stale = "transformer/diffusion_pytorch_model.bin.index.json"
    repo = hub.make_repo(REPO)
    repo.add({stale: StoredFile(b"{}", False)}, "old")
    done = upload(pipeline)
    assert done.code == 1
    assert "error[upload-mixed]" in done.stderr
    assert stale in done.stderr
    assert len(repo.commits) == 2
    assert hub.puts == []


def test_upload_private(hub: Hub, pipeline: Path, transformer: Path) -> None:
    """Catches a private model in a public repository."""
    done = upload(transformer, "--private")
    assert done.code == 0, done.stderr
    assert hub.repos[REPO].private
    hub.make_repo("team/public")
    done = upload(pipeline, "--private", repo="team/public")
    assert done.code == 1
    assert "error[upload-public]" in done.stderr
    assert len(hub.repos["team/public"].commits) == 1


def test_upload_offline_refused(
    hub: Hub, lab: Lab, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an offline mode that is ignored, or noticed only after the merge."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = upload(pipeline)
    assert done.code == 1
    assert "error[upload-offline]" in done.stderr
    assert resume_command(pipeline) in done.stderr
    arguments = merge_arguments(lab, tmp_path / "out", "--hf_upload_path", REPO)
    done = python("dist_merge", arguments)
    assert done.code == 1
    assert "error[upload-offline]" in done.stderr
    assert not (tmp_path / "out").exists()
    assert hub.requests == []


def test_upload_spoiled_artifact_refused(hub: Hub, pipeline: Path, tmp_path: Path) -> None:
    """Catches an upload of a folder that differs from its manifest."""
    spoiled = Path(shutil.copytree(pipeline, tmp_path / "spoiled"))
    file = spoiled / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = upload(spoiled)
    assert done.code == 1
    assert "error[file-changed]" in done.stderr
    assert hub.requests == []


@pytest.mark.parametrize(
    "path", ["model_index.json", "vae/diffusion_pytorch_model.safetensors"], ids=["git", "lfs"]
)
def test_upload_remote_differs_fails(hub: Hub, pipeline: Path, path: str) -> None:
    """Catches a comparison that does not look at what the hub has stored."""
    hub.spoils = path
    done = upload(pipeline)
    assert done.code == 1
    assert "error[upload-differs]" in done.stderr
    assert path in done.stderr


def test_upload_hub_that_stops_answering_ends(hub: Hub, pipeline: Path) -> None:
    """Catches a run that waits for ever: the library sets no time limit on a transfer."""
    hub.stalls = threading.Event()
    done = upload(pipeline, "--timeout", "3")
    assert done.code == 1
    assert "error[upload-stalled]" in done.stderr
    assert resume_command(pipeline) in done.stderr
    assert done.seconds < 60


def read_card(hub: Hub) -> tuple[dict[str, Any], str]:
    """Front matter and text of the repository's card."""
    _, front, text = hub.repos[REPO].files["README.md"].content.decode().split("---\n", 2)
    return yaml.safe_load(front), text


def test_upload_adapter_with_card(hub: Hub, adapter: Path, tmp_path: Path) -> None:
    """Catches a nested adapter folder, which no loader finds, and a card that says too little."""
    done = upload(adapter)
    assert done.code == 0, done.stderr
    folder = adapter / "lora_adapter"
    assert_remote_equals(hub, folder, "README.md")
    assert not (folder / "README.md").exists()
    front, text = read_card(hub)
    assert front["base_model"] == "Qwen/Qwen-Image"
    assert front["base_model_relation"] == "adapter"
    assert front["library_name"] == "peft"
    assert "lora" in front["tags"]
    assert f'load_lora_weights("{REPO}")' in text
    manifest = json.loads((folder / "merge_manifest.json").read_text())
    assert manifest["source_fingerprint"] in text
    assert f"| adapter | {manifest['adapter_name']} |" in text
    download(tmp_path / "copy")
    (tmp_path / "copy" / "README.md").unlink()
    validate_artifact(tmp_path / "copy")


def test_upload_transformer_card_takes_licence(hub: Hub, transformer: Path, tmp_path: Path) -> None:
    """Catches a lost licence, a guessed base, a local path on the hub."""
    base = tmp_path / "base"
    base.mkdir()
    card = "---\nlicense: other\nlicense_name: qwen-research\nlanguage: en\n---\n# Base\n"
    (base / "README.md").write_text(card)
    done = upload(transformer, "--base_model", base)
    assert done.code == 0, done.stderr
    front, text = read_card(hub)
    assert front["license"] == "other"
    assert front["license_name"] == "qwen-research"
    assert front["library_name"] == "diffusers"
    assert set(front) == {"license", "license_name", "library_name", "tags"}
    assert str(base) not in text
    assert f'QwenImageTransformer2DModel.from_pretrained("{REPO}")' in text
    assert_remote_equals(hub, transformer, "README.md")
    assert hub.repos[REPO].commits[-1].added[-1] == "README.md"


def test_merge_and_upload_two_ranks(hub: Hub, lab: Lab, tmp_path: Path) -> None:
    """Catches ranks that leave or upload twice while rank 0 uploads."""
    target = tmp_path / "out"
    done = torchrun(
        "dist_merge",
        merge_arguments(lab, target, "--hf_upload_path", REPO, "--private"),
        nproc=2,
    )
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["uploaded_to"] == f"{hub.url}/{REPO}"
    assert hub.repos[REPO].private
    assert_remote_equals(hub, target)
    assert len(hub.puts) == len(set(hub.puts))
    assert hub.requests.count("POST /api/repos/create") == 1


def test_merge_failed_upload_keeps_the_target(hub: Hub, lab: Lab, tmp_path: Path) -> None:
    """Catches a target that is removed, or a failure that is not one."""
    target = tmp_path / "out"
    hub.commit_status = 503
    done = python("dist_merge", merge_arguments(lab, target, "--hf_upload_path", REPO))
    assert done.code == 1
    assert "error[upload-failed]" in done.stderr
    assert f"`{target}` is published and complete" in done.stderr
    assert resume_command(target) in done.stderr
    assert done.stdout == ""
    validate_artifact(target)
    assert [path.name for path in tmp_path.iterdir() if "dist_merge" in path.name] == []
    hub.commit_status = 0
    done = upload(target)
    assert done.code == 0, done.stderr
    assert_remote_equals(hub, target)


def test_merge_wrong_token_refused_before_the_merge(
    hub: Hub, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches hours of merging for an upload that cannot work."""
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    arguments = merge_arguments(lab, tmp_path / "out", "--hf_upload_path", REPO)
    done = python("dist_merge", arguments)
    assert done.code == 1
    assert "error[upload-denied]" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model", "a/b/c", "team/", "/x", "team/-x", "te am/x", "a/b--c"])
def test_bad_repo_name_refused(name: str) -> None:
    """Catches a name the hub would refuse after the merge."""
    with pytest.raises(RequestError, match="bad-repo-name"):
        ModelMergerConfig(local_dir="a", target_dir="b", hf_upload_path=name)


def test_private_without_upload_refused() -> None:
    """Catches an option without effect."""
    with pytest.raises(RequestError, match="bad-option"):
        ModelMergerConfig(local_dir="a", target_dir="b", private=True)
