"""Which GPUs a process may use, read from a stand-in for nvidia-smi that prints what the real one
does."""

import sys
from pathlib import Path

import pytest

from coppice.common import hardware
from coppice.tools.launching.config import load
from coppice.tools.launching.prepare import lacking_machine

LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-2d1c6a0e-8d0e-4c3f-9f8e-0c5d8a1b2c3d)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-7e9f1a2b-3c4d-5e6f-8a9b-0c1d2e3f4a5b)
  MIG 1g.10gb     Device  0: (UUID: MIG-a1b2c3d4-e5f6-5789-8abc-def012345678)
"""
BANNER = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The text that the stand-in prints."""
    text, program = tmp_path / "listed.txt", tmp_path / "nvidia-smi"
    text.write_text(LISTED)
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"print(open({str(text)!r}).read() if '--list-gpus' in sys.argv else"
        f" '81920\\n40960\\n' if '--query-gpu=memory.total' in sys.argv else {BANNER!r}, end='')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return text


def test_the_gpus_are_those_that_nvidia_smi_lists(smi: Path) -> None:
    assert hardware.gpu_gib() == 40
    assert hardware.visible_gpus() == ["0", "1"]
    assert hardware.dtype_and_reason("auto") == ("bfloat16", "there is an NVIDIA GPU")


@pytest.mark.usefixtures("smi")
def test_a_driver_that_is_older_than_torchs_cuda_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "torch" / "version.py"
    version.parent.mkdir()
    version.with_name("__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for torchs, said in (("13.0", ["driver 550.54.15 is made for CUDA 12.4"]), ("12.9", [])):
        version.write_text(f"cuda: Optional[str] = '{torchs}'\nhip: Optional[str] = None\n")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        assert hardware.gpu_software() == {
            "driver": "550.54.15", "CUDA": "12.4", "torch's CUDA": torchs, "nvcc": ""
        }  # fmt: skip
        refused = lacking_machine(load(Path("configs/slate-cpu.toml"), ["learner.count=1"]))
        assert [one[:38] for one in refused] == said


@pytest.mark.usefixtures("smi")
def test_the_environment_goes_before_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, expected in (("", []), ("-1", []), ("1,GPU-2d1c", ["1", "GPU-2d1c"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert hardware.visible_gpus() == expected


def test_gpus_that_torch_cannot_use_are_refused_and_never_replaced_by_the_cpu(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"cannot use the GPUs \['0', '1'\]"):
        hardware.torch_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.torch_device() == "cpu"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /sys/fs/cgroup; this process is in the group /service/run of it."""
    (tmp_path / "own").write_text("4:memory:/service/run\n3:cpu:/\n0::/service/run\n")
    monkeypatch.setattr(hardware, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(hardware, "_GROUPS", tmp_path)
    return tmp_path


KIB = 2**10


FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("group", ["service/run", "service", ""])
def test_the_limit_of_any_group_bounds_the_free_memory_and_cached_files_are_free(
    groups: Path, version: str, group: str
) -> None:
    names = FILES[version]
    folder = groups / version / group
    folder.mkdir(parents=True, exist_ok=True)
    whole = hardware.free_memory()
    assert whole > 500 * KIB
    for name, value in zip(names[:2], (300 * KIB, 250 * KIB), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"active_file 7\n{names[2]} {100 * KIB}\n")
    assert hardware.free_memory() == 150 * KIB
    (folder / names[0]).write_text("max\n")
    assert hardware.free_memory() > 500 * KIB
