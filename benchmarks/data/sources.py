"""Downloads the datasets from their public sources, where no local folder of them (``MECHANIC_DATA``) is set.

A file is downloaded once, to the folder "mechanic-benchmarks" in ``$XDG_CACHE_HOME`` or ``~/.cache``, and checked by
checksum on every use. Where none is known:

- LIBSVM's files, but for usps: rows, features and classes must be those its page states.
- Gutenberg and Tatoeba, who edit their files: only the form is checked. Their texts may be of another edition than the
  local folder's.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import os
import pickle
import re
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np


class File(NamedTuple):
    url: str
    checksum: str = ""  # md5 or sha256
    unpacked: bool = False  # the checksum is of what the compressed file holds


LIBSVM = {  # files and their rows (train, then test where there is one), features, classes
    "wine": (("wine.scale",), (178,), 13, 3),
    "iris": (("iris.scale",), (150,), 4, 3),
    "vehicle": (("vehicle.scale",), (846,), 18, 4),
    "glass": (("glass.scale",), (214,), 9, 6),
    "vowel": (("vowel.scale", "vowel.scale.t"), (528, 462), 10, 11),
    "letter": (("letter.scale", "letter.scale.t"), (15_000, 5_000), 16, 26),
    "dna": (("dna.scale", "dna.scale.t"), (2_000, 1_186), 180, 3),
    "pendigits": (("pendigits", "pendigits.t"), (7_494, 3_498), 16, 10),
    "usps": (("usps.bz2", "usps.t.bz2"), (7_291, 2_007), 256, 10),
    "sensorless": (("Sensorless",), (58_509,), 48, 11),
    "satimage": (("satimage.scale", "satimage.scale.t"), (4_435, 2_000), 36, 6),
}
UNSCALED = {"letter": (0, 15), "usps": (0, 1)}  # LIBSVM has them in [-1, 1], the local folder as they were
CIFAR = {  # train batches, test batch, key of the labels
    "cifar10": (tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", b"labels"),
    "cifar100": (("train",), "test", b"fine_labels"),
}
IDX = "mnist", "fashion_mnist"
NOVELS = 2701, 1342, 1400, 145, 1184  # Moby-Dick, Pride and Prejudice, Great Expectations, Middlemarch, Monte Cristo
ADULT_COLUMNS = (
    "age workclass fnlwgt education education_num marital_status occupation relationship race sex "
    "capital_gain capital_loss hours_per_week native_country income"
)

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
_GITHUB = "https://raw.githubusercontent.com/"
_CHARS = _GITHUB + "karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/"
_WIKI = _GITHUB + "pytorch/examples/77f55b912142e11fcfdf5b530231fb9c52f181e8/word_language_model/data/wikitext-2/"
_BANK = _GITHUB + "PolyAI-LDN/task-specific-datasets/57ec275d8078af65b7731c2a98be812d844a6d6b/banking_data/"
_CLINC = _GITHUB + "clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data/"

AS_THEY_ARE = {
    "tinyshakespeare": File(_CHARS + "input.txt", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "wikitext2_valid": File(_WIKI + "valid.txt", "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
    "banking77_train": File(_BANK + "train.csv", "b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b"),
    "banking77_test": File(_BANK + "test.csv", "d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d"),
    "clinc150": File(_CLINC + "data_full.json", "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0"),
}
FILES = {
    **{name: tuple(File(_LIBSVM + file) for file in files) for name, (files, *_) in LIBSVM.items()},
    "usps": (
        File(_LIBSVM + "usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197"),
        File(_LIBSVM + "usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118"),
    ),
    "cifar10": (File(_TORONTO + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    "cifar100": (File(_TORONTO + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
    "mnist": (
        File(_MNIST + "train-images-idx3-ubyte.gz", "6bbc9ace898e44ae57da46a324031adb", unpacked=True),
        File(_MNIST + "train-labels-idx1-ubyte.gz", "a25bea736e30d166cdddb491f175f624", unpacked=True),
        File(_MNIST + "t10k-images-idx3-ubyte.gz", "2646ac647ad5339dbf082846283269ea", unpacked=True),
        File(_MNIST + "t10k-labels-idx1-ubyte.gz", "27ae3e4e09519cfbb04c329615203637", unpacked=True),
    ),
    "fashion_mnist": (
        File(_FASHION + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        File(_FASHION + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        File(_FASHION + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        File(_FASHION + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    **{name: (file,) for name, file in AS_THEY_ARE.items()},
    "gutenberg5": tuple(File(f"https://www.gutenberg.org/cache/epub/{i}/pg{i}.txt") for i in NOVELS),
    "tatoeba_deu_eng": (File("https://www.manythings.org/anki/deu-eng.zip"),),
    "adult": (
        File(_UCI + "adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
        File(_UCI + "adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
    ),
}


def arrays(name: str) -> dict[str, np.ndarray]:
    """X_train, y_train and, where the original is split, X_test, y_test; labels are int64 from 0 on."""
    _require_known(name, (*LIBSVM, *CIFAR, *IDX))
    parts = _libsvm(name) if name in LIBSVM else _cifar(name) if name in CIFAR else _idx(name)
    return dict(zip(("X_train", "y_train", "X_test", "y_test"), parts, strict=False))  # two arrays where no test part


def text(name: str) -> str:
    """Lines end in a newline alone, whatever the source has there."""
    _require_known(name, (*AS_THEY_ARE, "gutenberg5", "tatoeba_deu_eng"))
    paths = _fetch(name)
    if name == "gutenberg5":
        return "\n\n\n\n".join(_novel(path) for path in paths) + "\n"
    if name == "tatoeba_deu_eng":
        return _first_two_columns(paths[0], "deu.txt")
    return paths[0].read_text(encoding="utf-8")


def table(name: str):
    """Adult as a pandas frame: what is not a number is a category; "split" says train or test."""
    _require_known(name, ("adult",))
    import pandas as pd

    parts = []
    for path, split in zip(_fetch(name), ("train", "test"), strict=True):
        above = 1 if split == "test" else 0  # a line that is no row
        part = pd.read_csv(path, names=ADULT_COLUMNS.split(), skiprows=above, skipinitialspace=True, na_filter=False)
        parts.append(part.assign(income=part["income"].str.removesuffix("."), split=split))
    frame = pd.concat(parts, ignore_index=True)
    return frame.astype(dict.fromkeys(frame.select_dtypes(exclude="number"), "category"))


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mechanic-benchmarks"


def _fetch(name: str) -> list[Path]:
    """The dataset's files, downloaded where they are not yet, with their checksums verified."""
    paths = []
    for file in FILES[name]:
        path = cache_folder() / name / file.url.rpartition("/")[2]  # datasets share file names
        if not path.exists():
            _download(file.url, path)
        if file.checksum:
            algorithm = {32: "md5", 64: "sha256"}[len(file.checksum)]
            with _open(path) if file.unpacked else path.open("rb") as content:
                _require(path, algorithm, file.checksum, hashlib.file_digest(content, algorithm).hexdigest())
        paths.append(path)
    return paths


