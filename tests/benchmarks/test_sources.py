"""The public sources of the benchmarks' data, on small files in each source's format."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import sources

LOCAL = {
    "tinyshakespeare": "text/tinyshakespeare.txt.xz",
    "wikitext2_valid": "text/wikitext2_valid.txt.xz",
    "wikitext2_test": "text/wikitext2_test.txt.xz",
    "banking77_train": "text/banking77/train.csv.xz",
    "banking77_test": "text/banking77/test.csv.xz",
    "clinc150": "text/clinc150/data_full.json.xz",
}


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Make these files the dataset's source, with their true checksums where none is said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def publish(name, files, checksum=None):
        folder = tmp_path / "public" / name
        folder.mkdir(parents=True)
        published = []
        for file, content in files.items():
            (folder / file).write_bytes(content)
            true = hashlib.sha256(content).hexdigest()
            published.append(sources.File((folder / file).as_uri(), true if checksum is None else checksum))
        monkeypatch.setitem(sources.FILES, name, tuple(published))
        return folder

    return publish


@pytest.fixture
def publish_libsvm(publish, monkeypatch):
    def publish_libsvm(name, files, rows, features, classes):
        monkeypatch.setitem(sources.LIBSVM, name, (tuple(files), rows, features, classes))
        publish(name, files)

    return publish_libsvm


def local(path):
    folder = os.environ.get("MECHANIC_DATA")
    if not folder:
        pytest.skip(f"needs {path}: set MECHANIC_DATA to a folder with it")
    return Path(folder) / path


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


# Formats.


def test_libsvm_fills_what_is_missing_with_zeros_and_numbers_the_labels(publish_libsvm):
    files = {"wine.scale": b"2.0 1:0.5 3:-1 \n-1 2:3e-1\n1\n", "wine.scale.t": b"+1 3:7\n-1 1:1 2:1 3:1\n"}
    publish_libsvm("wine", files, rows=(3, 2), features=3, classes=3)
    found = sources.arrays("wine")
    assert list(found) == ["X_train", "y_train", "X_test", "y_test"]
    assert found["X_train"].dtype == np.float32
    assert found["y_train"].dtype == np.int64
    np.testing.assert_array_equal(found["X_train"], np.float32([[0.5, 0, -1], [0, 0.3, 0], [0, 0, 0]]))
    np.testing.assert_array_equal(found["y_train"], [2, 0, 1])
    np.testing.assert_array_equal(found["X_test"], [[0, 0, 7], [1, 1, 1]])
    np.testing.assert_array_equal(found["y_test"], [1, 0])


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_libsvm_without_a_test_file_has_no_test_part(publish_libsvm, suffix, compress):
    publish_libsvm("iris", {f"iris{suffix}": compress(b"5 1:1\n7 2:1\n")}, rows=(2,), features=2, classes=2)
    found = sources.arrays("iris")
    assert list(found) == ["X_train", "y_train"]
    np.testing.assert_array_equal(found["X_train"], [[1, 0], [0, 1]])
    np.testing.assert_array_equal(found["y_train"], [0, 1])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"1 1:1\n2 2:1\n1 1:2\n", "expected rows 2, found 3"),
        (b"1 2:1\n", "expected rows 2, found 1"),
        (b"1 1:1\n2 3:1\n", "expected features 2, found 3"),
        (b"1 1:1\n2 1:1\n", "expected features 2, found 1"),
        (b"1 1:1\n1 2:1\n", "expected classes 2, found 1"),
        (b"<html>moved</html>\n", "expected in line 1 label index:value"),
    ],
)
def test_other_counts_than_published_are_refused(publish_libsvm, content, complaint):
    publish_libsvm("glass", {"glass.scale": content}, rows=(2,), features=2, classes=2)
    with pytest.raises(ValueError, match=rf"glass\.scale: {complaint}.*; delete it .* MECHANIC_DATA"):
        sources.arrays("glass")


def test_letter_is_given_in_its_own_units(publish_libsvm):
    scaled = b"".join(b"%d 1:%.6g\n" % (x % 2, 2 * x / 15 - 1) for x in range(16))
    publish_libsvm("letter", {"letter.scale": scaled}, rows=(16,), features=1, classes=2)
    np.testing.assert_array_equal(sources.arrays("letter")["X_train"][:, 0], np.arange(16))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_gives_images_and_labels(publish, name):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(256, size=(5, 28, 28)), rng.integers(10, size=5)
    arrays = {
        "train-images": images[:3],
        "train-labels": labels[:3],
        "t10k-images": images[3:],
        "t10k-labels": labels[3:],
    }
    publish(name, {f"{part}.gz": gzip.compress(idx(array)) for part, array in arrays.items()})
    found = sources.arrays(name)
    assert found["X_train"].dtype == np.uint8
    assert found["y_train"].dtype == np.int64
    for key, expected in zip(("X_train", "y_train", "X_test", "y_test"), arrays.values(), strict=True):
        np.testing.assert_array_equal(found[key], expected)


def batch(images, labels, key):
    """A pickle as old as CIFAR's: keys are bytes, NumPy's module has its old name."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    content = pickle.dumps({b"data": planes, key: labels, b"coarse_labels": [9] * len(labels)}, protocol=2)
    return content.replace(b"numpy._core.", b"numpy.core.")


