"""Local storage: byte ranges of files, read by many threads."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from largebatch.pipeline.sources.storage.local import ByteRange, LocalStorage, OpenFiles


def open_files(folder):
    """Paths of the files of a folder that this process has open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    paths = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [path for path in paths if path.startswith(str(folder))]


def test_truncated_and_missing_files_are_reported(tmp_path):
    (tmp_path / "two.tar").write_bytes(bytes(range(20)))
    storage = LocalStorage(tmp_path)
    ranges = [("two.tar", 10, 20), ("gone", 0, 1), ("two.tar", 0, 2)]
    short, missing, right = storage.read([ByteRange(*wanted) for wanted in ranges])
    assert short.endswith(" is 10 bytes too short")
    assert missing == "cannot be read: No such file or directory (ENOENT)"
    assert right.tobytes() == b"\0\1"
    assert open_files(tmp_path) == []


def test_the_number_of_open_files_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(OpenFiles, "_MOST", 3)
    for i in range(9):
        (tmp_path / str(i)).write_bytes(bytes([i]))
    storage = LocalStorage(tmp_path)
    for _ in range(2):
        found = storage.read([ByteRange(str(i), 0, 1) for i in (*range(9), 8, 0, 8)])
        assert [int(content[0]) for content in found] == [*range(9), 8, 0, 8]
    assert len(open_files(tmp_path)) == 3
    del storage
    assert open_files(tmp_path) == []


def test_threads_do_not_close_files_of_other_threads(tmp_path, monkeypatch):
    """A file closed by another thread could be read as whatever was opened after it."""
    monkeypatch.setattr(OpenFiles, "_MOST", 2)
    for number in range(20):
        (tmp_path / f"{number}.tar").write_bytes(bytes([number]) * 1000)
    storage = LocalStorage(tmp_path)

    def read(seed):
        numbers = np.random.default_rng(seed).integers(0, 20, 300).tolist()
        found = [storage.read([ByteRange(f"{n}.tar", 10, 900)])[0] for n in numbers]
        return all(
            not isinstance(f, str) and f.tobytes() == bytes([n]) * 900
            for n, f in zip(numbers, found, strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(16)))