def _download(url: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    request = urllib.request.Request(url, headers={"User-Agent": "mechanic-benchmarks"})  # some refuse urllib's own
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        try:
            with urllib.request.urlopen(request, timeout=60) as response, partial.open("wb") as file:
                shutil.copyfileobj(response, file)
                arrived, announced = file.tell(), response.headers["Content-Length"]
            if announced and arrived != int(announced):  # a lost connection looks like the end
                raise OSError(f"{arrived} of {announced} bytes arrived")
        except OSError as error:
            advice = "try again, or set MECHANIC_DATA to a folder with the data"
            raise OSError(f"cannot download {url} ({error}); {advice}") from error
        partial.replace(path)  # a file in the cache is whole


def _open(path: Path) -> IO[bytes]:
    return {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)(path, "rb")


def _require(path: Path, what: str, expected: object, found: object) -> None:
    if found != expected:
        advice = "delete it to download it again, or set MECHANIC_DATA to a folder with the data"
        raise ValueError(f"{path}: expected {what} {expected}, found {found}; {advice}")


def _require_known(name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise ValueError(f"no source for {name!r} here; there is {', '.join(names)}")


def _libsvm(name: str) -> list[np.ndarray]:
    _, rows, features, classes = LIBSVM[name]
    paths = _fetch(name)
    parts = [_sparse_rows(path, count, features) for path, count in zip(paths, rows, strict=True)]
    inputs, labels, widths = zip(*parts, strict=True)
    _require(paths[0], "features", features, max(widths))
    values, numbers = np.unique(np.concatenate(labels), return_inverse=True)  # labels may be -1 and 1, or 1, 2, 5
    _require(paths[0], "classes", classes, len(values))
    if name in UNSCALED:
        low, high = UNSCALED[name]
        inputs = [np.round(low + (part + 1) * (high - low) / 2, 4) for part in inputs]  # the files have six digits
    targets = np.split(numbers.astype(np.int64), np.cumsum(rows)[:-1])
    return [array for pair in zip(inputs, targets, strict=True) for array in pair]


def _sparse_rows(path: Path, rows: int, features: int) -> tuple[np.ndarray, list[float], int]:
    """Dense features, labels, and the highest index, from lines of "label index:value ..."; what is missing is zero."""
    inputs, labels, width = np.zeros((rows, features), np.float32), [], 0
    with _open(path) as lines:
        for line in lines:
            try:
                label, *pairs = map(float, line.replace(b":", b" ").split())
            except ValueError:  # such as a page that says the file has moved
                _require(path, f"in line {len(labels) + 1}", "label index:value ...", line[:40])
            indices = np.array(pairs[::2], np.int64)  # from 1 on
            width = max(width, int(indices.max(initial=0)))
            if len(labels) < rows and width <= features:  # else only counted, for the error
                inputs[len(labels), indices - 1] = pairs[1::2]
            labels.append(label)
    _require(path, "rows", rows, len(labels))
    return inputs, labels, width


def _cifar(name: str) -> list[np.ndarray]:
    train, test, key = CIFAR[name]
    (path,) = _fetch(name)
    batches = {}
    with tarfile.open(path) as archive:
        for member in archive:
            batch = member.name.rpartition("/")[2]
            if batch in (*train, test):
                # A pickle can run any code: these are opened only because _fetch has verified the archive's checksum.
                batches[batch] = pickle.load(archive.extractfile(member), encoding="bytes")
    parts = []
    for part in (train, (test,)):
        pixels = np.concatenate([batches[batch][b"data"] for batch in part]).reshape(-1, 3, 32, 32)
        parts.append(np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)))
        parts.append(np.concatenate([batches[batch][key] for batch in part]).astype(np.int64))
    return parts


def _idx(name: str) -> list[np.ndarray]:
    parts = []
    for path in _fetch(name):
        content = gzip.decompress(path.read_bytes())
        dimensions = content[3]
        shape = np.frombuffer(content, ">u4", dimensions, offset=4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
        parts.append(values.astype(np.int64 if dimensions == 1 else np.uint8))
    return parts


def _novel(path: Path) -> str:
    """Without what Project Gutenberg puts before and after it."""
    mark = r"^\*\*\* ?{} OF TH(?:E|IS) PROJECT GUTENBERG EBOOK.*?\*\*\* *$"
    between = re.compile(mark.format("START") + "(.*)" + mark.format("END"), re.MULTILINE | re.DOTALL)
    found = between.search(path.read_text(encoding="utf-8"))
    _require(path, "marks of start and end", True, found is not None)
    return found[1].strip("\n")


def _first_two_columns(path: Path, member: str) -> str:
    with zipfile.ZipFile(path) as archive:
        lines = archive.read(member).decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
    pairs = [line.split("\t")[:2] for line in lines]  # a third column names the authors
    _require(path, "columns at least", 2, min(map(len, pairs)))
    return "".join("\t".join(pair) + "\n" for pair in pairs)