def test_cifar10_joins_its_batches_in_order(publish):
    images = np.random.default_rng(0).integers(256, size=(6, 32, 32, 3), dtype=np.uint8)
    members = {f"cifar-10-batches-py/data_batch_{i}": batch(images[[i - 1]], [i], b"labels") for i in (4, 1, 5, 2, 3)}
    members["cifar-10-batches-py/test_batch"] = batch(images[[5]], [0], b"labels")
    members["cifar-10-batches-py/readme.html"] = b"not a pickle"
    publish("cifar10", {"cifar-10-python.tar.gz": tar(members)})
    found = sources.arrays("cifar10")
    np.testing.assert_array_equal(found["X_train"], images[:5])
    np.testing.assert_array_equal(found["y_train"], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(found["X_test"], images[5:])
    np.testing.assert_array_equal(found["y_test"], [0])
    assert found["y_test"].dtype == np.int64


def test_cifar100_has_the_fine_labels(publish):
    images = np.zeros((2, 32, 32, 3), np.uint8)
    members = {f"cifar-100-python/{part}": batch(images, [98, 99], b"fine_labels") for part in ("train", "test")}
    publish("cifar100", {"cifar-100-python.tar.gz": tar(members)})
    found = sources.arrays("cifar100")
    assert found["X_train"].shape == (2, 32, 32, 3)
    np.testing.assert_array_equal(found["y_train"], [98, 99])


def test_a_cifar_archive_of_another_checksum_is_not_unpickled(publish, tmp_path):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    members = {f"cifar-100-python/{part}": pickle.dumps(Harm()) for part in ("train", "test")}
    publish("cifar100", {"cifar-100-python.tar.gz": tar(members)}, checksum="0" * 32)
    with pytest.raises(ValueError, match="expected md5 0000"):
        sources.arrays("cifar100")
    assert not (tmp_path / "harm").exists()


def test_text_keeps_everything_but_the_kind_of_newline(publish):
    publish("banking77_train", {"train.csv": 'text,category\r\n"Was, bitte?",größe\r\n'.encode()})
    assert sources.text("banking77_train") == 'text,category\n"Was, bitte?",größe\n'


def test_novels_lose_what_gutenberg_adds(publish):
    def book(kind, body):
        marks = (f"*** {mark} OF {kind} PROJECT GUTENBERG EBOOK A\r\nLONG TITLE ***" for mark in ("START", "END"))
        return f"\ufeffTitle\r\n{next(marks)}\r\n\r\n\r\n{body}\r\n\r\n{next(marks)}\r\nLicence ***\r\n".encode()

    publish("gutenberg5", {"pg1.txt": book("THE", "Café.\r\n\r\n* * *\r\nEnd."), "pg2.txt": book("THIS", "  Two.")})
    assert sources.text("gutenberg5") == "Café.\n\n* * *\nEnd.\n\n\n\n  Two.\n"


def test_a_novel_without_its_marks_is_refused(publish):
    publish("gutenberg5", {"pg1.txt": b"<html>moved</html>"})
    with pytest.raises(ValueError, match="marks of start and end"):
        sources.text("gutenberg5")


def test_tatoeba_keeps_the_two_sentences(publish):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("_about.txt", "about")
        archive.writestr("deu.txt", "Hi.\tGrüß\u2028Gott!\tCC-BY 2.0\nRun!\tLauf!\n")
    publish("tatoeba_deu_eng", {"deu-eng.zip": buffer.getvalue()})
    assert sources.text("tatoeba_deu_eng") == "Hi.\tGrüß\u2028Gott!\nRun!\tLauf!\n"


def test_iwslt14_pairs_sentences_and_drops_tags(publish):
    german = "<url>x</url>\n<title>T</title>\n Hallo\u2028Welt. \n\nÄhm.\n<reviewer></reviewer>\n"
    english = "<url>x</url>\n<title>T</title>\nHello world.\nAlone.\nErm.\n"
    members = {"de-en/train.tags.de-en.de": german.encode(), "de-en/train.tags.de-en.en": english.encode()}
    publish("iwslt14", {"de-en.tgz": tar({"de-en/README": b"", **members})})
    assert sources.iwslt14() == [("Hallo\u2028Welt.", "Hello world."), ("Ähm.", "Erm.")]


def test_iwslt14_with_unequal_sides_is_refused(publish):
    members = {"de-en/train.tags.de-en.de": b"Eins.\nZwei.\n", "de-en/train.tags.de-en.en": b"One.\n"}
    publish("iwslt14", {"de-en.tgz": tar(members)})
    with pytest.raises(ValueError, match="expected English lines beside the German ones 2, found 1"):
        sources.iwslt14()


def adult_files(frame):
    """The source's two files: test has a line above its rows, and points after its labels."""
    contents = []
    for split, above, point in (("train", "", ""), ("test", "|1x3 Cross validator\n", ".")):
        rows = frame[frame["split"] == split].drop(columns="split").astype(object).to_numpy()
        contents.append(above + "".join(", ".join(map(str, row)) + point + "\n" for row in rows) + "\n")
    return {file: content.encode() for file, content in zip(("adult.data", "adult.test"), contents, strict=True)}


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


def test_a_wrong_checksum_says_which_file_what_and_what_to_do(publish, tmp_path):
    publish("clinc150", {"data_full.json": b"{}"}, checksum="0" * 64)
    with pytest.raises(ValueError) as error:
        sources.text("clinc150")
    cached = tmp_path / "cache" / "mechanic-benchmarks" / "clinc150" / "data_full.json"
    found = hashlib.sha256(b"{}").hexdigest()
    assert str(error.value).startswith(f"{cached}: expected sha256 {'0' * 64}, found {found}; delete it")
    assert "MECHANIC_DATA" in str(error.value)


def test_a_second_call_downloads_nothing_but_checks_again(publish, tmp_path):
    folder = publish("clinc150", {"data_full.json": b"{}"})
    assert sources.text("clinc150") == "{}"
    (folder / "data_full.json").unlink()
    assert sources.text("clinc150") == "{}"
    (sources.cache_folder() / "clinc150" / "data_full.json").write_bytes(b"[]")
    with pytest.raises(ValueError, match="expected sha256"):
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


def test_files_of_one_name_do_not_meet_in_the_cache(publish):
    publish("wikitext2_test", {"test": b"wiki"})
    publish("banking77_test", {"test": b"bank"})
    assert [sources.text(name) for name in ("wikitext2_test", "banking77_test")] == ["wiki", "bank"]


@pytest.mark.parametrize(
    ("read", "known"), [(sources.arrays, "wine"), (sources.text, "clinc150"), (sources.table, "adult")]
)
def test_an_unknown_name_is_told_the_known_ones(read, known):
    with pytest.raises(ValueError, match=rf"no source for 'imagenet' here; there is .*{known}"):
        read("imagenet")


def test_the_cache_is_in_the_home_folder_where_none_is_set(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.cache_folder() == tmp_path / ".cache" / "mechanic-benchmarks"


# The local folder's files against the sources' checksums.


@pytest.mark.parametrize("name", LOCAL)
def test_local_text_has_the_source_checksum(name):
    content = lzma.decompress(local(LOCAL[name]).read_bytes())
    assert hashlib.sha256(content).hexdigest() == sources.FILES[name][0].checksum


def test_local_mnist_has_the_source_checksums():
    with np.load(local("vision/mnist.npz")) as arrays:
        found = [hashlib.md5(idx(arrays[key])).hexdigest() for key in ("X_train", "y_train", "X_test", "y_test")]
    assert found == [file.checksum for file in sources.FILES["mnist"]]


def test_local_adult_is_what_the_source_gives(publish):
    pd = pytest.importorskip("pandas")
    frame = pd.read_parquet(local("tabular/adult.parquet"))
    checksums = [file.checksum for file in sources.FILES["adult"]]
    files = adult_files(frame)
    assert [hashlib.sha256(content).hexdigest() for content in files.values()] == checksums
    publish("adult", files)
    found = sources.table("adult")
    assert found.dtypes.equals(frame.dtypes)
    assert found.equals(frame)
