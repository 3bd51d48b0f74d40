"""The sink, held to the contract: `pytest` in this folder. No Spark and no Java are needed."""

import json
from contextlib import contextmanager

from json_sink import JsonFile

from onceflow.testing import SinkContract


class TestJsonFile(SinkContract):
    columns = "id long, name string, ratio double, ok boolean, tags array<string>"

    def make_sink(self, folder):
        return JsonFile(folder / "rows.json")

    def read_rows(self, folder):
        path = folder / "rows.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        return [row for *_, row in rows]

    @contextmanager
    def commit_fails(self, sink, *, landed):
        save = sink.store.save

        def failing(content):
            sink.store.save = save
            if landed:
                save(content)
            raise OSError("the disk does not answer")

        sink.store.save = failing
        yield
