"""common/storage.py: versions of the weights through a store that learner and actor both reach."""

from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest
from fsspec.registry import known_implementations
from fsspec.spec import AbstractFileSystem

from coppice.common import storage
from coppice.wire.faults import InfrastructureFault
from tests import ftp


def version(folder: Path, number: int) -> Path:
    place = folder / f"v{number:06d}"
    place.mkdir(parents=True)
    (place / "adapter_model.safetensors").write_bytes(bytes([number]) * 1000)
    (place / "manifest.json").write_text(f'{{"version": {number}}}')
    return place


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server of the folder ``store``, for which fsspec finds user and password in the
    environment."""
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("FSSPEC_FTP_USERNAME", ftp.USER)
    monkeypatch.setenv("FSSPEC_FTP_PASSWORD", ftp.PASSWORD)
    reload_configuration()
    with ftp.serving(tmp_path / "store") as url:
        yield url
    monkeypatch.undo()
    reload_configuration()


def reload_configuration() -> None:
    """fsspec reads the environment when it is imported."""
    fsspec.config.conf.clear()
    fsspec.config.set_conf_env(fsspec.config.conf)
    AbstractFileSystem.clear_instance_cache()


@pytest.mark.parametrize("kind", ["file", "ftp"])
def test_a_version_reaches_a_node_without_the_run(kind: str, server: str, tmp_path: Path) -> None:
    url, weights = (
        {"file": f"file://{tmp_path}/store/run", "ftp": f"{server}/run"}[kind],
        tmp_path / "node" / "weights",
    )
    for number in range(1, 6):
        storage.put(version(tmp_path / "run", number), url, keep=3)
        path = storage.fetched(f"/elsewhere/weights/v{number:06d}", url, weights)
        assert Path(path).parent == weights
        assert (Path(path) / "adapter_model.safetensors").read_bytes() == bytes([number]) * 1000
    assert sorted(p.name for p in (tmp_path / "store" / "run").iterdir()) == [
        "v000003",
        "v000004",
        "v000005",
    ]
    assert sorted(p.name for p in weights.iterdir()) == ["v000004", "v000005"]


def test_a_folder_that_is_seen_is_used_in_place(tmp_path: Path) -> None:
    place = version(tmp_path, 1)
    assert storage.fetched(str(place), "file:///nowhere", tmp_path / "weights") == str(place)


def test_a_version_without_its_manifest_is_not_whole_and_leaves_nothing(tmp_path: Path) -> None:
    url, weights = f"file://{tmp_path}/store", tmp_path / "weights"
    storage.put(version(tmp_path / "run", 1), url, keep=3)
    (tmp_path / "store" / "v000001" / "manifest.json").unlink()
    for path in ("/x/v000001", "/x/v000002"):
        with pytest.raises(InfrastructureFault, match="cannot be read from file://"):
            storage.fetched(path, url, weights)
    assert list(weights.iterdir()) == []


def test_a_storage_with_errors_of_its_own_costs_a_try_and_no_task(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong password is no OSError of ftplib, and an endpoint out of reach none of s3fs."""
    url = f"{server.replace('//', f'//{ftp.USER}:wrong@')}/run"
    monkeypatch.setattr(storage, "_PAUSE_S", 0.0)
    with pytest.raises(InfrastructureFault, match="weights v000001 cannot be read"):
        storage.fetched("/x/v000001", url, tmp_path / "weights")
    with pytest.raises(OSError, match="v000001 could not be written"):
        storage.put(version(tmp_path / "run", 1), url, keep=3)
    with pytest.raises(ValueError, match="expected such as 's3://"):
        storage.check(url)


@pytest.mark.parametrize(
    ("kind", "reason"), [("nosuch", "Protocol not known: nosuch"), ("absent", "Install absentfs")]
)
def test_a_storage_that_cannot_be_opened_is_refused_with_the_remedy(
    kind: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind is unknown, or its package is not installed."""
    monkeypatch.setitem(
        known_implementations, "absent", {"class": "absentfs.Store", "err": "Install absentfs"}
    )
    with pytest.raises(
        ValueError,
        match=rf"learner\.publish_url = '{kind}://bucket'.*{reason}.*expected such as 's3://",
    ):
        storage.check(f"{kind}://bucket")


def test_an_upload_that_fails_and_then_works_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").touch()
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: (tmp_path / "store").unlink())
    storage.put(version(tmp_path / "run", 1), f"file://{tmp_path}/store/run", keep=3)
    assert len(list((tmp_path / "store" / "run" / "v000001").iterdir())) == 2
    (said,) = caplog.messages
    assert "v000001 could not be written to file://" in said
