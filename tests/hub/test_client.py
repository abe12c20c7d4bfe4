"""The loopback hub as the real huggingface_hub client sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.utils as hub_utils
import pytest
from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from tests.hub import HubServer, Part
from tests.hub.asking import CONFIG, FILES, REPO, WEIGHTS, get, resolve, signed


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(REPO, FILES)
        yield server


@pytest.fixture(autouse=True, scope="module")
def _quiet_client() -> Iterator[None]:
    """No progress bars, and no sockets left in the client's pool."""
    disable_progress_bars()
    yield
    enable_progress_bars()
    close: Callable[[], None] = getattr(hub_utils, "close_session", None) or hub_utils.reset_sessions
    close()


def test_the_real_client_lists(hub: HubServer) -> None:
    api = HfApi(endpoint=hub.endpoint, token=False)
    info = api.model_info(REPO, files_metadata=True)
    assert info.id == REPO
    assert info.sha is not None
    assert len(info.sha) == 40
    assert info.siblings is not None
    listed = {one.rfilename: one for one in info.siblings}
    assert {name: one.size for name, one in listed.items()} == {name: len(content) for name, content in FILES.items()}
    # the blob's name by `printf '{"model_type": "tiny"}' | git hash-object --stdin`
    assert listed["config.json"].blob_id == "acfb5d72b280d1928946c2d9ae9f53d92caafcee"
    assert listed["config.json"].lfs is None
    lfs = listed["model.safetensors"].lfs
    assert lfs is not None
    assert (lfs.size, lfs.sha256) == (len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    # the pointer's length and name by hand and by `git hash-object`
    assert (lfs.pointer_size, listed["model.safetensors"].blob_id) == (130, "1b286df092f3574cfc317707e7a76e03ce340a00")
    assert listed["tiktoken.model"].lfs is not None
    plain = api.model_info(REPO, revision=info.sha).siblings
    assert plain is not None
    assert {one.size for one in plain} == {None}


def test_the_real_client_walks_the_tree(hub: HubServer) -> None:
    api = HfApi(endpoint=hub.endpoint, token=False)
    assert {one.path for one in api.list_repo_tree(REPO)} == {*FILES, "sub"} - {"sub/a.json"}
    assert {one.path for one in api.list_repo_tree(REPO, recursive=True)} == {*FILES, "sub"}
    assert [one.path for one in api.list_repo_tree(REPO, "sub")] == ["sub/a.json"]
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "elsewhere"))


@pytest.mark.parametrize("name", FILES)
def test_the_real_client_downloads(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.allow("hf_known")
    path = hf_hub_download(REPO, name, cache_dir=tmp_path, endpoint=hub.endpoint, token="hf_known")
    assert Path(path).read_bytes() == FILES[name]
    seen = hub.of(name)
    assert all(one.had_authorization == (one.part is Part.HUB) for one in seen)
    assert [one.bytes_sent for one in seen if one.method == "GET"][-1] == len(FILES[name])


def test_files_on_disk(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "x.safetensors").write_bytes(WEIGHTS)
    (folder / "empty.json").touch()
    hub.add("org/disk", folder)
    for name, content in {"deep/x.safetensors": WEIGHTS, "empty.json": b""}.items():
        path = hf_hub_download("org/disk", name, cache_dir=tmp_path / "cache", endpoint=hub.endpoint, token=False)
        assert Path(path).read_bytes() == content
    url = get(hf_hub_url("org/disk", "deep/x.safetensors", endpoint=hub.endpoint)).headers["Location"]
    assert get(url, Range="bytes=1000-1999").content == WEIGHTS[1000:2000]


def test_main_moves(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.add(REPO, FILES)
    before = repository.find("main")
    assert before is not None
    repository.tag("v1", before)
    old_url, old_etag = signed(hub), get(resolve(hub, "config.json")).headers["ETag"]
    after = repository.commit({"config.json": b"{}", "model.safetensors": b"new"}, delete=["sub/a.json"])
    assert after.sha != before.sha
    assert get(resolve(hub, "config.json")).content == b"{}"
    assert get(resolve(hub, "config.json")).headers["ETag"] != old_etag
    assert get(resolve(hub, "config.json")).headers["X-Repo-Commit"] == after.sha
    assert get(resolve(hub, "sub/a.json")).status_code == 404
    assert get(signed(hub)).content == b"new"
    assert get(old_url).content == WEIGHTS  # storage goes by content
    for revision in ("v1", before.sha):
        assert get(resolve(hub, "config.json", revision)).content == CONFIG
    repository.commit({"only.json": b"1"}, branch="refs/pr/1")
    path = hf_hub_download(
        REPO, "only.json", revision="refs/pr/1", cache_dir=tmp_path, endpoint=hub.endpoint, token=False
    )
    assert Path(path).read_bytes() == b"1"


def test_missing_things_are_told_apart(hub: HubServer, tmp_path: Path) -> None:
    hub.allow("hf_known")
    for token in (False, "hf_known"):
        api = HfApi(endpoint=hub.endpoint, token=token)
        with pytest.raises(RepositoryNotFoundError) as caught:
            api.model_info("org/none")
        assert caught.value.response.status_code == (404 if token else 401)
        with pytest.raises(RevisionNotFoundError):
            api.model_info(REPO, revision="none")
        with pytest.raises(EntryNotFoundError):
            hf_hub_download(REPO, "none.json", cache_dir=tmp_path, endpoint=hub.endpoint, token=token)
        with pytest.raises(RevisionNotFoundError):
            hf_hub_download(
                REPO, "config.json", revision="none", cache_dir=tmp_path, endpoint=hub.endpoint, token=token
            )


def test_private_and_gated(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/private", FILES, private=True)
    hub.add("org/gated", FILES, gated=True)
    hub.allow("hf_plain")
    hub.allow("hf_granted", "org/gated")

    def fetch(repo_id: str, token: str | bool) -> bytes:
        path = hf_hub_download(repo_id, "config.json", cache_dir=tmp_path, endpoint=hub.endpoint, token=token)
        return Path(path).read_bytes()

    with pytest.raises(RepositoryNotFoundError) as hidden:
        fetch("org/private", False)
    assert not isinstance(hidden.value, GatedRepoError)
    assert fetch("org/private", "hf_plain") == CONFIG
    for token in (False, "hf_plain"):
        assert HfApi(endpoint=hub.endpoint, token=token).model_info("org/gated").gated == "manual"
        with pytest.raises(GatedRepoError) as gated:
            fetch("org/gated", token)
        assert gated.value.response.status_code == (403 if token else 401)
    assert fetch("org/gated", "hf_granted") == CONFIG
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.endpoint, token="hf_wrong").model_info(REPO)


def test_a_disabled_repository(hub: HubServer) -> None:
    hub.add("org/disabled", FILES).disabled = True
    with pytest.raises(DisabledRepoError):
        HfApi(endpoint=hub.endpoint, token=False).model_info("org/disabled")
    assert get(hf_hub_url("org/disabled", "config.json", endpoint=hub.endpoint)).status_code == 403


def test_a_renamed_repository(hub: HubServer, tmp_path: Path) -> None:
    hub.alias("org/old", REPO)
    info = HfApi(endpoint=hub.endpoint, token=False).model_info("org/old", files_metadata=True)
    assert info.id == REPO
    assert info.siblings is not None
    assert info.siblings[0].size == len(CONFIG)
    path = hf_hub_download("org/old", "sub/a.json", cache_dir=tmp_path, endpoint=hub.endpoint, token=False)
    assert Path(path).read_bytes() == b"[]"
