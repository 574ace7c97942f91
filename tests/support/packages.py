"""Try what users install: ``python -m tests.support.packages [--python P] [TEST ...]``.

Wheel and sdist are built and compared with the source. For each interpreter found, the wheel is
imported in an environment that contains nothing else. The README and the tutorial are followed as a
newcomer follows them: ``--first-steps`` does only that. The wheel passes the tests from the sdist,
unless the interpreter is the one that runs this, which ``make test`` covers, and there are others.
``--brief`` does that on one interpreter, and runs no tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from tests.support.walkthrough import Differs, Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[2]
VERSIONS = range(11, 15)
# Quick tests that show differences between interpreters and files missing from a package. Name
# others on the command line.
NAMES = ("reliable_queue", "delayed_queue", "dashboard", "django", "tls")
TESTS = ["tests/unit", *(f"tests/integration/test_{name}.py" for name in NAMES)]

# Tests that depend on when a task starts running: they also run on the other event loops, with the
# newest interpreter.
LOOP_NAMES = ("delayed_queue", "deliveries", "faults", "fetching_ahead", "reliable_cancellation")
LOOP_TESTS = [f"tests/integration/test_{name}.py" for name in LOOP_NAMES]

# Run in an environment without extras: every module that needs none must import. The others name
# the extra that they need.
BARE = """
import importlib, pkgutil
import delayq
from delayq._redisson.store import OFFER

needing = (
    "delayq.cli", "delayq.integrations", "delayq.testing.pytest_plugin", "delayq._dashboard.",
    "delayq.outbox._outbox", "delayq.outbox._table",
)
for module in pkgutil.walk_packages(delayq.__path__, "delayq."):
    if not module.name.startswith(needing) and module.name != "delayq.__main__":
        importlib.import_module(module.name)
assert "ZADD" in OFFER.text
"""


class Wrong(Exception):
    """Raised when a package is not what users should get."""


def run(
    *command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> str:
    """Run a command and return its output, which an error quotes."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Wrong(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def build(directory: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, and check their metadata. Return wheel and sdist."""
    run(sys.executable, "-m", "build", "--outdir", directory, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *directory.iterdir())
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    return wheel, sdist


def compare(wheel: Path, sdist: Path) -> None:
    """Raise if a package lacks a file of the source or contains others."""
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    included = settings["build"]["targets"]["sdist"]["include"]
    source = {name for name in tracked if name.partition("/")[0] in included}
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    differ("the sdist", files - {"PKG-INFO", "pyproject.toml", ".gitignore"}, source)
    with ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        description = archive.read(metadata).decode()
    differ("the wheel", files, {name for name in tracked if name.startswith("delayq/")})
    if "delayq/py.typed" not in files:
        raise Wrong("the wheel lacks py.typed, so type checkers ignore its types")
    if relative := re.findall(r"\]\((?!https?:|#)[^)\s]+\)", description):
        raise Wrong(f"the long description has relative links: {', '.join(relative)}")


def differ(package: str, files: set[str], expected: set[str]) -> None:
    if missing := expected - files:
        raise Wrong(f"{package} lacks {', '.join(sorted(missing))}")
    if differences := files - expected:
        raise Wrong(f"{package} has {', '.join(sorted(differences))}, which is not in the source")


def interpreters() -> dict[str, Path]:
    """Find an interpreter for each version that delayq supports, on the PATH or from pyenv."""
    homes = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    programs: dict[str, Path] = {}
    for minor in VERSIONS:
        name = f"python3.{minor}"
        on_path = [Path(path)] if (path := shutil.which(name)) else []
        for program in (*on_path, *sorted(homes.glob(f"3.{minor}.*/bin/{name}"), reverse=True)):
            # pyenv puts commands on the PATH even for versions that are not selected.
            trial = subprocess.run([program, "-c", "import venv"], capture_output=True, check=False)
            if trial.returncode == 0:
                programs[name] = program
                break
    return programs


def environment(interpreter: Path, directory: Path) -> Path:
    """Create a virtual environment and return its interpreter."""
    run(interpreter, "-m", "venv", directory)
    return directory / "bin" / "python"


