"""`onceflow serve` and `onceflow run --page`: their output, their address, their end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from visited import TOKEN

from onceflow.cli import cli
from onceflow.errors import SetupError
from onceflow.page.server import DEFAULT_PORT, Page

ONCEFLOW = [sys.executable, "-c", "from onceflow.cli import main; main()"]


class Served:
    """`onceflow serve` as a process."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [*ONCEFLOW, "serve", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.timer = threading.Timer(60, self.process.kill)
        self.timer.start()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """The exit code, and the output since the last call."""
        self.process.send_signal(number)
        out, err = self.process.communicate()
        self.timer.cancel()
        return self.process.returncode, out, err


@contextmanager
def serve(*arguments: object) -> Iterator[Served]:
    found = Served(*arguments)
    try:
        yield found
    finally:
        found.timer.cancel()
        if found.process.poll() is None:
            found.process.kill()
            found.process.communicate()


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_it_prints_where_it_is_and_the_token_once(tmp_path: Path) -> None:
    with serve("--home", tmp_path, "--port", 0) as served:
        where, token = served.line(), served.line()
        url = re.fullmatch(
            r"page: (http://127\.0\.0\.1:\d+/) of home (.+) \(Ctrl-C ends it\)", where
        )
        assert url
        assert url[2] == str(tmp_path)
        assert re.fullmatch(r"token: [\w-]{32}", token)
        assert "No job has run here yet" in read(url[1])
        code, out, err = served.end(signal.SIGINT)
        assert (code, out, err) == (0, "", "")


def test_a_token_from_a_file_is_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o640)
    with serve("--home", tmp_path, "--port", 0, "--token-file", path, "--json") as served:
        said = json.loads(served.line())
        assert said["event"] == "serving"
        assert (said["token"], said["read_only"]) == (None, False)
        assert "[]" in read(f"{said['url']}api/jobs")
        code, out, err = served.end()
        assert (code, out) == (0, "")
        assert "chmod 600" in err
        assert TOKEN not in err


def test_read_only_has_no_token(tmp_path: Path) -> None:
    with serve("--home", tmp_path, "--port", 0, "--read-only", "--json") as served:
        said = json.loads(served.line())
        assert (said["token"], said["read_only"]) == (None, True)
        assert "read-only" in read(said["url"])
        assert served.end()[0] == 0
    refused = CliRunner().invoke(cli, ["serve", "--read-only", "--token-file", "x"])
    assert "--read-only has no token" in str(refused.exception)


def test_listening_for_other_machines_prints_a_warning(tmp_path: Path) -> None:
    with serve("--home", tmp_path, "--port", 0, "--host", "0.0.0.0", "--json") as served:
        said = json.loads(served.line())
        assert "No job" in read(said["url"])
        code, _, err = served.end()
        assert code == 0
        assert "put a proxy with TLS in front of it" in err


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with Page(tmp_path, port=0) as first:
        with pytest.raises(SetupError, match=f"port {first.port}") as refused:
            Page(tmp_path, port=first.port)
        assert "--port" in refused.value.hint


def test_if_the_usual_port_is_taken_a_free_one_is_used(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", DEFAULT_PORT))
            other.listen()
        except OSError:
            pass  # somebody else has it: just as well
        with Page(tmp_path) as page:
            assert page.moved
            assert page.port != DEFAULT_PORT
            assert "No job" in read(page.url)


def test_a_page_can_be_opened_and_closed_again_and_again(tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(3):
        with Page(tmp_path, port=0) as page:
            assert "No job" in read(page.url)
            assert page.token
    assert not [t for t in threading.enumerate() if t.name == "onceflow page"]
    assert threading.active_count() <= before + 1


def test_run_with_page_keeps_its_exit_code(tmp_path: Path) -> None:
    job, token = tmp_path / "broken.py", tmp_path / "token"
    job.write_text("x = 1\n")
    token.write_text(TOKEN)
    token.chmod(0o600)
    plain, beside, hidden = (
        subprocess.run(
            [*ONCEFLOW, "run", str(job), f"--home={tmp_path / 'home'}", "--json", *more],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        for more in ([], ["--page"], ["--page", f"--token-file={token}"])
    )
    assert plain.returncode == beside.returncode == hidden.returncode == 2
    assert json.loads(hidden.stdout.splitlines()[0])["token"] is None
    assert TOKEN not in hidden.stdout + hidden.stderr
    first, *rest = [json.loads(line) for line in beside.stdout.splitlines()]
    assert first["event"] == "page"
    assert first["url"].startswith("http://127.0.0.1:")
    assert first["token"]
    assert [event["event"] for event in rest] == ["starting", "error"]


def test_a_token_without_a_page_is_refused() -> None:
    refused = CliRunner().invoke(cli, ["run", "job.py", "--token-file", "x"])
    assert "--token-file is for the page" in str(refused.exception)
