"""The file: read at any time, changed by one process at a time."""

import fcntl
import json
from contextlib import contextmanager
from pathlib import Path

from onceflow.store.posix import make_dirs, replace_file


class Store:
    """Columns, rows and ledgers in one file, which only ever changes as a whole."""

    def __init__(self, path):
        self.path = Path(path)

    def load(self):
        if not self.path.exists():
            return {"columns": {}, "ledgers": {}, "rows": []}
        return json.loads(self.path.read_text())

    def save(self, content):
        replace_file(self.path, json.dumps(content).encode())

    @contextmanager
    def change(self):
        make_dirs(self.path.parent)
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self.load()
            yield content
            self.save(content)