def try_alone(interpreter: Path, wheel: Path, directory: Path) -> None:
    """Try the wheel without extras: modules import, and the command names the extra it lacks."""
    python = environment(interpreter, directory)
    run(python, "-m", "pip", "install", "--quiet", wheel)
    run(python, "-m", "pip", "check")
    run(python, "-I", "-W", "error", "-c", BARE)
    process = subprocess.run(
        [directory / "bin" / "delayq", "queues"], capture_output=True, text=True, check=False
    )
    advises_installing = "pip install 'delayq[cli,embedded]'" in process.stderr
    if process.returncode != 2 or not advises_installing or "Traceback" in process.stderr:
        raise Wrong(f"delayq without the extra: {process}")
    try_types(python, directory)


def try_types(python: Path, directory: Path) -> None:
    """Check a user's program against the installed wheel, as strictly as type checkers can."""
    program = shutil.copy(ROOT / "tests/unit/test_typing.py", directory / "typed_user.py")
    checkers = Path(sys.executable).parent
    mypy = (checkers / "mypy", "--strict", "--python-executable", python, "--cache-dir", os.devnull)
    run(*mypy, program, cwd=directory)
    run(checkers / "pyright", "--pythonpath", python, program, cwd=directory)


def try_sdist(interpreter: Path, sdist: Path, wheel: Path, directory: Path) -> None:
    """Check that pip builds the same wheel from the sdist."""
    python = environment(interpreter, directory)
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, sdist)
    with ZipFile(wheel) as ours, ZipFile(directory / wheel.name) as theirs:
        differ("the sdist's wheel", set(theirs.namelist()), set(ours.namelist()))


