"""Records of runs on disk, one file per task and one line per run. A line above says what several runs share."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.suite.record import Run, run_of

RECORDS = Path(__file__).parents[1] / "records"
SHARED = ("task", "evaluated", "commit", "tuner", "machine", "versions")


class RecordBook:
    """All records of a folder. Only the driver writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[Run, dict[str, Any]] = {}
        self._shared: dict[Path, dict[str, Any]] = {}  # by the last runs of a file
        self._whole: dict[Path, int] = {}  # bytes of files that end in half a line
        for path in sorted(folder.glob("*.jsonl")):
            self._read(path)

    def _read(self, path: Path) -> None:
        whole = 0
        content = path.read_bytes()
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # the driver was killed while it wrote this
            whole += len(line)
            found = json.loads(line)
            if "contender" in found:
                record = {**self._shared[path], **found}
                self.records[run_of(record)] = record
            else:
                self._shared[path] = found
        if whole < len(content):
            self._whole[path] = whole  # nothing is cut off before something is added: the driver may still live

    def add(self, *records: dict[str, Any]) -> None:
        """Written to the disk when this returns; several at once cost hardly more than one."""
        lines: dict[Path, list[str]] = defaultdict(list)
        for record in records:
            if (run := run_of(record)) not in self.records:
                self.records[run] = record
                path = self.folder / f"{run.task}.jsonl"
                shared = {key: record[key] for key in SHARED if key in record}
                if shared != self._shared.get(path):
                    self._shared[path] = shared
                    lines[path].append(_line(shared))
                lines[path].append(_line({key: value for key, value in record.items() if key not in SHARED}))
        self.folder.mkdir(parents=True, exist_ok=True)
        for path, new in lines.items():
            if path in self._whole:
                os.truncate(path, self._whole.pop(path))
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(new)
                file.flush()
                os.fsync(file.fileno())


def _line(found: dict[str, Any]) -> str:
    return json.dumps(found, separators=(",", ":")) + "\n"
