"""What is imported: the command line without Spark, executors without the driver's libraries.

Which room may import which is checked by `lint-imports`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import onceflow
from onceflow.contract.extras import EXTRAS, require
from onceflow.errors import SetupError
from onceflow.service.checkup import examine

ROOT = Path(onceflow.__file__).parent

LIBRARIES = {"pyarrow", "numpy"}  # for what runs in executors
CLIENTS = {"confluent_kafka", "psycopg"}  # of servers, imported when one is talked with
OPTIONAL = {module for modules in EXTRAS.values() for module in modules}
# Classes that Spark derives from, and job files, which nobody imports.
USE_SPARK = {
    ROOT / "log" / "data_source.py", ROOT / "protocol" / "ticks.py",
    ROOT / "harness" / "builtin_jobs.py",
}  # fmt: skip


def imports(path: Path, *, whole: bool) -> Iterator[str]:
    """Modules that a file imports: at its top level, or anywhere (`whole`)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if whole else _top(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _is_module(inner) else str(node.module)


def _top(tree: ast.Module) -> Iterator[ast.stmt]:
    """What runs when the module is imported: not functions, not `if TYPE_CHECKING`."""
    left: list[ast.stmt] = list(tree.body)
    while left:
        node = left.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def _is_module(name: str) -> bool:
    parts = name.split(".")
    path = ROOT.joinpath(*parts[1:])
    return parts[0] == "onceflow" and (path.is_dir() or path.with_suffix(".py").is_file())


def files_of(module: str) -> list[Path]:
    path = ROOT.joinpath(*module.split(".")[1:])
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


ALL = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize(
    "module",
    [
        "onceflow.contract",
        "onceflow.files",
        "onceflow.folders",
        "onceflow.kafka",
        "onceflow.log",
        "onceflow.postgres",
        "onceflow.sqlite",
        "onceflow.state",
        "onceflow.store",
        "onceflow.tables",
    ],
)
def test_what_runs_in_executors_imports_little(module: str) -> None:
    for path in files_of(module):
        for name in imports(path, whole=False):
            top = name.partition(".")[0]
            known = {*sys.stdlib_module_names, *LIBRARIES, "onceflow"}
            if path not in USE_SPARK:
                assert top in known, f"{path} imports {name}"
        for name in imports(path, whole=True):
            top = name.partition(".")[0]
            known = {*sys.stdlib_module_names, *LIBRARIES, *CLIENTS, "onceflow", "pyspark"}
            assert top in known, f"{path} imports {name}"


@pytest.mark.parametrize("path", ALL, ids=lambda p: str(p.relative_to(ROOT)))
def test_spark_is_imported_late_and_the_command_line_by_nobody(path: Path) -> None:
    for name in imports(path, whole=False):
        if path not in USE_SPARK:
            assert name.partition(".")[0] not in ("pyspark", "py4j"), f"{path} imports {name}"
    if not path.is_relative_to(ROOT / "cli"):
        assert not any(within(name, {"onceflow.cli"}) for name in imports(path, whole=True))


def test_only_the_room_of_spark_reaches_into_the_jvm() -> None:
    for path in ALL:
        if path.is_relative_to(ROOT / "spark"):
            continue
        names = {
            n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        }
        found = names & {"_jvm", "_jsparkSession", "_jdf", "_jsq", "_jquery", "_gateway"}
        assert not found, f"{path} uses {found}"


def loaded_by(statement: str) -> set[str]:
    """Which packages a fresh Python has loaded after the statement."""
    code = f"{statement}; import sys; print(*{{n.partition('.')[0] for n in sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import onceflow",
        "import onceflow.cli",
        "import onceflow.sinks, onceflow.sources",
        "import onceflow.testing",
        "from onceflow.protocol import lease",
        "from onceflow.spark.checkpoint import Checkpoint",
    ],
)
def test_importing_loads_neither_spark_nor_arrow(statement: str) -> None:
    heavy = {"pyspark", "py4j", "pyarrow", "numpy", "pandas", "pytest", *OPTIONAL}
    assert loaded_by(statement).isdisjoint(heavy)


def test_only_the_page_imports_packages_of_an_extra_before_they_are_needed() -> None:
    for path in ALL:
        if not path.is_relative_to(ROOT / "page"):
            found = {name.partition(".")[0] for name in imports(path, whole=False)} & OPTIONAL
            assert not found, f"{path} imports {found}"


def test_extras_install_the_modules_that_they_are_said_to_install() -> None:
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    core = {_package(line) for line in project["dependencies"]}
    assert core == {"pyspark", "pyarrow", "numpy", "click"}
    extras = project["optional-dependencies"]
    assert set(extras) == {*EXTRAS, "demo"}
    for extra, modules in EXTRAS.items():
        assert _packages(extra, extras) == set(modules)


def _packages(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """The modules of an extra and of the extras that it names."""
    found = set()
    for line in extras[extra]:
        inner = re.match(r"onceflow\[(.*)\]", line)
        found |= (
            {p for e in inner[1].split(",") for p in _packages(e, extras)}
            if inner
            else {_package(line)}
        )
    return found


def _package(line: str) -> str:
    return re.split(r"[\[<>=]", line)[0].replace("-", "_")


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(extra, "this")
    monkeypatch.setitem(sys.modules, EXTRAS[extra][0], None)
    with pytest.raises(SetupError, match=EXTRAS[extra][0]) as refused:
        require(extra, "this")
    assert refused.value.hint == f"pip install 'onceflow[{extra}]'"


def test_doctor_names_the_extras_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {f.what: f for f in examine(str(tmp_path))}
    assert found["extras"].says == "kafka, postgres, page, verify"
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    found = {f.what: f for f in examine(str(tmp_path))}
    assert found["extras"].says == (
        "kafka, postgres; for page, verify: pip install 'onceflow[page,verify]'"
    )


@pytest.mark.parametrize("command", ["serve", "run job.py --page", "demo"])
def test_the_page_is_refused_without_its_extra(tmp_path: Path, command: str) -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from onceflow.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 4
    assert "the page needs packages that are not installed: uvicorn" in ran.stderr
    assert "pip install 'onceflow[page]'" in ran.stderr


def test_the_contract_of_sinks_is_imported_when_asked_for_and_says_that_it_needs_pytest() -> None:
    assert "pytest" in loaded_by("from onceflow.testing import SinkContract")
    code = "import sys; sys.modules['pytest'] = None; from onceflow.testing import SinkContract"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "SetupError: the contract of sinks needs pytest\n  fix: pip install pytest" in ran.stderr


def test_a_driver_imports_nothing_from_where_it_is_started(tmp_path: Path) -> None:
    theirs = tmp_path / "onceflow"
    theirs.mkdir()
    (theirs / "__init__.py").write_text("raise SystemExit('of somebody else')")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "broken.py").write_text("raise ValueError('of the job')")
    ran = subprocess.run(
        [sys.executable, "-P", "-c", "from onceflow.cli import main; main()",
         "run", "jobs/broken.py", "--home", "home", "--json"],
        check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "of the job" in ran.stdout + ran.stderr
    assert "of somebody else" not in ran.stdout + ran.stderr