def try_tests(
    interpreter: Path,
    wheel: Path,
    sdist: Path,
    directory: Path,
    tests: list[str],
    *,
    on_other_loops: bool,
) -> str:
    """Run the sdist's tests against the wheel. Return the last lines of each run."""
    python = environment(interpreter, directory / "venv")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (source,) = directory.glob("delayq-*")
    shutil.rmtree(source / "delayq")
    # Dozens of packages, which uv installs in seconds. Users' few come by pip, as they would.
    uv = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python)
    requirements = (f"delayq[embedded,cli] @ {wheel.as_uri()}", "--group", "test")
    run(*uv, *requirements, cwd=source, environment={**as_for_uv(os.environ), **os.environ})
    location = run(python, "-c", "import delayq; print(delayq.__file__)", cwd=source).strip()
    if not Path(location).is_relative_to(directory / "venv"):
        raise Wrong(f"the tests would run against {location}")
    variables = {**os.environ}
    for name in ("VIRTUAL_ENV", "DELAYQ_URL"):
        variables.pop(name, None)
    # A server that is required for the interpreter that runs CI may not exist for another. The
    # summary tells what ran.
    variables.pop("DELAYQ_REQUIRE_SERVERS", None)
    variables["PATH"] = f"{directory / 'venv' / 'bin'}{os.pathsep}{variables['PATH']}"
    # What differs between interpreters shows in a few examples of a property.
    brief_profile = ("--hypothesis-profile", "brief")
    pytest = (python, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", *brief_profile)
    outputs = [run(*pytest, *tests, cwd=source, environment=variables)]
    loops = ["uvloop"] if on_other_loops else []
    eager = "import asyncio; print(hasattr(asyncio, 'eager_task_factory'))"
    if on_other_loops and run(python, "-c", eager, cwd=source).strip() == "True":
        loops.append("eager")
    outputs += [
        run(*pytest, "--event-loop", loop, *LOOP_TESTS, cwd=source, environment=variables)
        for loop in loops
    ]
    return "; ".join(line for output in outputs for line in output.strip().splitlines()[-2:])


def as_for_uv(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which uv uses the index that pip uses."""
    names = {
        "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
        "PIP_EXTRA_INDEX_URL": "UV_INDEX",
        "PIP_FIND_LINKS": "UV_FIND_LINKS",
        "PIP_CERT": "SSL_CERT_FILE",
    }
    return {uv: variables[pip] for pip, uv in names.items() if pip in variables}


def try_first_steps(interpreter: Path, wheel: Path, directory: Path) -> None:
    """Do what the README and the tutorial say, literally, each in an empty directory."""
    # Nothing but what the pages install: "python3" is the interpreter that is tried.
    (commands := directory / "commands").mkdir(parents=True)
    (commands / "python3").symlink_to(shutil.which(interpreter) or interpreter)
    pages = {
        "readme": as_session((ROOT / "README.md").read_text("utf-8")),
        "tutorial": (ROOT / "docs" / "tutorial.md").read_text("utf-8"),
    }
    typed: list[str] = []
    seen: list[str] = []
    for name, page in pages.items():
        (home := directory / name).mkdir()
        terminal = Terminal(
            home,
            path=f"{commands}{os.pathsep}/usr/bin{os.pathsep}/bin",
            typed=lambda line: re.sub(
                # The README installs from a checkout, which is not here.
                r"pip install '(?:delayq|\.)(\[.*?\])'",
                rf"pip install 'delayq\1 @ {wheel.as_uri()}'",
                line,
            ),
        )
        try:
            typed += terminal.follow(page, visit(seen))
        except Differs as error:
            raise Wrong(f"{name}: {error}") from error
    if not seen or not any(line.startswith("delayq worker") for line in typed):
        raise Wrong("the tutorial starts no worker, or no dashboard")


def as_session(readme: str) -> str:
    """Return what the README shows first, in the form of a page to follow."""
    (install,) = re.findall(r"^```console\n(pip install .*)\n```", readme, re.MULTILINE)
    (program,) = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (printed,) = re.findall(r"^```text\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    return f"""
Put this into `hello.py`:

```python
{program}```

```console
$ python3 -m venv .venv
$ . .venv/bin/activate
$ {install}
...
Successfully installed ...
$ python hello.py
{printed}$ delayq demo
...
delivered: 300
early: 0
lost: 0
...
```
"""


def visit(seen: list[str]) -> Callable[[str], None]:
    """Return a visitor of the dashboard whose address a command has printed."""

    def visitor(printed: str) -> None:
        for address in re.findall(r"http://127\.0\.0\.1:\d+/", printed):
            with urllib.request.urlopen(address, timeout=30) as page:  # follows to the first page
                text = page.read().decode()
            if "orders" not in text:
                raise Wrong(f"the dashboard does not show the queue:\n{text}")
            seen.append(address)

    return visitor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else None)
    parser.add_argument("--python", action="append", metavar="P", help="all that are found if none")
    parser.add_argument(
        "--brief",
        action="store_true",
        help="on one interpreter, the one that runs this if none is named, and without the tests",
    )
    parser.add_argument(
        "--first-steps", action="store_true", help="only follow the README and the tutorial"
    )
    parser.add_argument("tests", nargs="*", default=TESTS, help=f"default: {' '.join(TESTS)}")
    options = parser.parse_args()
    own_version = f"python3.{sys.version_info.minor}"
    if options.python:
        pythons = {name: Path(shutil.which(name) or name) for name in options.python}
    else:
        pythons = interpreters()
    if options.brief:
        # Without one in its own right, the one that this environment was made with.
        default_version = next(iter(options.python or [own_version]))
        pythons = {default_version: pythons.get(default_version, Path(sys.executable).resolve())}
    if not pythons:
        sys.exit("no interpreter was found")
    with tempfile.TemporaryDirectory(prefix="delayq-packages-") as name:
        directory = Path(name)
        try:
            wheel, sdist = build(directory / "dist")
            compare(wheel, sdist)
            tell(f"built {wheel.name} and {sdist.name}")
            tested = [
                version for version in pythons if options.python or version != own_version
            ] or [*pythons]
            for number, (version, interpreter) in enumerate(pythons.items()):
                mine = directory / str(number)
                try_first_steps(interpreter, wheel, mine / "first-steps")
                tell(f"{version}: the README and the tutorial work as shown")
                if options.first_steps:
                    continue
                try_alone(interpreter, wheel, mine / "alone")
                tell(f"{version}: the wheel is as it should be")
                if options.brief:
                    continue
                try_sdist(interpreter, sdist, wheel, mine / "sdist")
                tell(f"{version}: pip makes the same wheel of the sdist")
                if version not in tested:
                    continue
                last = version == tested[-1]
                result = try_tests(
                    *(interpreter, wheel, sdist, mine / "tests"),
                    options.tests,
                    on_other_loops=last,
                )
                tell(f"{version}: {result}")
        except Wrong as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
