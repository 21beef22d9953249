"""The public sources of the benchmarks' data, on small files in each source's format."""

import bz2
import gzip
import hashlib
import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import sources


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Make these files the dataset's source, with their true checksums where none is said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def publish(name, files, checksum=None, **of_libsvm):
        folder = tmp_path / "public" / name
        folder.mkdir(parents=True)
        published = []
        for file, content in files.items():
            (folder / file).write_bytes(content)
            true = hashlib.sha256(content).hexdigest()
            published.append(sources.File((folder / file).as_uri(), true if checksum is None else checksum))
        monkeypatch.setitem(sources.FILES, name, tuple(published))
        if of_libsvm:
            monkeypatch.setitem(sources.LIBSVM, name, (tuple(files), *of_libsvm.values()))
        return folder

    return publish


def tar(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def assert_are(found, expected, dtypes=()):
    assert list(found) == ["X_train", "y_train", "X_test", "y_test"][: len(expected)]
    for array, values in zip(found.values(), expected, strict=True):
        np.testing.assert_array_equal(array, values)
    assert [array.dtype for array in found.values()][: len(dtypes)] == list(dtypes)


# Formats.


def test_libsvm_fills_what_is_missing_with_zeros_and_numbers_the_labels(publish):
    files = {"wine.scale": b"2.0 1:0.5 3:-1 \n-1 2:3e-1\n1\n", "wine.scale.t": b"+1 3:7\n-1 1:1 2:1 3:1\n"}
    publish("wine", files, rows=(3, 2), features=3, classes=3)
    train = np.float32([[0.5, 0, -1], [0, 0.3, 0], [0, 0, 0]])
    expected = [train, [2, 0, 1], [[0, 0, 7], [1, 1, 1]], [1, 0]]
    assert_are(sources.arrays("wine"), expected, [np.float32, np.int64])
    publish("iris", {"iris.bz2": bz2.compress(b"5 1:1\n7 2:1\n")}, rows=(2,), features=2, classes=2)
    assert_are(sources.arrays("iris"), [[[1, 0], [0, 1]], [0, 1]])  # without a test file


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"1 1:1\n2 2:1\n1 1:2\n", "expected rows 2, found 3"),
        (b"1 1:1\n2 3:1\n", "expected features 2, found 3"),
        (b"1 1:1\n1 2:1\n", "expected classes 2, found 1"),
        (b"<html>moved</html>\n", "expected in line 1 label index:value"),
    ],
)
def test_other_counts_than_published_are_refused(publish, content, complaint):
    publish("glass", {"glass.scale": content}, rows=(2,), features=2, classes=2)
    with pytest.raises(ValueError, match=rf"glass\.scale: {complaint}.*; delete it .* MECHANIC_DATA"):
        sources.arrays("glass")


def test_letter_is_given_in_its_own_units(publish):
    scaled = b"".join(b"%d 1:%.6g\n" % (x % 2, 2 * x / 15 - 1) for x in range(16))
    publish("letter", {"letter.scale": scaled}, rows=(16,), features=1, classes=2)
    np.testing.assert_array_equal(sources.arrays("letter")["X_train"][:, 0], np.arange(16))


def test_idx_gives_images_and_labels(publish):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(256, size=(5, 28, 28)), rng.integers(10, size=5)
    arrays = [images[:3], labels[:3], images[3:], labels[3:]]
    publish("mnist", {f"{part}.gz": gzip.compress(idx(array)) for part, array in enumerate(arrays)})
    assert_are(sources.arrays("mnist"), arrays, [np.uint8, np.int64])


