"""Output files: refused before any work if they cannot be written; otherwise replaced as a whole or left unchanged."""

import os
import stat
from io import FileIO
from pathlib import Path

import pytest

from specdec import SpecDecError
from specdec.cli.output_files import STDOUT, require_distinct, require_writable, write_file
from specdec.text import record_files
from specdec.text.record_files import append_record, open_records, whole_lines


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_are_written_and_no_other_file_is_left(tmp_path):
    write_file(tmp_path / "a.txt", "é")
    write_file(tmp_path / "b.bin", b"\x00")
    assert (tmp_path / "a.txt").read_bytes() == "é\n".encode()
    assert (tmp_path / "b.bin").read_bytes() == b"\x00"
    assert names(tmp_path) == ["a.txt", "b.bin"]


@pytest.mark.parametrize("fault", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device"), r"cannot be written: No space left on device: '.*report\.json'"),
        (KeyboardInterrupt(), None),
    ],
    ids=["full", "ctrl-c"],
)
def test_a_fault_leaves_the_file_before(fault, error, says, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("before")

    def fail(*args):
        raise error

    monkeypatch.setattr(os, fault, fail)
    with pytest.raises(type(error), match=says):
        write_file(path, "after" * 10_000)
    assert path.read_text() == "before"
    assert names(tmp_path) == ["report.json"]


def test_a_link_stays_a_link_and_a_mode_stays(tmp_path):
    (tmp_path / "real.json").write_text("before")
    (tmp_path / "real.json").chmod(0o640)
    (tmp_path / "link.json").symlink_to("real.json")
    write_file(tmp_path / "link.json", "after")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "after\n"
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o640


def test_a_device_is_written_into_and_never_replaced():
    require_writable(Path("/dev/null"))
    write_file(Path("/dev/null"), "gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match=r"No space left.*'/dev/full'"):
            write_file(Path("/dev/full"), "text")


def test_standard_output(capfd):
    require_writable(STDOUT)
    write_file(STDOUT, "text")
    assert capfd.readouterr().out == "text\n"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("{}/nowhere/x.json", r"nowhere/x\.json' cannot be written: No such file or directory"),
        ("{}", "is a folder"),
        ("--limit", "'--limit': a file name or '-' is expected"),
        ("{}/file/x.json", "cannot be written: Not a directory"),
        # nothing below /dev and /proc was tried, and of names that are too long only the first 50 letters
        *((place, "cannot be written: ") for place in ("/dev/no/such.json", "/proc/report.json", "/dev/fd/1234")),
        *((place, "cannot be written: ") for place in (f"{'r' * 300}.json", "/dev/null/report.json")),
    ],
)
def test_unwritable_files_are_refused_with_the_reason(path, says, tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(SpecDecError, match=says):
        require_writable(Path(path.format(tmp_path)))
    require_writable(tmp_path / "file")
    require_writable(tmp_path / "new")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "before"


def test_two_outputs_to_one_destination_are_refused(tmp_path):
    require_distinct((tmp_path / "a", None, STDOUT, None, tmp_path / "b"))
    with pytest.raises(SpecDecError, match="'-' is named for two outputs"):
        require_distinct((STDOUT, STDOUT))
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(SpecDecError, match="named for two outputs"):
        require_distinct((tmp_path / "a", tmp_path / "link"))


def test_a_record_is_whole_although_the_system_takes_it_in_pieces(tmp_path, monkeypatch):
    class Slow(FileIO):
        def write(self, data):
            return super().write(bytes(data)[:3])

    monkeypatch.setattr(record_files, "FileIO", Slow)
    with open_records(tmp_path / "records.jsonl") as file:
        append_record(file, {"text": "long enough"})
    assert whole_lines(tmp_path / "records.jsonl") == [b'{"text": "long enough"}']