def batch(images, labels, key):
    """A pickle as old as CIFAR's: keys are bytes, NumPy's module has its old name."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    content = pickle.dumps({b"data": planes, key: labels, b"coarse_labels": [9] * len(labels)}, protocol=2)
    return content.replace(b"numpy._core.", b"numpy.core.")


def test_cifar_joins_its_batches_in_order_and_has_the_fine_labels(publish):
    images = np.random.default_rng(0).integers(256, size=(6, 32, 32, 3), dtype=np.uint8)
    members = {f"cifar-10-batches-py/data_batch_{i}": batch(images[[i - 1]], [i], b"labels") for i in (4, 1, 5, 2, 3)}
    members["cifar-10-batches-py/test_batch"] = batch(images[[5]], [0], b"labels")
    members["cifar-10-batches-py/readme.html"] = b"not a pickle"
    publish("cifar10", {"cifar-10-python.tar.gz": tar(members)})
    expected = [images[:5], [1, 2, 3, 4, 5], images[[5]], [0]]
    assert_are(sources.arrays("cifar10"), expected, [np.uint8, np.int64, np.uint8, np.int64])
    members = {f"cifar-100-python/{part}": batch(images[:2], [98, 99], b"fine_labels") for part in ("train", "test")}
    publish("cifar100", {"cifar-100-python.tar.gz": tar(members)})
    np.testing.assert_array_equal(sources.arrays("cifar100")["y_train"], [98, 99])


def test_a_cifar_archive_of_another_checksum_is_not_unpickled(publish, tmp_path):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    members = {f"cifar-100-python/{part}": pickle.dumps(Harm()) for part in ("train", "test")}
    publish("cifar100", {"cifar-100-python.tar.gz": tar(members)}, checksum="0" * 32)
    with pytest.raises(ValueError, match="expected md5 0000"):
        sources.arrays("cifar100")
    assert not (tmp_path / "harm").exists()


def test_texts_lose_what_their_sources_add_and_keep_the_rest(publish):
    publish("banking77_train", {"train.csv": 'text,category\r\n"Was, bitte?",größe\r\n'.encode()})
    assert sources.text("banking77_train") == 'text,category\n"Was, bitte?",größe\n'

    def book(kind, body):
        marks = (f"*** {mark} OF {kind} PROJECT GUTENBERG EBOOK A\r\nLONG TITLE ***" for mark in ("START", "END"))
        return f"\ufeffTitle\r\n{next(marks)}\r\n\r\n\r\n{body}\r\n\r\n{next(marks)}\r\nLicence ***\r\n".encode()

    publish("gutenberg5", {"pg1.txt": book("THE", "Café.\r\n\r\n* * *\r\nEnd."), "pg2.txt": book("THIS", "  Two.")})
    assert sources.text("gutenberg5") == "Café.\n\n* * *\nEnd.\n\n\n\n  Two.\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("_about.txt", "about")
        archive.writestr("deu.txt", "Hi.\tGrüß\u2028Gott!\tCC-BY 2.0\nRun!\tLauf!\n")
    publish("tatoeba_deu_eng", {"deu-eng.zip": buffer.getvalue()})
    assert sources.text("tatoeba_deu_eng") == "Hi.\tGrüß\u2028Gott!\nRun!\tLauf!\n"


def test_adult_is_numbers_and_categories(publish):
    pytest.importorskip("pandas")
    person = "Private, 12, HS-grad, 9, Divorced, ?, Husband, White, Male, 0, 0, 40, Cuba"
    train = f"39, {person}, <=50K\n40, {person}, >50K\n\n"
    publish("adult", {"adult.data": train.encode(), "adult.test": f"|1x3\n25, {person}, <=50K.\n\n".encode()})
    frame = sources.table("adult")
    assert frame["age"].tolist() == [39, 40, 25]
    assert frame["income"].tolist() == ["<=50K", ">50K", "<=50K"]
    assert frame["split"].tolist() == ["train", "train", "test"]
    assert frame["occupation"].tolist() == ["?"] * 3
    numbers = ["age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
    assert [column for column in frame if frame[column].dtype == np.int64] == numbers
    assert [column for column in frame if frame[column].dtype != "category"] == numbers


# Files.


@pytest.mark.parametrize("unpacked", [False, True])
def test_checksum_of_the_file_or_of_what_it_holds(publish, monkeypatch, unpacked):
    content = idx(np.arange(3))
    folder = publish("mnist", {"labels.gz": gzip.compress(content)})
    of = content if unpacked else (folder / "labels.gz").read_bytes()
    file = sources.File((folder / "labels.gz").as_uri(), hashlib.md5(of).hexdigest(), unpacked)
    monkeypatch.setitem(sources.FILES, "mnist", (file,))
    np.testing.assert_array_equal(sources.arrays("mnist")["X_train"], np.arange(3))
    monkeypatch.setitem(sources.FILES, "mnist", (file._replace(unpacked=not unpacked),))
    with pytest.raises(ValueError, match="expected md5"):
        sources.arrays("mnist")


def test_a_second_call_downloads_nothing_but_checks_again(publish):
    folder = publish("clinc150", {"data_full.json": b"{}"})
    assert sources.text("clinc150") == "{}"
    (folder / "data_full.json").unlink()
    assert sources.text("clinc150") == "{}"
    cached = sources.cache_folder() / "clinc150" / "data_full.json"
    cached.write_bytes(b"[]")
    with pytest.raises(ValueError, match=f"{cached}: expected sha256 .*, found .*; delete it .* MECHANIC_DATA"):
        sources.text("clinc150")


@pytest.mark.parametrize("lost", ["source", "connection"])
def test_a_failed_download_leaves_nothing_and_says_what_to_do(publish, monkeypatch, lost):
    folder = publish("clinc150", {"data_full.json": b"{}"})
    if lost == "source":
        (folder / "data_full.json").unlink()
    else:
        monkeypatch.setattr(sources.shutil, "copyfileobj", lambda response, file: file.write(response.read(1)))
    with pytest.raises(OSError, match=r"cannot download file:.*data_full\.json.*MECHANIC_DATA"):
        sources.text("clinc150")
    assert not list((sources.cache_folder() / "clinc150").iterdir())
